"""Loading a full state dict: each rank copies its own part of every value, or nothing at all.

Modules load themselves as they do in the plain model, with their hooks, their prefix and their own
ideas of a state dict. Only in place of the parameters they find targets, which have the full shape
and note what is copied to them. When every module is through without an error, what was noted is
written to the shards. Otherwise nothing is written and buffers are put back: a model that is
half old and half new would look healthy. Torch writes whatever fits before it raises.

Where torch loads a model that is no unit itself, this holds for each outermost unit in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from fsdp_ref.errors import LoadError
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.layout import ParameterSlot
from fsdp_ref.originals import OriginalParameter
from fsdp_ref.stand_ins import LoadTarget
from fsdp_ref.state_dict import refuse_unseen, registered_instead
from fsdp_ref.unit import Unit


class Loading:
    """One load into a unit and all units inside it, until all of it may be written."""

    def __init__(self, module: nn.Module, units: Sequence[Unit]) -> None:
        """Begin with nothing noted, and copy what modules write to at once.

        Args:
            module: The outermost unit's wrapper.
            units: All units in it.
        """
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.errors: list[str] = []
        self._noted: list[tuple[Unit, FlatParameter, int, Tensor]] = []
        self._before = list(_copies(module, units))

    @contextmanager
    def targets_registered(self, unit: Unit) -> Iterator[None]:
        """Let modules find targets in place of a unit's parameters, and note what they get.

        Args:
            unit: The unit.

        Yields:
            Nothing.

        Raises:
            SummonContextError: If it is summoned, and this rank does not see it.
        """
        refuse_unseen(unit, "load_state_dict()")
        targets = {
            original: LoadTarget(slot.name, slot.shape, flat_param, flat_param.requires_grad)
            for flat_param in unit.flat_params
            for slot, original in _slots(flat_param)
        }
        with registered_instead(unit, targets):
            yield
            for flat_param in unit.flat_params:
                for index, (_, original) in enumerate(_slots(flat_param)):
                    for value in _received(original, targets[original]):
                        self._noted.append((unit, flat_param, index, value))

    def refuse_misfits(self, where: str, *, strict: bool) -> None:
        """Raise if what was found does not fit the model.

        Args:
            where: The unit, for the message.
            strict: Whether missing and unexpected keys count.

        Raises:
            LoadError: If it does not fit.
        """
        found = [f"missing keys {self.missing}"] if strict and self.missing else []
        found += [f"unexpected keys {self.unexpected}"] if strict and self.unexpected else []
        found += [error.rstrip(".") for error in self.errors]
        if found:
            raise LoadError.at(
                f"{where}, load_state_dict",
                expected="a state dict that fits the model",
                found="; ".join(found),
                fix="Nothing was loaded. With strict=False the keys that fit are loaded, and the "
                "others returned; shapes have to fit in any case.",
            )

    def write(self) -> None:
        """Write what was noted to the shards or, inside `summon_full_params`, to what is shown."""
        for unit, flat_param, index, value in self._noted:
            if unit.summoned:
                with torch.no_grad():
                    flat_param._originals[index].parameter.copy_(value)
            else:
                unit.reshard()  # full parameters gathered earlier are stale from here on
                flat_param.write_slice(index, value)

    def names_for(self, unit: Unit) -> set[str]:
        """Return the names of a unit's parameters that are written."""
        return {p._layout.slots[index].name for owner, p, index, _ in self._noted if owner is unit}

    def undo(self) -> None:
        """Put back what modules have written at once."""
        for register, name, tensor, value in self._before:
            register[name] = tensor
            with torch.no_grad():
                tensor.copy_(value)


def _slots(flat_param: FlatParameter) -> Iterator[tuple[ParameterSlot, OriginalParameter]]:
    return zip(flat_param._layout.slots, flat_param._originals, strict=True)


def _received(original: OriginalParameter, target: LoadTarget) -> Iterator[Tensor]:
    """Yield the values that a parameter got, under each of its names if it is tied."""
    for module, attribute, _ in original.places:
        value: Any = module._parameters.get(attribute)
        if value is target:
            value = target._noted
        if value is not None:  # otherwise it was not in the state dict
            yield value.detach()


def _copies(
    module: nn.Module, units: Sequence[Unit]
) -> Iterator[tuple[dict[str, Any], str, Tensor, Tensor]]:
    """Yield the buffers, and the parameters that no unit looks after, with copies of them."""
    flat_params = [flat_param for unit in units for flat_param in unit.flat_params]
    originals = [o.parameter for flat_param in flat_params for o in flat_param._originals]
    in_units = {id(parameter) for parameter in (*flat_params, *originals)}
    for part in module.modules():
        registers: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for register in registers:
            for name, tensor in register.items():
                if tensor is not None and id(tensor) not in in_units:
                    yield register, name, tensor, tensor.detach().clone()


@dataclass(frozen=True)
class Walk:
    """How a module and all modules inside it load themselves, as in `nn.Module.load_state_dict`.

    Attributes:
        versions: What torch noted of each module's version when the state dict was made. Modules
            whose saved form has changed over time ask for it, such as batch norm.
        assign: Whether to take over tensors instead of copying them.
        found: Lists to add to: missing keys, unexpected keys, other errors.
    """

    versions: Mapping[str, Any]
    assign: bool
    found: tuple[list[str], list[str], list[str]]

    def into(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """Load one module, then its children, then call the hooks for afterwards.

        Args:
            module: The module.
            state_dict: All that begins with `prefix`; a dict that hooks may change.
            prefix: What the module's keys begin with.
        """
        notes = dict(self.versions.get(prefix.removesuffix("."), {}))
        if self.assign:
            notes["assign_to_params_buffers"] = True
        module._load_from_state_dict(state_dict, prefix, notes, True, *self.found)
        for name, child in module._modules.items():
            if child is not None:
                inner = f"{prefix}{name}."
                theirs = {key: state_dict[key] for key in state_dict if key.startswith(inner)}
                self.into(child, with_versions(theirs, self.versions), inner)
        for hook in module._load_state_dict_post_hooks.values():
            hook(module, _IncompatibleKeys(*self.found[:2]))


def with_versions(state_dict: dict[str, Any], versions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict with torch's note of versions attached, where an inner unit looks for it."""
    result: Any = OrderedDict(state_dict)
    result._metadata = versions
    found: dict[str, Any] = result
    return found
