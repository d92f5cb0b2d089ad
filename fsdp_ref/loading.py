"""Loading under the plain model's names: each rank copies its part of every value, or nothing.

Modules load themselves as they do in the plain model, with their hooks, their prefix and their own
ideas of a state dict. Only in place of the parameters they find targets, which have the full shape
and note what is copied to them. When every module is through without an error, what was noted is
written to the shards, and then the hooks for afterwards run. If a value does not fit, nothing is
written; if a hook raises, shards and buffers are put back: a model that is half old and half new
would look healthy. Torch writes whatever fits before it raises.

Where torch loads a model that is no unit itself, this holds for each outermost unit in it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from fsdp_ref.collectives import explained
from fsdp_ref.errors import LoadError
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.layout import ParameterSlot
from fsdp_ref.local_shards import Units, is_local
from fsdp_ref.originals import OriginalParameter, is_unit
from fsdp_ref.row_shards import stored_name
from fsdp_ref.sent_values import SentValue, fetched
from fsdp_ref.stand_ins import LoadTarget
from fsdp_ref.state_dict import refuse_unseen, registered_instead
from fsdp_ref.unit import Unit

_VERSION = re.compile(r"(.*)@rank\d+")


class Loading:
    """One load into a unit and all units inside it, until all of it may be written."""

    def __init__(self, module: nn.Module, units: Units, *found: list[str]) -> None:
        """Begin with nothing noted, and copy what modules write to at once.

        Args:
            module: The outermost unit's wrapper.
            units: All units in it, with their names; that itself first.
            *found: Lists to add to: missing keys, unexpected keys, other errors.
        """
        self.missing, self.unexpected, self.errors = found or ([], [], [])
        self.afterwards: list[tuple[Callable[..., Any], nn.Module]] = []
        self.outermost = units[0][1]
        self._earlier_errors = len(self.errors)  # of modules around this one
        self._units = units
        self._noted: list[tuple[Unit, FlatParameter, int, Tensor]] = []
        self._before = list(_copies(module, [unit for _, unit in units]))
        self._shards: dict[FlatParameter, Tensor] = {}  # from before they were written
        self._summoned: list[tuple[Tensor, Tensor]] = []  # what was shown, and a copy of it

    # What there is to load

    def refuse_local(self, where: str, state_dict: Mapping[str, Any]) -> None:
        """Raise if a dict has the local form.

        Args:
            where: The unit, for the message.
            state_dict: The dict.

        Raises:
            LoadError: If it has.
        """
        if is_local(state_dict):
            raise LoadError.at(
                f"{where}, load_state_dict",
                expected="whole weights, or DTensors",
                found=f"a local state dict, with names such as '{next(iter(state_dict))}'",
                fix="Use load_local_state_dict(), or set LOCAL_STATE_DICT on this module.",
            )

    def translate(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Give this rank's versions their plain names, and make whole what is not for a unit.

        Collective for `DTensor`s that are not for a parameter of a unit, and for sent values.

        Args:
            state_dict: What was found, to be changed in place.
            prefix: What the keys of the outermost unit begin with.
        """
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        mine = {}
        for key in [key for key in state_dict if key.startswith(prefix)]:
            version = _VERSION.fullmatch(key)
            owner = self._owner(key.removeprefix(prefix))
            if version and owner.placement.size < world_size:
                value = state_dict.pop(key)  # other groups' versions are theirs to load
                value = fetched(value) if isinstance(value, SentValue) else value
                if stored_name(version[1], owner.placement) == key:
                    mine[version[1]] = value
        state_dict.update(mine)
        inside = {
            f"{prefix}{unit_name}{'.' if unit_name else ''}{name}"
            for unit_name, unit in self._units
            for flat_param in unit.flat_params
            for original in flat_param._originals
            for _, _, name in original.places
        }
        for key in sorted(state_dict.keys() - inside):
            state_dict[key] = fetched(state_dict[key])
            if isinstance(state_dict[key], FlatParameter):  # torch's helpers add what is registered
                del state_dict[key]

    def _owner(self, name: str) -> Unit:
        """Return the innermost unit that a name leads into."""
        inside = [(path, unit) for path, unit in self._units if name.startswith(f"{path}.")]
        return max(inside, key=lambda one: len(one[0]))[1] if inside else self.outermost

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
        found += [error.rstrip(".") for error in self.errors[self._earlier_errors :]]
        if found:
            raise LoadError.at(
                f"{where}, load_state_dict",
                expected="a state dict that fits the model",
                found="; ".join(found),
                fix="Nothing was loaded. With strict=False the keys that fit are loaded, and the "
                "others returned; shapes have to fit in any case.",
            )

    def finish(self, where: str, *, strict: bool) -> None:
        """Write what was noted, and run the hooks for afterwards. Collective for `DTensor`s.

        Args:
            where: The unit, for messages.
            strict: Whether missing and unexpected keys count. Hooks may still remove some.

        Raises:
            LoadError: If something does not fit; what is written by then is for `undo`.
            SilentRanksError: If values are in pieces, and a rank does not bring its own.
        """
        self.refuse_misfits(where, strict=strict and not self.afterwards)
        for unit, flat_param, index, value in self._noted:
            with explained(f"{unit.where}, load_state_dict", unit.placement.groups):
                whole = fetched(value)
            self._write(unit, flat_param, index, whole)
        for hook, module in self.afterwards:
            hook(module, _IncompatibleKeys(self.missing, self.unexpected))
        self.refuse_misfits(where, strict=strict)

    def _write(self, unit: Unit, flat_param: FlatParameter, index: int, value: Tensor) -> None:
        """Write one value to the shard or, inside `summon_full_params`, to what is shown."""
        if unit.summoned:
            shown = flat_param._originals[index].parameter
            self._summoned.append((shown, shown.detach().clone()))
            with torch.no_grad():
                shown.copy_(value)
            return
        unit.reshard()  # full parameters gathered earlier are stale from here on
        if flat_param not in self._shards:
            flat_param.take_back_edits()
            self._shards[flat_param] = flat_param.detach().clone()
        flat_param.write_slice(index, value)

    def names_for(self, unit: Unit) -> set[str]:
        """Return the names of a unit's parameters that are written."""
        return {p._layout.slots[index].name for owner, p, index, _ in self._noted if owner is unit}

    def undo(self) -> None:
        """Put back what was written, by modules at once or since."""
        with torch.no_grad():
            for register, name, tensor, value in self._before:
                register[name] = tensor
                tensor.copy_(value)
            for shown, value in reversed(self._summoned):
                shown.copy_(value)
            for flat_param, shard in self._shards.items():
                flat_param.take_back_edits()
                flat_param.copy_(shard)


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
        loading: Where to note missing keys, unexpected keys, errors, and hooks for afterwards.
    """

    versions: Mapping[str, Any]
    assign: bool
    loading: Loading

    def into(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """Load one module, then its children, and note the hooks for afterwards.

        Args:
            module: The module.
            state_dict: All that begins with `prefix`; a dict that hooks may change.
            prefix: What the module's keys begin with.
        """
        notes = dict(self.versions.get(prefix.removesuffix("."), {}))
        if self.assign:
            notes["assign_to_params_buffers"] = True
        found = self.loading.missing, self.loading.unexpected, self.loading.errors
        module._load_from_state_dict(state_dict, prefix, notes, True, *found)
        # A unit has loaded what is inside it already.
        for name, child in () if is_unit(module) else module._modules.items():
            if child is not None:
                inner = f"{prefix}{name}."
                theirs = {key: state_dict[key] for key in state_dict if key.startswith(inner)}
                self.into(child, with_versions(theirs, self.versions), inner)
        for hook in module._load_state_dict_post_hooks.values():
            self.loading.afterwards.append((hook, module))


def with_versions(state_dict: dict[str, Any], versions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict with torch's note of versions attached, where an inner unit looks for it."""
    result: Any = OrderedDict(state_dict)
    result._metadata = versions
    found: dict[str, Any] = result
    return found
