"""Mixed precision: in which dtype a unit computes, sends gradients and keeps its buffers.

Computing in a dtype of half the size halves what is gathered, and is faster on most GPUs. Small
updates would get lost in it, so the optimizer always sees the shard, and its gradient, in the
parameter's own dtype. Only what is gathered, and what is reduced, may be of another one.

Hand `mixed_precision` to the constructor: torch's `MixedPrecision`, or a dict with some of
these settings. A policy may return another one for a single unit.

| setting | what it is | when left out |
| --- | --- | --- |
| `param_dtype` | dtype of the gathered parameters, and of the computation | as the parameter |
| `reduce_dtype` | dtype in which gradients are summed over ranks | as `param_dtype` |
| `buffer_dtype` | dtype of floating-point buffers from the first forward on | as they are |
| `cast_forward_inputs` | whether every unit casts its inputs to `param_dtype` | no |
| `cast_root_forward_inputs` | whether the root does | yes |

State dicts and `summon_full_params` show parameters in their own dtype.

No class of modules is exempt. Torch's class gives batch norm a unit of its own in full precision;
here a policy that returns `{"mixed_precision": {"param_dtype": torch.float32,
"cast_forward_inputs": True}}` for it does the same.

A gradient scaler has to see all shards, or one rank skips a step that the others take. Torch's
`ShardedGradScaler` does; the plain `GradScaler` looks at one rank's shards only.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fsdp_ref.errors import PrecisionError


@dataclass(frozen=True)
class Precision:
    """The dtypes of one unit; `None` leaves a dtype as it is.

    Attributes:
        param_dtype: Of gathered parameters.
        reduce_dtype: Of gradients while they are reduced.
        buffer_dtype: Of floating-point buffers.
        cast_forward_inputs: Whether the unit casts its floating-point inputs.
        cast_root_forward_inputs: Whether it does so when it is the root.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of gathered parameters.

        Args:
            dtype: The parameters' own dtype.

        Returns:
            `param_dtype`, or ``dtype`` where that is left out.
        """
        return self.param_dtype or dtype

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients are reduced.

        Args:
            dtype: The parameters' own dtype.

        Returns:
            `reduce_dtype`, or the dtype to compute in where that is left out.
        """
        return self.reduce_dtype or self.compute_dtype(dtype)

    def cast_inputs(self, args: Any, kwargs: Any, *, is_root: bool) -> tuple[Any, Any]:
        """Cast the floating-point tensors among a forward's arguments, if asked to.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            is_root: Whether the unit is the outermost one.

        Returns:
            The arguments to use instead.
        """
        wanted = self.cast_forward_inputs or (is_root and self.cast_root_forward_inputs)
        if self.param_dtype is None or not wanted:
            return args, kwargs
        args, kwargs = tree_map(self._cast, (args, kwargs))
        return args, kwargs

    def _cast(self, leaf: Any) -> Any:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(self.param_dtype) if floating else leaf


_NAMES = [field.name for field in fields(Precision)]


def as_precision(mixed_precision: Any, where: str) -> Precision:
    """Turn a `mixed_precision` argument into dtypes.

    Args:
        mixed_precision: `None`, torch's `MixedPrecision`, a `Precision`, or a dict with the
            settings in the table of this module.
        where: Who asks, for messages.

    Returns:
        The dtypes.

    Raises:
        PrecisionError: If it is something else, a setting is unknown, a dtype is not a
            floating-point one, or `keep_low_precision_grads` is asked for.

    Examples:
        >>> as_precision({"param_dtype": torch.bfloat16}, "unit 'layer'").reduce_dtype is None
        True
    """
    if mixed_precision is None:
        return Precision()
    if isinstance(mixed_precision, Precision):
        return mixed_precision
    settings = mixed_precision
    if not isinstance(settings, Mapping):
        settings = {name: getattr(settings, name, None) for name in (*_NAMES, _KEEP)}
        if not hasattr(mixed_precision, "param_dtype"):
            raise _refusal(where, repr(mixed_precision), "Torch's MixedPrecision works as well.")
    _check(settings, where)
    return Precision(**{name: settings[name] for name in _NAMES if settings.get(name) is not None})


_KEEP = "keep_low_precision_grads"


def _check(settings: Mapping[str, Any], where: str) -> None:
    for name, value in settings.items():
        if name == _KEEP and value:
            raise _refusal(where, f"{_KEEP}=True", "Gradients are kept in the parameter's dtype.")
        if name not in (*_NAMES, _KEEP):
            nearest = difflib.get_close_matches(name, _NAMES, n=1)
            hint = f"Did you mean {nearest[0]!r}?" if nearest else f"Known: {', '.join(_NAMES)}."
            raise _refusal(where, f"the setting {name!r}", hint)
        if name.endswith("_dtype") and value is not None and not _is_floating(value):
            raise _refusal(where, f"{name}={value!r}", "For example torch.bfloat16.")


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value.is_floating_point


def _refusal(where: str, found: str, fix: str) -> PrecisionError:
    return PrecisionError.at(
        f"{where}, mixed_precision",
        expected="floating-point dtypes for parameters, reduction and buffers",
        found=found,
        fix=fix,
    )
