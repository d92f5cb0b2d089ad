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
| `output_dtype` | dtype of the floating-point tensors that the unit returns | as computed |
| `keep_low_precision_grads` | whether gradients keep the dtype they were reduced in | no |
| `cast_forward_inputs` | whether every unit casts its inputs to `param_dtype` | no |
| `cast_root_forward_inputs` | whether the root does | yes |
| `cast_forward_outputs` | whether every unit casts its outputs to what its inputs were | no |
| `full_precision_in_eval` | whether `eval()` switches all of this off | no |
| `_module_classes_to_ignore` | classes that a policy exempts, see below | batch norm |

# In one word

| `mixed_precision` | parameters | reduction | buffers | whose word |
| --- | --- | --- | --- | --- |
| `None`, `False` | own | own | own | |
| `'full'` | float32 | float32 | float32 | Composer: `FULL` |
| `torch.bfloat16`, `'bf16'` | bfloat16 | bfloat16 | own | any dtype, also in a dict |
| `'default'` | bfloat16 | float32 | bfloat16 | Composer: `DEFAULT` |
| `'pure'` | bfloat16 | bfloat16 | bfloat16 | Composer: `PURE` |
| `True` | float16 | float16 | float16 | FairScale |

Words may be written in either case. `'full'` makes everything float32, as Composer documents it,
whatever dtype the model has, and casts inputs to it; Composer's own code leaves dtypes as they are.
Composer takes the low dtype of its words from the trainer's `precision`; here
it is bfloat16. What `True` means is read off FairScale's own constructor: `compute_dtype` becomes
float16, `buffer_dtype` follows it, and gradients are reduced in it unless `fp32_reduce_scatter`
says otherwise, which is `reduce_dtype` here.

# What is cast, and when

The root casts its floating-point inputs; from there on the activations have the low dtype by
themselves. Integers, such as token ids, are never cast. A float that has to stay exact, such as a
table of positions, is better made inside the model, or `cast_root_forward_inputs` switched off.
A unit whose dtype differs from that of the units around it needs `cast_forward_inputs`, or its
first operation finds two dtypes.

Buffers are never sharded. They are cast once, at the first forward, if `buffer_dtype` is given.
State dicts and `summon_full_params` show parameters in their own dtype, and state dicts show
buffers in theirs.

A unit may hold parameters of several dtypes. Each dtype has its own flat parameter; with
`param_dtype` all of them compute in that one, and the optimizer sees each in its own.

# Batch norm

Batch norm in a low dtype loses its statistics, and some of its kernels refuse mixed dtypes. So a
policy exempts it, as in torch: each module of a class in `_module_classes_to_ignore` becomes a
unit of its own that computes in the dtype of its parameters. Its inputs are cast to that dtype,
and its outputs back. Where the policy, or the module's `wrapper_config`, says a `mixed_precision`
for the module itself, that one holds. Without a policy nothing is exempt, because nothing would
make the unit.

# Autocast

`torch.autocast` chooses a dtype for each operation; mixed precision sets that of the weights. They
work together: inside autocast a matrix product is computed in autocast's dtype, whatever the
weights have. Autocast alone makes low copies of full weights, and autograd keeps those that the
backward needs. So it saves neither messages nor memory for weights; `param_dtype` does.

# Evaluation

With `full_precision_in_eval` a unit in `eval()` mode gathers its parameters in their own dtype,
casts no inputs, and its buffers are as they were. The environment variable
`FSDP_USE_FULL_PREC_IN_EVAL=1`, which torch's class reads, switches it on for every unit that is
constructed while it is set.

# Gradient scaler

A gradient scaler has to see all shards, or one rank skips a step that the others take. Torch's
`ShardedGradScaler` does; the plain `GradScaler` looks at one rank's shards only.

Tip: Compute in a low dtype, and leave the optimizer its own
    Weights are gathered, and the layer computes, in `param_dtype`; the shard, its gradient and the
    state dict keep the dtype of the parameter. Say `reduce_dtype` as well if the sum over many
    ranks should be exact: left out, gradients are reduced in the low dtype too.

    Proof: precision/dtypes_of_a_step
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fsdp_ref.containers import map_tensors, tensors_in
from fsdp_ref.errors import PrecisionError

