"""A wrapped module's place in the tree of units: who is around it, who is inside, who is first.

The outermost unit, the root, sets the whole tree up when it is first used: names, groups, the
comparison of ranks, and the schedule.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed import ProcessGroup

from fsdp_ref import agreement, process_groups
from fsdp_ref.copying import record_unit, restore_unit
from fsdp_ref.errors import CopyError, RootOnlyError
from fsdp_ref.fingerprints import InitialWeights, compare_initial_weights
from fsdp_ref.originals import Ignored, cast_buffers, restore_buffers
from fsdp_ref.precision import Precision
from fsdp_ref.schedule import RootSchedule
from fsdp_ref.state_dict import clean_name
from fsdp_ref.structure import count_models, describe_units
from fsdp_ref.unit import Unit
from fsdp_ref.wrapper import Wrapper


class UnitModule(Wrapper):
    """A wrapper that holds a unit and knows the units around and inside it."""

    _is_fsdp_unit = True

    _unit: Unit
    _initial: InitialWeights | None  # until the first forward
    _ignored: Ignored
    _number: int  # tells models apart that were built over the same ranks

    def _start_alone(self) -> None:
        """Begin as a root that nothing has used yet; adopt the units that are inside already."""
        self._buffer_dtypes: dict[str, torch.dtype] = {}  # before they were cast
        self._schedule: RootSchedule | None = None
        self._outer: weakref.ref[UnitModule] | None = None
        self._adopt_inner_units()

    @property
    def process_group(self) -> ProcessGroup:
        """The live process group of this unit. Collective at first use: it may be created then."""
        self._set_up()
        return self._unit.group.live

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[UnitModule]:
        """Return all units in ``module``, outer before inner. Not collective.

        Args:
            module: Any module.
            root_only: Leave out units that are inside of others, also of one around `module`.

        Returns:
            The units, in the order of `module.modules()`.
        """
        units = [part for part in module.modules() if isinstance(part, UnitModule)]
        return [unit for unit in units if not root_only or unit.check_is_root()]

    def check_is_root(self) -> bool:
        """Return whether this is the outermost unit. Not collective."""
        return self._root() is self

    def _adopt_inner_units(self) -> None:
        """Tell inner units who is around them, and what they are called from here."""
        for name, part in self._named_units():
            if part is not self:
                part._rename(name)
                part._schedule = None
                if part._outer is None or part._outer() is None:
                    part._outer = weakref.ref(self)

    def _named_units(self) -> Iterator[tuple[str, UnitModule]]:
        """Yield this unit and all inner ones, outer first, under the plain model's names."""
        for name, part in self.named_modules():
            if isinstance(part, UnitModule):
                yield clean_name(name), part

    def _rename(self, name: str) -> None:
        before, self._unit.name = self._unit.where, name
        for group in self._unit.placement.groups:
            group.asked = group.asked.replace(before, self._unit.where, 1)

    def _root(self) -> UnitModule:
        outer = None if self._outer is None else self._outer()
        return self if outer is None else outer._root()

    def _set_up(self) -> RootSchedule:
        """Name the units, create their groups, compare them across ranks. Collective, once."""
        root = self._root()
        if root._schedule is None:
            units = []
            root._adopt_inner_units()  # also those put in since it was constructed
            for name, part in root._named_units():
                part._rename(name)
                part._cast_buffers(part._unit.options.precision)
                units.append(part._unit)
            # Groups first: they are compared over all ranks, also if the root's own differ.
            process_groups.create([group for unit in units for group in unit.placement.groups])
            root._compare("structure of the model", describe_units(units, root._number))
            differ = partial(root._compare, "order of the units")
            root._schedule = RootSchedule(units, root._number, differ)
        return root._schedule

    def _compare_initial_weights(self) -> None:
        """Make sure that all ranks start from the same weights. Collective, once.

        Not part of `_set_up`: until the first forward, whole values may still be loaded or
        written, which need the units set up.
        """
        parts = [part for _, part in self._named_units()]
        known = [(part._unit, part._initial) for part in parts if part._initial is not None]
        compare_initial_weights(known, self._unit.placement.groups)
        for part in parts:
            part._initial = None

    def _initial_replaced(self, names: Iterable[str]) -> None:
        """Remember which weights were given whole values before they were ever used."""
        if self._initial is not None:
            self._initial.replaced(self._unit, names)

    def _initial_changed(self, *, since: list[tuple[int, int]]) -> None:
        """The same, for all flat parameters that have changed."""
        changed = [
            flat_param
            for flat_param, before in zip(self._unit.flat_params, since, strict=True)
            if flat_param.generation != before
        ]
        self._initial_replaced(slot.name for p in changed for slot in p._layout.slots)

    def _cast_buffers(self, precision: Precision) -> None:
        cast = cast_buffers(self.module, precision.buffer_dtype, self._ignored)
        self._buffer_dtypes |= cast

    def _precision_of_mode(self) -> Precision:
        """Return the precision of `train()` or `eval()`; adapt to it if the mode has changed."""
        precision = self._unit.options.precision.at(training=self.training)
        if self._unit.use_precision(precision):
            restore_buffers(self.module, self._buffer_dtypes, self._ignored)
            self._cast_buffers(precision)
        return precision

    def _compare(self, topic: str, mine: str) -> None:
        for group in self._unit.placement.groups:
            agreement.compare(topic, mine, group.ranks)

    # Copies

    def __copy__(self) -> NoReturn:
        """Refuse: two wrappers would take the parameters out of one module."""
        raise CopyError.at(
            self._unit.where,
            expected="a copy with a module of its own",
            found="copy.copy(), which shares the module inside",
            fix="Use copy.deepcopy().",
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what hangs on this process; see [fsdp_ref.copying][]."""
        state = {**self.__dict__, "_record": record_unit(self._unit)}
        for name in ("_unit", "_initial", "_schedule", "_outer"):
            del state[name]
        flat = {id(flat_param) for flat_param in self._unit.flat_params}
        state["_parameters"] = {n: p for n, p in self._parameters.items() if id(p) not in flat}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Shard the copied module again, as it was."""
        # torch leaves it untyped
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._unit = restore_unit(self, self.module, self.__dict__.pop("_record"))
        self._initial = InitialWeights(self._unit, {})
        self._number = count_models(self._unit.placement)
        self._schedule, self._outer = None, None
        self._adopt_inner_units()

    def extra_repr(self) -> str:
        """Show the unit's size and who shares it. Local."""
        flat = self._unit.flat_params
        total = sum(p._layout.total_numel for p in flat)
        shard = sum(p.numel() for p in flat)
        return f"numel={total}, shard_numel={shard}, ranks={list(self._unit.group.ranks)}"

    def _root_only(self, method: str) -> None:
        if not self.check_is_root():
            raise RootOnlyError.at(
                self._unit.where,
                expected=f"{method}() on the outermost unit",
                found="an inner unit",
                fix="Call it on the model that you wrapped last.",
            )
