"""A wrapper that behaves like the module inside it.

Attribute and index access, and names of parameters and buffers, are those of the wrapped
module, so that code written for the plain model goes on working.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from torch import Tensor, nn

from fsdp_ref.errors import CopyError
from fsdp_ref.state_dict import clean_name


class Wrapper(nn.Module):
    """Holds one module as `_fsdp_wrapped_module`, the name that torch's wrapper uses too."""

    _fsdp_wrapped_module: nn.Module

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters under names without the wrappers in between; see `nn.Module`.

        Args:
            *args: As for `nn.Module.named_parameters`.
            **kwargs: As for `nn.Module.named_parameters`.

        Yields:
            Pairs of name and parameter: flat parameters, or the original ones inside
            `summon_full_params`.
        """
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield clean_name(name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield buffers under names without the wrappers in between; see `nn.Module`.

        Args:
            *args: As for `nn.Module.named_buffers`.
            **kwargs: As for `nn.Module.named_buffers`.

        Yields:
            Pairs of name and buffer.
        """
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield clean_name(name), buffer

    def __getattr__(self, name: str) -> Any:
        """Find what the wrapper lacks in the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_fsdp_wrapped_module":
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        """Index the wrapped module, for example a `Sequential`."""
        # whether it can be indexed is the wrapped module's business
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse: the copy would lose the hooks that reduce its gradients."""
        raise CopyError.at(
            f"the unit around {type(self.module).__name__}",
            expected="a model that is not sharded yet",
            found="a copy of a sharded one",
            fix="Copy before wrapping, or build a second model and load state_dict() into it.",
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: process groups and hooks cannot be pickled."""
        raise CopyError.at(
            f"the unit around {type(self.module).__name__}",
            expected="something that can be pickled",
            found="a sharded model, which is bound to its ranks",
            fix="Save state_dict() instead, and load it into a model built anew.",
        )