_FULL_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"


@dataclass(frozen=True)
class Precision:
    """The dtypes of one unit; `None` leaves a dtype as it is.

    Attributes:
        param_dtype: Of gathered parameters.
        reduce_dtype: Of gradients while they are reduced.
        buffer_dtype: Of floating-point buffers.
        output_dtype: Of the floating-point tensors that the unit returns.
        keep_low_precision_grads: Whether gradients keep the dtype in which they were reduced.
        cast_forward_inputs: Whether the unit casts its floating-point inputs.
        cast_root_forward_inputs: Whether it does so when it is the root.
        cast_forward_outputs: Whether it casts its outputs to the dtype of its inputs.
        full_precision_in_eval: Whether none of this holds in `eval()` mode.
        _module_classes_to_ignore: Classes whose modules a policy exempts.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    cast_forward_outputs: bool = False
    full_precision_in_eval: bool = False
    _module_classes_to_ignore: tuple[type[nn.Module], ...] = (_BatchNorm,)

    def at(self, *, training: bool) -> Precision:
        """Return what holds for a forward.

        Args:
            training: Whether the module is in training mode.

        Returns:
            This, or full precision if it is asked for in evaluation.
        """
        return Precision() if self.full_precision_in_eval and not training else self

    # Parameters and gradients

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

    def kept_gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the optimizer finds the gradient shard.

        Args:
            dtype: The parameters' own dtype.

        Returns:
            ``dtype``, or with `keep_low_precision_grads` the dtype of the reduction.
        """
        return self.gradient_dtype(dtype) if self.keep_low_precision_grads else dtype

    # Inputs and outputs

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
        args, kwargs = _cast((args, kwargs), self.param_dtype)
        return args, kwargs

    def cast_outputs(self, output: Any, *, like: Any) -> Any:
        """Cast the floating-point tensors in a forward's output, if asked to.

        Args:
            output: What the module returned.
            like: The arguments before they were cast; the first floating-point tensor in them
                says the dtype to go back to.

        Returns:
            What the unit returns instead.
        """
        dtype = self.output_dtype
        if dtype is None and self.cast_forward_outputs:
            dtype = next((leaf.dtype for leaf in _floating_leaves(like)), None)
        return output if dtype is None else _cast(output, dtype)

    # What a policy exempts

    def exempts(self, module: nn.Module) -> bool:
        """Return whether a policy makes a module a unit of its own in full precision.

        Args:
            module: The module.

        Returns:
            `True` if it is of a class to ignore, and there is something to be exempt from.
        """
        lowers = self.param_dtype or self.reduce_dtype or self.buffer_dtype
        return lowers is not None and isinstance(module, self._module_classes_to_ignore)

    @staticmethod
    def of_exempt(module: nn.Module) -> Precision:
        """Return the precision of an exempt module: its own, whatever the units around have.

        Args:
            module: The module.

        Returns:
            Its parameters' dtype, or else its buffers', with casts on the way in and out.
        """
        held = [*module.parameters(), *module.buffers()]
        own = next((tensor.dtype for tensor in held if tensor.is_floating_point()), torch.float32)
        return Precision(own, cast_forward_inputs=True, cast_forward_outputs=True)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in containers, and in the fields of dataclasses."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def _floating_leaves(tree: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(tree) if tensor.is_floating_point()]


# Understanding the argument

_NAMES = [field.name for field in fields(Precision)]
_DTYPE_WORDS = {
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16", "amp_bf16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "torch.float16", "half", "amp_fp16"), torch.float16),
    **dict.fromkeys(("fp32", "float32", "torch.float32"), torch.float32),
    **dict.fromkeys(("fp64", "float64", "torch.float64", "double"), torch.float64),
}
_THREE = ("param_dtype", "reduce_dtype", "buffer_dtype")
_WORDS: dict[str, dict[str, Any]] = {
    "full": {
        **dict.fromkeys(_THREE, torch.float32),
        "cast_forward_inputs": True,  # from low units around it
        "_module_classes_to_ignore": (),  # nothing to be exempt from
    },
    "default": {**dict.fromkeys(_THREE, torch.bfloat16), "reduce_dtype": torch.float32},
    "pure": dict.fromkeys(_THREE, torch.bfloat16),
}


