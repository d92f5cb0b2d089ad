"""A wrapper that behaves like the module inside it.

Attribute and index access, and names of parameters and buffers, are those of the wrapped
module, so that code written for the plain model goes on working.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from fsdp_ref.naming import WRAPPED
from fsdp_ref.state_dict import clean_name


class Wrapper(nn.Module):
    """Holds one module as `_fsdp_wrapped_module`, the name that torch's wrapper uses too."""

    _fsdp_wrapped_module: nn.Module

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters under names without the wrappers in between; see `nn.Module`. Local.

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
        """Yield buffers under names without the wrappers in between; see `nn.Module`. Local.

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
            if name == WRAPPED:
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        """Index the wrapped module, for example a `Sequential`."""
        # whether it can be indexed is the wrapped module's business
        return self._fsdp_wrapped_module[key]  # type: ignore[index]
