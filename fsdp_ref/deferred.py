"""Gives values to the modules of one unit that were built on the meta device.

A tensor on meta has a shape and a dtype and no memory, so a model of any size can be built there.
When a unit is constructed, its own modules get memory and values, and are cut right afterwards.
So no more than one whole unit is ever in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fsdp_ref.errors import NoValuesError, OptionError
from fsdp_ref.originals import NOTHING_IGNORED, Ignored, is_unit

InitFunction = Callable[[nn.Module], Any]


@dataclass(eq=False)
class MetaTensor:
    """A parameter or buffer on meta, and every place of the unit where modules hold it.

    Attributes:
        tensor: What the modules held at first.
        places: Pairs of module and attribute; more than one if tied.
        name: The first full name, relative to the wrapped module.
        has_values: Whether the places hold a tensor with values by now.
    """

    tensor: Tensor
    name: str
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    has_values: bool = False


def default_device() -> torch.device:
    """Return where modules from meta go if nobody says: the current accelerator, or the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def parents_first(module: nn.Module, ignored: Ignored = NOTHING_IGNORED) -> dict[nn.Module, str]:
    """Return the unit's modules, each once, level by level, and their prefixes of names."""
    found, queue = {module: ""}, [module]
    for part in queue:  # which grows while it is read
        for name, child in part._modules.items():
            if child is None or child in found or is_unit(child) or child in ignored.modules:
                continue
            found[child] = f"{found[part]}{name}."
            queue.append(child)
    return found


