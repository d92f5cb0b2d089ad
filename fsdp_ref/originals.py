"""Which parameters a unit takes over, and which modules cannot be a unit at all.

A unit takes every parameter below its module except those of units further inside, and those
that it was told to ignore. Nothing is changed here: all refusals come before anything is sharded,
so the module stays usable.

# Ignored on request

`ignored_modules` takes modules, which are left alone with everything inside: parameters,
buffers and modules. `ignored_states` takes parameters or modules. Left alone means: every rank
keeps them whole, nothing moves or casts them, no policy makes units of them, they do not count in
sizes, and *their gradients are not reduced*. So it is for parameters that another mechanism
looks after, that are frozen, or that cannot be sharded: integer, complex or scalar ones. To keep
a trainable layer whole and still averaged, ask for `NO_SHARD` instead, see
[strategies][fsdp_ref.strategies].

The units inside take over what the outer one ignores, and an outer one ignores what the units
inside it ignore. Modules that are not inside the wrapped one have no effect, so one list can be
handed to several constructors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fsdp_ref.errors import (
    AlreadyWrappedError,
    ContainerWithoutForwardError,
    IgnoredStatesError,
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
        shape: The shape of the whole parameter, by default the one that it has now.
    """

    parameter: nn.Parameter
    places: list[tuple[nn.Module, str, str]] = field(default_factory=list)
    shape: torch.Size = field(default_factory=torch.Size)

    def __post_init__(self) -> None:
        """Take the shape from the parameter while it is whole."""
        if not is_lazy(self.parameter):
            self.shape = self.shape or self.parameter.shape

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


def has_forward(module_class: type[nn.Module]) -> bool:
    """Return whether modules of a class can be called; containers such as `ModuleList` cannot."""
    return module_class.forward is not nn.Module.forward


# What units leave alone


@dataclass(frozen=True, eq=False)
class Ignored:
    """What a unit, and the units inside it, leave alone.

    Attributes:
        parameters: The parameters, also those in `modules`.
        modules: The modules, with all modules inside them.
    """

    parameters: frozenset[nn.Parameter] = frozenset()
    modules: frozenset[nn.Module] = frozenset()

    def __bool__(self) -> bool:
        """Return whether there is anything to leave alone."""
        return bool(self.parameters or self.modules)

    def __or__(self, other: Ignored) -> Ignored:
        """Return what either leaves alone."""
        return Ignored(self.parameters | other.parameters, self.modules | other.modules)

    def counted_numel(self, module: nn.Module) -> int:
        """Return how many elements the parameters in ``module`` have that are not ignored."""
        return sum(p.numel() for p in module.parameters() if p not in self.parameters)

    def inside(self, module: nn.Module) -> Ignored:
        """Return the part of it that lies in ``module``."""
        if not self:
            return self
        return Ignored(
            self.parameters & set(module.parameters()), self.modules & set(module.modules())
        )


NOTHING_IGNORED = Ignored()


def resolve_ignored(
    module: nn.Module, ignored_modules: Any, ignored_states: Any, where: str
) -> Ignored:
    """Turn the arguments `ignored_modules` and `ignored_states` into what to leave alone. Local.

    Args:
        module: The module that is being wrapped.
        ignored_modules: `None`, or modules.
        ignored_states: `None`, or parameters or modules; or what an enclosing constructor
            ignores, which comes on top of `ignored_modules`.
        where: Who asks, for messages.

    Returns:
        What lies in `module` and is ignored: what the arguments name, what they contain, and
        what units inside ignore already.

    Raises:
        IgnoredStatesError: If both arguments are given, if one is not a collection, or holds
            something that cannot be ignored: a unit, a sharded parameter, `module` itself, or
            something that is neither a module nor a parameter.
    """
    ignored = NOTHING_IGNORED
    if isinstance(ignored_states, Ignored):
        ignored, ignored_states = ignored_states, None
    if ignored_modules is not None and ignored_states is not None:
        raise _not_ignorable(
            where, "both", "Put everything into ignored_states; it takes modules as well.",
            expected="ignored_modules or ignored_states",
        )  # fmt: skip
    for named in _listed("ignored_modules", ignored_modules, nn.Module, where):
        ignored |= _subtree(named, module, where)
    for named in _listed("ignored_states", ignored_states, (nn.Module, nn.Parameter), where):
        if isinstance(named, nn.Module):
            ignored |= _subtree(named, module, where)
        elif _is_sharded(named):
            fix = "Ignore parameters before they are sharded, in the constructor of their unit."
            raise _not_ignorable(where, "a parameter that a unit has sharded already", fix)
        else:
            ignored |= Ignored(frozenset({named}))
    for part in module.modules():
        if is_unit(part):
            ignored |= getattr(part, "_ignored", NOTHING_IGNORED)
    return ignored.inside(module)