def as_precision(mixed_precision: Any, where: str) -> Precision:
    """Turn a `mixed_precision` argument into dtypes.

    Args:
        mixed_precision: `None`, torch's `MixedPrecision`, a `Precision`, a dtype, or one of the
            words and dicts in the tables of this module.
        where: Who asks, for messages.

    Returns:
        The dtypes.

    Raises:
        PrecisionError: If it is something else, a setting is unknown, or has a value that it
            cannot have, such as a dtype that is not a floating-point one.

    Examples:
        >>> as_precision({"param_dtype": torch.bfloat16}, "unit 'layer'").reduce_dtype is None
        True
        >>> as_precision("DEFAULT", "unit 'layer'").reduce_dtype
        torch.float32
    """
    precision = _understood(mixed_precision, where)
    if os.environ.get(_FULL_IN_EVAL) == "1":
        precision = replace(precision, full_precision_in_eval=True)
    return precision


def _understood(given: Any, where: str) -> Precision:
    if isinstance(given, Precision):
        return given
    settings = _settings(given)
    if settings is None:
        known = [*_WORDS, *_DTYPE_WORDS]
        nearest = difflib.get_close_matches(str(given).lower(), known, n=1)
        hint = f"Did you mean {nearest[0]!r}?" if nearest else "Torch's MixedPrecision works too."
        raise _refusal(where, repr(given), hint)
    checked = {name: _checked(name, value, where) for name, value in settings.items()}
    return Precision(**{name: value for name, value in checked.items() if value is not None})


def _settings(given: Any) -> Mapping[str, Any] | None:
    """Return the settings that an argument stands for; `None` if it stands for none."""
    if given is None or given is False:
        return {}
    if given is True:
        return dict.fromkeys(_THREE, torch.float16)
    if isinstance(given, torch.dtype):
        return {"param_dtype": given}
    if isinstance(given, str):
        word = given.lower()
        return _WORDS.get(word, {"param_dtype": word} if word in _DTYPE_WORDS else None)
    if isinstance(given, Mapping):
        return given
    if hasattr(given, "param_dtype"):  # torch's MixedPrecision, and MixedPrecisionPolicy
        return {name: getattr(given, name, None) for name in _NAMES}
    return None


def _checked(name: str, value: Any, where: str) -> Any:
    """Return a setting's value as a `Precision` holds it; `None` means left out."""
    if name not in _NAMES:
        nearest = difflib.get_close_matches(name, _NAMES, n=1)
        hint = f"Did you mean {nearest[0]!r}?" if nearest else f"Known: {', '.join(_NAMES)}."
        raise _refusal(where, f"the setting {name!r}", hint)
    if value is None:
        return None
    if name.endswith("_dtype"):
        dtype = _DTYPE_WORDS.get(value.lower()) if isinstance(value, str) else value
        if not _is_floating(dtype):
            raise _refusal(where, f"{name}={value!r}", "For example torch.bfloat16.")
        return dtype
    if name == "_module_classes_to_ignore":
        classes = tuple(value) if isinstance(value, Iterable) else (value,)
        if not all(isinstance(one, type) and issubclass(one, nn.Module) for one in classes):
            raise _refusal(where, f"{name}={value!r}", "It takes classes of modules.")
        return classes
    if not isinstance(value, bool):
        raise _refusal(where, f"{name}={value!r}", "It is True or False.")
    return value


def _is_floating(value: Any) -> bool:
    # A dtype of one byte needs scales beside it, which nothing here keeps.
    return isinstance(value, torch.dtype) and value.is_floating_point and value.itemsize > 1


def _refusal(where: str, found: str, fix: str) -> PrecisionError:
    return PrecisionError.at(
        f"{where}, mixed_precision",
        expected="floating-point dtypes for parameters, reduction and buffers",
        found=found,
        fix=fix,
    )