def children_first(module: nn.Module, among: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield modules in the order in which constructors finish, perhaps several times."""
    for child in module._modules.values():
        if child is not None and child in among:
            yield from children_first(child, among)
    yield module


def tensors_of(
    module: nn.Module, ignored: Ignored = NOTHING_IGNORED
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers that a module holds itself, under their attributes."""
    for register in (module._parameters, module._buffers):
        for attribute, tensor in register.items():
            if tensor is not None and tensor not in ignored.parameters:
                yield attribute, tensor


def is_deferred(tensor: Tensor) -> bool:
    """Return whether a tensor is on meta for lack of values; a lazy one lacks even a shape."""
    return tensor.is_meta and not is_lazy(tensor)


def can_reset(module_class: type[nn.Module]) -> bool:
    """Return whether modules of a class can initialise themselves."""
    return callable(getattr(module_class, "reset_parameters", None))


def _put(module: nn.Module, attribute: str, tensor: Tensor) -> None:
    register: dict[str, Any] = module._parameters
    if attribute not in register:
        register = module._buffers
    register[attribute] = tensor


class DeferredUnit:
    """The modules of one unit, and what they hold on meta."""

    def __init__(self, module: nn.Module, where: str, ignored: Ignored = NOTHING_IGNORED) -> None:
        """Look; nothing is changed.

        Args:
            module: The module that becomes a unit; units inside it are left out.
            where: The unit, for messages.
            ignored: What to leave alone.
        """
        self.module, self.where, self.ignored = module, where, ignored
        self.parts = parents_first(module, ignored)
        self.on_meta: dict[int, MetaTensor] = {}
        for part, prefix in self.parts.items():
            for attribute, tensor in tensors_of(part, ignored):
                if is_deferred(tensor):
                    found = self.on_meta.setdefault(
                        id(tensor), MetaTensor(tensor, prefix + attribute)
                    )
                    found.places.append((part, attribute))

    def names(self) -> list[str]:
        """Return the names of what is on meta; of tied ones, the first."""
        return [found.name for found in self.on_meta.values()]

    def materialize(
        self,
        param_init_fn: InitFunction | None,
        device: torch.device,
        only: Collection[str] | None = None,
    ) -> None:
        """Give values to everything on meta. Local.

        Args:
            param_init_fn: Called with each module of the unit, parents first, as torch does;
                `None` to call `reset_parameters` of those that hold something on meta,
                children first, as constructors do.
            device: Where the values go, unless `param_init_fn` decides.
            only: Names of what needs values; the rest only gets memory, because values will
                be sent. By default everything needs them.

        Raises:
            OptionError: If `param_init_fn` cannot be called.
            NoValuesError: If a module has no `reset_parameters`, if something is still on meta
                afterwards, or was not written by `reset_parameters`.
        """
        wanted = set(self.names() if only is None else only)
        if not self.on_meta:
            return
        self.refuse(param_init_fn, wanted)
        order: list[nn.Module] = list(self.parts)
        if param_init_fn is None:
            order = list(children_first(self.module, self.parts))
        for part in order:
            waiting = self._waiting(part)
            if wanted.isdisjoint(found.name for found in waiting) and (waiting or not wanted):
                make_room(part, device, self.ignored)
            elif param_init_fn is not None:
                with self._values_kept(part), torch.no_grad():
                    param_init_fn(part)
            elif waiting and can_reset(type(part)):
                name = self.parts[part].removesuffix(".")
                place = f"{self.where}, module '{name}'" if name else self.where
                reset: Any = part.reset_parameters
                with self._values_kept(part):
                    fill(part, reset, device, place, self.ignored)
            else:  # nothing to do, or a tied tensor that another module initialises
                continue
            for found in waiting:
                self._settle(found, part)

    def refuse(self, param_init_fn: InitFunction | None, wanted: Collection[str]) -> None:
        """Raise if nothing could give values to what is on meta.

        Args:
            param_init_fn: As for `materialize`.
            wanted: Names of what needs values.

        Raises:
            OptionError: If `param_init_fn` cannot be called.
            NoValuesError: If a module has no `reset_parameters` and no function is given.
        """
        if param_init_fn is not None and not callable(param_init_fn):
            raise OptionError.at(
                f"{self.where}, param_init_fn",
                expected="a function of a module",
                found=repr(param_init_fn),
                fix="It is called with each module that has to be initialised.",
            )
        for found in self.on_meta.values():
            holders = [type(part) for part, _ in found.places]
            able = param_init_fn is not None or any(map(can_reset, holders))
            if found.name in wanted and not able:
                raise NoValuesError.at(
                    self.where,
                    expected="modules that can initialise what they hold on meta",
                    found=f"'{found.name}' of {holders[0].__name__}, which has no "
                    "reset_parameters()",
                    fix="Give param_init_fn, a function that initialises a module, or write "
                    "the method.",
                )

    def _waiting(self, part: nn.Module) -> list[MetaTensor]:
        return [
            found
            for found in self.on_meta.values()
            if not found.has_values and any(part is holder for holder, _ in found.places)
        ]

    @contextmanager
    def _values_kept(self, part: nn.Module) -> Iterator[None]:
        """Let a function that initialises the whole module spare what has values already.

        Those are tensors that never were on meta, and tied ones that an earlier module filled.
        """
        waiting = {id(found.tensor) for found in self._waiting(part)}
        unset = {
            attribute
            for found in self.on_meta.values()
            for holder, attribute in found.places
            if holder is part and id(found.tensor) in waiting
        }
        kept = {
            attribute: tensor
            for attribute, tensor in tensors_of(part, self.ignored)
            if attribute not in unset and not is_lazy(tensor)
        }
        for attribute, tensor in kept.items():
            copy = tensor.detach().clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            _put(part, attribute, _like(tensor, copy) if is_parameter else copy)
        try:
            yield
        finally:
            for attribute, tensor in kept.items():
                _put(part, attribute, tensor)

    def _settle(self, found: MetaTensor, part: nn.Module) -> None:
        """Let all places hold what ``part`` holds now: that keeps ties tied."""
        values = dict(tensors_of(part))
        attribute = next(name for holder, name in found.places if holder is part)
        if attribute not in values or values[attribute].is_meta:
            raise NoValuesError.at(
                self.where,
                expected=f"param_init_fn to initialise every {type(part).__name__}",
                found=f"'{found.name}' still on meta after it was called",
                fix="For each module that it is called with, let it call "
                "to_empty(device=..., recurse=False) and set the values.",
            )
        for holder, name in found.places:
            _put(holder, name, values[attribute])
        found.has_values = True
        # A unit outside that holds the old object too must learn that it is taken.
        found.tensor._fsdp_owner = found.name  # type: ignore[attr-defined]  # a mark of ours


def _like(parameter: Tensor, data: Tensor) -> Tensor:
    """Return a parameter of the same class with other data, and the same marks on it."""
    new: Tensor = torch.Tensor._make_subclass(type(parameter), data, parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    return new


def make_room(
    module: nn.Module, device: torch.device, ignored: Ignored = NOTHING_IGNORED
) -> Mapping[str, Tensor]:
    """Replace a module's own tensors on meta by ones with memory and without values.

    Args:
        module: The module; those inside it are left alone, and so is what has values.
        device: Where the memory is.
        ignored: What to leave on meta.

    Returns:
        The new tensors, under their attributes.
    """
    fresh: dict[str, Tensor] = {}
    made: dict[int, Tensor] = {}
    for attribute, tensor in list(tensors_of(module, ignored)):
        if is_deferred(tensor):
            if id(tensor) not in made:
                empty = torch.empty_like(tensor.detach(), device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = _like(tensor, empty) if is_parameter else empty
            fresh[attribute] = made[id(tensor)]
            _put(module, attribute, fresh[attribute])
    return fresh


@torch.no_grad()
def fill(
    module: nn.Module,
    function: Callable[[], Any],
    device: torch.device,
    where: str,
    ignored: Ignored = NOTHING_IGNORED,
) -> None:
    """Give a module's own tensors on meta memory, and let ``function`` write all of it.

    Args:
        module: The module.
        function: Sets the values.
        device: Where they are.
        where: The module, for messages.
        ignored: What to leave on meta.

    Raises:
        NoValuesError: If something was not written. Seen for floating-point tensors, of which
            every element counts, and for whole integer tensors.
    """
    fresh = make_room(module, device, ignored)
    versions = {attribute: _mark_unset(tensor) for attribute, tensor in fresh.items()}
    function()
    for attribute, tensor in tensors_of(module):
        if tensor is fresh.get(attribute) and _is_unset(tensor, versions[attribute]):
            raise NoValuesError.at(
                where,
                expected=f"{type(module).__name__} to initialise all of '{attribute}'",
                found="elements that nothing has written",
                fix="Set it in reset_parameters(), or give param_init_fn, a function that "
                "initialises a module.",
            )


def _bits(tensor: Tensor) -> Tensor:
    """Return the same memory as integers."""
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(integers[values.dtype.itemsize])


def _mark_unset(tensor: Tensor) -> int:
    """Set all bits, which as a number is a NaN that no computation produces."""
    if tensor.dtype is not torch.bool:
        _bits(tensor).fill_(-1)
    return tensor._version


def _is_unset(tensor: Tensor, version: int) -> bool:
    if tensor.dtype is torch.bool or tensor.numel() == 0:
        return False
    unset = _bits(tensor) == -1
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(unset.any())
    return tensor._version == version and bool(unset.all())  # -1 may be a value