def _listed(argument: str, given: Any, kinds: Any, where: str) -> list[Any]:
    """Return what an argument lists; a module is no list, even one that holds others."""
    if given is None:
        return []
    if isinstance(given, (nn.Module, torch.Tensor, str)) or not isinstance(given, Iterable):
        raise _not_ignorable(where, f"{argument}={given!r}", "Put it into a list.")
    listed = list(given)
    for one in listed:
        if not isinstance(one, kinds):
            fix = "Look the objects up in the model: names and plain tensors cannot be ignored."
            raise _not_ignorable(where, f"{one!r} in {argument}", fix)
    return listed


def _subtree(named: nn.Module, module: nn.Module, where: str) -> Ignored:
    """Return a module that is to be ignored, with all that is in it."""
    if is_unit(named):
        fix = "Name the module before you wrap it, or leave it unwrapped."
        raise _not_ignorable(where, f"a unit around {type(named).__name__}", fix)
    parts = frozenset(named.modules())
    if module in parts:
        fix = "Leave it unwrapped instead."
        raise _not_ignorable(where, f"{type(module).__name__}, the module that is wrapped", fix)
    return Ignored(frozenset(p for p in named.parameters() if not _is_sharded(p)), parts)


def _is_sharded(parameter: nn.Parameter) -> bool:
    """Return whether this is a flat parameter, or an original one that a unit has taken over."""
    return hasattr(parameter, "_is_sharded") or unit_that_owns(parameter) is not None


def _not_ignorable(
    where: str, found: str, fix: str, expected: str = "modules or parameters inside the module"
) -> IgnoredStatesError:
    return IgnoredStatesError.at(where, expected=expected, found=found, fix=fix)


# What a unit consists of


def own_modules(
    module: nn.Module, prefix: str = "", ignored: Ignored = NOTHING_IGNORED
) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``module`` and those below it that belong to the same unit, with name prefixes."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and not is_unit(child) and child not in ignored.modules:
            yield from own_modules(child, f"{prefix}{name}.", ignored)


def collect_originals(
    module: nn.Module, ignored: Ignored = NOTHING_IGNORED
) -> list[OriginalParameter]:
    """Return each distinct parameter of the unit once, in the module's order."""
    found: dict[int, OriginalParameter] = {}
    for prefix, part in own_modules(module, ignored=ignored):
        for attribute, parameter in part._parameters.items():
            if parameter is not None and parameter not in ignored.parameters:
                original = found.setdefault(id(parameter), OriginalParameter(parameter))
                original.places.append((part, attribute, prefix + attribute))
    return list(found.values())


def move_buffers(
    module: nn.Module, device: torch.device | None, ignored: Ignored = NOTHING_IGNORED
) -> None:
    """Move the unit's buffers, which are never sharded, to ``device``, if there is one."""
    for _, part in own_modules(module, ignored=ignored):
        for name, buffer in part._buffers.items():
            if buffer is not None and device is not None:
                part._buffers[name] = buffer.to(device)


def cast_buffers(
    module: nn.Module, dtype: torch.dtype | None, ignored: Ignored = NOTHING_IGNORED
) -> dict[str, torch.dtype]:
    """Cast the unit's floating-point buffers, and return their names and dtypes from before."""
    before = {}
    for prefix, part in own_modules(module, ignored=ignored):
        for name, buffer in part._buffers.items():
            if dtype is not None and buffer is not None and buffer.is_floating_point():
                before[prefix + name] = buffer.dtype
                part._buffers[name] = buffer.to(dtype)
    return before


def restore_buffers(
    module: nn.Module, dtypes: dict[str, torch.dtype], ignored: Ignored = NOTHING_IGNORED
) -> None:
    """Cast buffers of the unit back to the dtypes that `cast_buffers` returned."""
    for prefix, part in own_modules(module, ignored=ignored):
        for name, buffer in part._buffers.items():
            if buffer is not None and prefix + name in dtypes:
                part._buffers[name] = buffer.to(dtypes[prefix + name])


# Refusals


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
    if not has_forward(type(module)):
        raise ContainerWithoutForwardError.at(
            where,
            expected="a module with a forward, before which its parameters are gathered",
            found=f"the container {type(module).__name__}",
            fix="Wrap the modules inside it, or the module that holds it.",
        )


def refuse_parameters(
    originals: list[OriginalParameter], where: str, *, may_be_on_meta: bool = False
) -> None:
    """Raise if a parameter cannot lie in a flat parameter.

    Args:
        originals: The parameters, without those to ignore.
        where: Who asks, for messages.
        may_be_on_meta: Whether parameters on the meta device get values later.

    Raises:
        NoValuesError: If one is on the meta device, or lazy.
        NonFloatingParameterError: If one is not a real floating-point tensor.
        ScalarParameterError: If one has no dimension.
        TiedParametersError: If one belongs to another unit already.
    """
    for original in originals:
        parameter, name = original.parameter, original.name
        if is_lazy(parameter) or (parameter.is_meta and not may_be_on_meta):
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
                fix="Keep it as a buffer, with register_buffer(), or name it in ignored_states.",
            )
        if parameter.dim() == 0:
            raise ScalarParameterError.at(
                where,
                expected="parameters of at least one dimension",
                found=f"the scalar '{name}'",
                fix="Give it the shape (1,) instead of (), or name it in ignored_states.",
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
