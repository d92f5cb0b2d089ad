"""State dicts under the plain model's names, whole or cut by rows.

Export is a pure read and gathers one unit at a time. A unit's full values are copied, or cut,
registered under the parameters' names, and dropped from the module again once they are in the dict.
So hooks that were registered on the modules inside run as on the plain model: they get the plain
model's prefix, and find values under the plain model's keys. Where only the first rank gets the
dict, hooks run on the others too, and find zeros of the right shape that take no memory.

Which forms there are stands in [fsdp_ref.state_dict_types][]; how a state dict is loaded, in
[fsdp_ref.loading][].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_ref.errors import SummonContextError, this_rank
from fsdp_ref.exact import exact_values
from fsdp_ref.naming import WRAPPED
from fsdp_ref.originals import OriginalParameter, own_modules
from fsdp_ref.row_shards import cut, is_cut, stored_name
from fsdp_ref.small_groups import Versions, first_rank
from fsdp_ref.state_dict_types import Export, Form
from fsdp_ref.unit import Unit


def clean_name(name: str) -> str:
    """Return a parameter's or module's name without the wrappers in between.

    Examples:
        >>> clean_name("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.weight")
        'layers.0.weight'
    """
    return name.replace(f"{WRAPPED}.", "")


class Exporting:
    """One state dict in the making, of a unit and all units inside it."""

    def __init__(
        self, module: nn.Module, units: Sequence[Unit], export: Export, device: torch.device | None
    ) -> None:
        """Find out who gets what. Collective for full values of units in small groups.

        Args:
            module: The outermost unit's wrapper.
            units: All units in it, outermost first; their groups are live.
            export: In which form; not the local one.
            device: Where the values go; `None` for where they are.
        """
        self._module, self._where, self._form = module, units[0].where, export.form
        self._device = device
        self._owners: dict[str, Unit] = {}  # of the keys in the dict
        full = export.form is Form.FULL_STATE_DICT
        self._only_reader = first_rank(units[0]) if full and export.rank0_only else None
        # Who looks at summoned weights, perhaps alone, sees this rank's.
        alone = not full or any(unit.summoned for unit in units)
        self._versions = Versions(units, "mine" if alone else export.replicas)

    @property
    def is_reader(self) -> bool:
        """Whether this rank gets the dict."""
        return self._only_reader in (None, this_rank())

    # One unit

    @contextmanager
    def values_registered(self, unit: Unit, module: nn.Module, prefix: str) -> Iterator[None]:
        """Let a unit's modules register what goes into the dict. Collective, unless summoned.

        Nothing stays gathered meanwhile: the next unit can be gathered inside.

        Args:
            unit: The unit.
            module: The module in it.
            prefix: What its keys begin with.

        Yields:
            Nothing.

        Raises:
            SummonContextError: If it is summoned, and another rank is the only one to see it.
        """
        refuse_unseen(unit, "state_dict()")
        buffers = {
            prefix + inner + name: buffer
            for inner, part in own_modules(module)
            for name, buffer in part._buffers.items()
            if buffer is not None and name not in part._non_persistent_buffers_set
        }
        with self._fulls(unit) as fulls:
            self._versions.note(unit, prefix, fulls, buffers)
            values = {original: self._value(unit, original, fulls) for original in _originals(unit)}
        with registered_instead(unit, values):
            yield

    @contextmanager
    def _fulls(self, unit: Unit) -> Iterator[dict[OriginalParameter, Tensor]]:
        """Show the whole weights to ranks that need them; the others get an empty dict."""
        group = unit.group
        readers = list(range(group.size))
        if self._only_reader is not None:
            alone = [at for at, rank in enumerate(group.ranks) if rank == self._only_reader]
            readers = self._versions.wants(unit) or alone
        if unit.summoned:
            yield {original: original.parameter.detach() for original in _originals(unit)}
        elif not readers:  # another copy has them
            yield {}
        else:
            with exact_values(unit, readers[0] if len(readers) < group.size else None):
                yield dict(_whole(unit)) if group.rank in readers else {}

    def _value(
        self, unit: Unit, original: OriginalParameter, fulls: Mapping[OriginalParameter, Tensor]
    ) -> nn.Parameter:
        full, like = fulls.get(original), original.parameter
        if full is None or not self.is_reader:
            value = torch.zeros((), dtype=like.dtype, device=like.device).expand(original.shape)
        elif self._form is Form.SHARDED_STATE_DICT:
            value = cut(full, unit.placement)
            value = value if self._device is None else value.to(self._device)
        else:
            # Memory of its own: a view would keep the whole unit alive, and drag it into a file.
            value = torch.empty_like(full, device=self._device or full.device).copy_(full)
        return nn.Parameter(value, requires_grad=like.requires_grad)

    # The whole dict

    def belong(self, unit: Unit, keys: Iterable[str]) -> None:
        """Note which keys are a unit's; inner units have noted theirs before.

        Args:
            unit: The unit.
            keys: All keys that are new since its turn began.
        """
        for key in keys:
            self._owners.setdefault(key, unit)

    def finish(self, result: dict[str, Any], *, keep_vars: bool) -> None:
        """Give the dict memory of its own, and names that tell versions apart; in place.

        Collective for full values of units in small groups.

        Args:
            result: What all modules have filled.
            keep_vars: Whether values are to be the model's own where they are not sharded.

        Raises:
            ReplicasDifferError: If groups hold different versions, and nothing else was asked for.
        """
        self._versions.refuse_differences(self._where)
        if not keep_vars:
            self._take_copies(result)
        items = list(result.items())
        result.clear()
        for key, value in items:
            owner = self._owners.get(key)
            if owner is not None and self._form is Form.SHARDED_STATE_DICT:
                result[stored_name(key, owner.placement)] = value
            elif owner is not None and key in self._versions.others:
                mine = None if key in self._versions.buffers else first_rank(owner)
                for rank, version in self._versions.others[key].items():
                    here = value if rank == mine else version.to(value.device)
                    result[f"{key}@rank{rank}"] = here
            else:
                result[key] = value

    def _take_copies(self, result: dict[str, Any]) -> None:
        """Copy what is not sharded and so shares memory with the model: buffers, as a rule."""
        tensors = (*self._module.buffers(), *self._module.parameters())
        live = {t.untyped_storage().data_ptr() for t in tensors if not is_cut(t)}
        copies: dict[tuple[Any, ...], Tensor] = {}
        for key in self._owners.keys() & result.keys():
            value = result[key]
            if type(value) is Tensor and value.untyped_storage().data_ptr() in live - {0}:
                view = (value.data_ptr(), value.shape, value.stride(), value.dtype)
                if view not in copies:  # tied values stay tied
                    copies[view] = value.clone().to(self._device or value.device)
                result[key] = copies[view]


def refuse_unseen(unit: Unit, where: str) -> None:
    """Raise where a unit is summoned and this rank does not see it.

    Args:
        unit: The unit.
        where: What was called, for the message.

    Raises:
        SummonContextError: If so.
    """
    if unit.summoned and any(flat_param._exact is None for flat_param in unit.flat_params):
        raise SummonContextError.at(
            f"{where} of {unit.where}",
            expected="a call on the rank that sees the parameters",
            found="a rank that does not, inside summon_full_params(rank0_only=True)",
            fix="Make the call on that rank only, or on all ranks outside of the context.",
        )


@contextmanager
def registered_instead(unit: Unit, tensors: Mapping[OriginalParameter, Tensor]) -> Iterator[None]:
    """Let a unit's modules register other tensors under the parameters' names.

    Args:
        unit: The unit.
        tensors: What to register for each original parameter.

    Yields:
        Nothing; the order of names is that of the plain model.
    """
    with unit.registered.names_shown():
        places = [
            (module._parameters, attribute, tensor)
            for original, tensor in tensors.items()
            for module, attribute, _ in original.places
        ]
        before = [register.get(attribute) for register, attribute, _ in places]
        try:
            for register, attribute, tensor in places:
                register[attribute] = tensor  # type: ignore[assignment]  # no nn.Parameter, for a while
            yield
        finally:
            for (register, attribute, _), parameter in zip(places, before, strict=True):
                register[attribute] = parameter


def _originals(unit: Unit) -> list[OriginalParameter]:
    return [original for flat_param in unit.flat_params for original in flat_param._originals]


def _whole(unit: Unit) -> Iterator[tuple[OriginalParameter, Tensor]]:
    for flat_param in unit.flat_params:
        for slot, original in zip(flat_param._layout.slots, flat_param._originals, strict=True):
            yield original, flat_param.shown[slot.offset : slot.stop].view(slot.shape)


def restore_dtypes(
    state_dict: dict[str, Any], prefix: str, dtypes: Mapping[str, torch.dtype]
) -> None:
    """Give exported buffers the dtypes that they had before they were cast.

    Args:
        state_dict: The dict to change, in place.
        prefix: What the unit's names begin with.
        dtypes: Names and dtypes.
    """
    for name, dtype in dtypes.items():
        if prefix + name in state_dict:
            state_dict[prefix + name] = state_dict[prefix + name].to(dtype)
