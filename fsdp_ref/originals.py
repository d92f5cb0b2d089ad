"""Which parameters a unit takes over, and which modules cannot be a unit at all.

A unit takes every parameter below its module except those of units further inside. Nothing is
changed here: all refusals come before anything is sharded, so the module stays usable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fsdp_ref.errors import (
    AlreadyWrappedError,
    ContainerWithoutForwardError,
    NonFloatingParameterError,
    NotAModuleError,
    NoValuesError,
    ScalarParameterError,
    TiedParametersError,
)


@dataclass(eq=False)
class OriginalParameter:
    """One parameter of the wrapped module, and every place where modules hold it.

    Attributes:
        parameter: The module's own parameter object.
        places: Triples of module, attribute name and full name; more than one if tied.
    """

    parameter: nn.Parameter
    places: list[tuple[nn.Module, str, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The first full name, relative to the wrapped module."""
        return self.places[0][2]

    @property
    def kind(self) -> tuple[torch.dtype, bool]:
        """What parameters must share to lie in one flat parameter."""
        return self.parameter.dtype, self.parameter.requires_grad


def unit_that_owns(parameter: nn.Parameter) -> str | None:
    """Return the name under which a unit took over this original parameter, if one did."""
    name: str | None = getattr(parameter, "_fsdp_owner", None)
    return name


def is_unit(module: nn.Module) -> bool:
    """Return whether ``module`` is wrapped already."""
    return bool(getattr(type(module), "_is_fsdp_unit", False))


def own_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield ``module`` and those below it that belong to the same unit, with name prefixes."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and not is_unit(child):
            yield from own_modules(child, f"{prefix}{name}.")


def collect_originals(module: nn.Module) -> list[OriginalParameter]:
    """Return each distinct parameter of the unit once, in the module's order."""
    found: dict[int, OriginalParameter] = {}
    for prefix, part in own_modules(module):
        for attribute, parameter in part._parameters.items():
            if parameter is not None:
                original = found.setdefault(id(parameter), OriginalParameter(parameter))
                original.places.append((part, attribute, prefix + attribute))
    return list(found.values())


def move_buffers(module: nn.Module, device: torch.device | None) -> None:
    """Move the unit's buffers, which are never sharded, to ``device``, if there is one."""
    for _, part in own_modules(module):
        for name, buffer in part._buffers.items():
            if buffer is not None and device is not None:
                part._buffers[name] = buffer.to(device)


def cast_buffers(module: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Cast the unit's floating-point buffers, and return their names and dtypes from before."""
    before = {}
    for prefix, part in own_modules(module):
        for name, buffer in part._buffers.items():
            if dtype is not None and buffer is not None and buffer.is_floating_point():
                before[prefix + name] = buffer.dtype
                part._buffers[name] = buffer.to(dtype)
    return before


def refuse_module(module: nn.Module, where: str) -> None:
    """Raise if ``module`` cannot be a unit.

    Raises:
        NotAModuleError: If it is no module.
        AlreadyWrappedError: If it is one already.
        ContainerWithoutForwardError: If it has no `forward` that could gather.
    """
    if not isinstance(cast(object, module), nn.Module):
        raise NotAModuleError.at(
            where,
            expected="an nn.Module",
            found=repr(module),
            fix="Wrap the module itself, not a function or a class.",
        )
    if is_unit(module):
        raise AlreadyWrappedError.at(
            where,
            expected="a module that is not wrapped yet",
            found=f"a unit around {type(getattr(module, 'module', module)).__name__}",
            fix="Wrap a module once; build it again to wrap it differently.",
        )
    if type(module).forward in (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward):
        raise ContainerWithoutForwardError.at(
            where,
            expected="a module with a forward, before which its parameters are gathered",
            found=f"the container {type(module).__name__}",
            fix="Wrap the modules inside it, or the module that holds it.",
        )


def refuse_parameters(originals: list[OriginalParameter], where: str) -> None:
    """Raise if a parameter cannot lie in a flat parameter.

    Raises:
        NoValuesError: If one is on the meta device, or lazy.
        NonFloatingParameterError: If one is not a real floating-point tensor.
        ScalarParameterError: If one has no dimension.
        TiedParametersError: If one belongs to another unit already.
    """
    for original in originals:
        parameter, name = original.parameter, original.name
        if is_lazy(parameter) or parameter.is_meta:
            raise NoValuesError.at(
                where,
                expected="parameters that have values",
                found=f"'{name}' {'not initialised yet' if is_lazy(parameter) else 'on meta'}",
                fix="Move the module with to_empty() and initialise it, or run it once if it is "
                "lazy, before wrapping.",
            )
        if not parameter.is_floating_point():
            raise NonFloatingParameterError.at(
                where,
                expected="floating-point parameters",
                found=f"'{name}' of dtype {parameter.dtype}",
                fix="Keep it as a buffer: register_buffer() instead of nn.Parameter.",
            )
        if parameter.dim() == 0:
            raise ScalarParameterError.at(
                where,
                expected="parameters of at least one dimension",
                found=f"the scalar '{name}'",
                fix="Give it the shape (1,) instead of ().",
            )
        owner = unit_that_owns(parameter)
        if owner is not None:
            raise TiedParametersError.at(
                where,
                expected="each parameter in one unit",
                found=f"'{name}' tied to '{owner}', which another unit has sharded already",
                fix="Let one unit hold all uses: do not wrap the modules that share it, or wrap "
                "their common parent only.",
            )
