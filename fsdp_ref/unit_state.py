"""What a unit holds in memory, and where it is in the step.

One method changes the shard state and one the phase; each asks its table what is legal. The
hooks that call them stand in `unit.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, TypeVar

import torch

from fsdp_ref.collectives import (
    PendingGather,
    bytes_per_gather,
    explained,
    pairs_by_order,
    start_joint_all_gather,
)
from fsdp_ref.errors import ShardStateError
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.options import Options
from fsdp_ref.precision import Precision
from fsdp_ref.rank_group import Placement
from fsdp_ref.recording import record, waiting, watch
from fsdp_ref.registered import RegisteredNames
from fsdp_ref.states import LEGAL_MOVES, NEXT_PHASES, Phase, ShardState


class UnitState:
    """The memory of one unit, its shard state and its phases."""

    def __init__(
        self,
        name: str,
        flat_params: Sequence[FlatParameter],
        placement: Placement,
        registered: RegisteredNames,
        options: Options,
    ) -> None:
        """Start in SHARDED and IDLE."""
        self.name = name
        self.flat_params = list(flat_params)
        self.group, self.placement = placement.shard, placement
        self.registered, self.options = registered, options
        self.index = 0  # position in the tree of units, equal on all ranks
        self.root_number = 0  # tells models apart that are alive at the same time
        self.state = ShardState.SHARDED
        self.summoned = False  # inside summon_full_params
        self.phases: list[Phase] = []  # innermost last; IDLE when empty
        self._gathers: dict[FlatParameter, PendingGather] = {}
        self._gathered: list[tuple[int, int]] = []
        for flat_param in self.flat_params:
            flat_param._unit = weakref.ref(self)
            for group in placement.groups:
                group.pairs_by_order |= pairs_by_order(flat_param.compute_device)
        watch(self)

    @property
    def where(self) -> str:
        """How messages name this unit."""
        return f"unit '{self.name or 'root'}'"

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of unsharded parameters now in memory."""
        return sum(flat_param.unsharded_bytes for flat_param in self.flat_params)

    # State

    def move(self, to: ShardState) -> None:
        """Change the shard state; the only place that does.

        Args:
            to: The new state.

        Raises:
            ShardStateError: If the table of legal moves does not allow it.
        """
        if to not in LEGAL_MOVES[self.state]:
            legal = " or ".join(sorted(state.name for state in LEGAL_MOVES[self.state]))
            raise ShardStateError.at(
                self.where,
                expected=f"a move from {self.state.name} to {legal}",
                found=f"a move to {to.name}",
                fix="Was unshard() or reshard() called by hand during a forward or a backward?",
            )
        self.state = to

    @property
    def phase(self) -> Phase:
        """The innermost phase the unit is in."""
        return self.phases[-1] if self.phases else Phase.IDLE

    def enter(self, phase: Phase) -> None:
        """Enter a phase; a FORWARD is pushed on the stack, a backward phase replaces the last."""
        if phase not in NEXT_PHASES[self.phase]:
            raise ShardStateError.at(
                self.where,
                expected=f"phase {self.phase.name} to be followed by another",
                found=phase.name,
                fix="The hooks fired out of order; please report the module that does this.",
            )
        if phase is not Phase.FORWARD and self.phases:
            self.phases.pop()
        if phase is not Phase.IDLE:
            self.phases.append(phase)

    def leave_forward(self) -> None:
        """Return from a FORWARD to the phase that was there before it."""
        if self.phase is Phase.FORWARD:
            self.phases.pop()
        if Phase.FORWARD not in self.phases:
            self.registered.set_in_forward(False)
            self.registered.set_gathered(self.state is ShardState.UNSHARDED)

    # Memory

    def unshard(self, bucket: Bucket = ()) -> None:
        """Make the full parameters available. Collective, unless they are there already."""
        if self.state is not ShardState.SHARDED and self._gathered != self.generations():
            self.reshard()  # the shards changed since: never use stale weights
        self.start_unshard_ahead(bucket)
        if self.state is ShardState.UNSHARDING:
            self.finish_unshard()

    def start_unshard_ahead(self, bucket: Bucket = ()) -> None:
        """Issue the all-gathers before they are needed, if the unit is at rest. Collective.

        Args:
            bucket: The units whose messages go together with this one's. The first and the last
                of them bring along all that are at rest; one in between has lost its companions.
        """
        if self.state is not ShardState.SHARDED or self.summoned:
            return
        at_rest: list[UnitState] = [self]
        if self in (*bucket[:1], *bucket[-1:]):
            at_rest = [u for u in bucket if u.state is ShardState.SHARDED and not u.summoned]
        self._start_unshard(at_rest)

    def _start_unshard(self, units: Sequence[UnitState]) -> None:
        """Issue the all-gathers of all flat parameters of ``units``. Collective."""
        for flat_param in [p for unit in units for p in unit.flat_params]:
            flat_param.prepare()
        for unit in units:
            unit.move(ShardState.UNSHARDING)
            unit._gathered = unit.generations()
        with explained(f"{self.where}, all-gather", [self.group]):
            if len(units) == 1:
                for number, flat_param in enumerate(self.flat_params):
                    tag = self.tag(number, reduction=False)
                    self._gathers[flat_param] = flat_param.start_unshard(tag)
            else:
                self._start_joint_gather(units)
        for unit in units:
            for flat_param in unit.flat_params:
                dtype = flat_param.compute_dtype
                unit.record_collective(
                    "all-gather", flat_param, dtype, phase=self.phase, sender=self
                )

    def _start_joint_gather(self, units: Sequence[UnitState]) -> None:
        for number, members in enumerate(alike(units, lambda p: p.compute_dtype)):
            tag = self.tag(number, reduction=False)
            shards = [flat_param.shard_to_send() for _, flat_param in members]
            gathers = start_joint_all_gather(shards, self.group, tag)
            for (unit, flat_param), gather in zip(members, gathers, strict=True):
                unit._gathers[flat_param] = gather
                flat_param.drop_sent_shard()

    def finish_unshard(self) -> None:
        """Wait for the all-gathers; the module sees full parameters afterwards."""
        gathers, self._gathers = self._gathers, {}
        with explained(f"{self.where}, all-gather", [self.group]), waiting(self.name, "all-gather"):
            for gather in gathers.values():
                gather.wait()
        for flat_param in self.flat_params:
            flat_param.finish_unshard(gathers[flat_param])
        self.move(ShardState.UNSHARDED)
        self.registered.set_gathered(True)
        record(self.name, self.phase.value, "unshard")

    def reshard(self) -> None:
        """Drop the full parameters; nothing happens when they are not in memory."""
        if self.state is ShardState.SHARDED:
            return
        if self._gathers:  # issued ahead, and not needed after all
            with waiting(self.name, "all-gather"):
                for gather in self._gathers.values():
                    gather.wait()
            self._gathers.clear()
        self.registered.set_gathered(False)
        for flat_param in self.flat_params:
            flat_param.free()
        self.move(ShardState.SHARDED)
        record(self.name, self.phase.value, "reshard")

    def use_precision(self, precision: Precision) -> bool:
        """Compute in other dtypes from now on; return whether they differ from those before."""
        if all(flat_param._precision == precision for flat_param in self.flat_params):
            return False
        self.reshard()
        for flat_param in self.flat_params:
            flat_param.use_precision(precision)
        self.registered.follow_dtype_and_device()
        return True

    def generations(self) -> list[tuple[int, int]]:
        """Return one value per flat parameter that changes whenever its shard does."""
        return [flat_param.generation for flat_param in self.flat_params]

    # Messages

    def tag(self, number: int, *, reduction: bool) -> int:
        """Return the number that keeps a flat parameter's messages apart from all others."""
        # Gathers and reductions of different units, and of different models, never meet: each
        # has a number of its own. The remainders keep it within the 31 bits that a tag may have.
        unit = self.root_number % 256 * 8192 + self.index % 8192
        return (unit * 64 + number % 64) * 2 + int(reduction)

    def record_collective(
        self,
        operation: str,
        flat_param: FlatParameter,
        dtype: torch.dtype,
        *,
        phase: Phase | None = None,
        sender: UnitState | None = None,
    ) -> None:
        """Record that shards of a flat parameter go to the other ranks, in a sender's message."""
        record(
            self.name,
            (phase or self.phase).value,
            operation,
            bytes_on_wire=bytes_per_gather(flat_param.numel(), dtype, self.group),
            group=self.group.ranks,
            dtype=dtype,
            together_with=sender.name if sender is not None and sender is not self else "",
        )


UnitT = TypeVar("UnitT", bound=UnitState)
Bucket: TypeAlias = Sequence[UnitState]
"""Units whose messages go together, in the order of the forward; empty for a unit on its own."""


def alike(
    units: Iterable[UnitT], kind: Callable[[FlatParameter], torch.dtype]
) -> list[list[tuple[UnitT, FlatParameter]]]:
    """Sort the flat parameters of several units by what can share a message.

    Args:
        units: The units.
        kind: The dtype of what is sent of a flat parameter.

    Returns:
        One list for each dtype and device, in the order in which they come.
    """
    by_kind: dict[object, list[tuple[UnitT, FlatParameter]]] = {}
    for unit in units:
        for flat_param in unit.flat_params:
            key = kind(flat_param), flat_param.compute_device
            by_kind.setdefault(key, []).append((unit, flat_param))
    return list(by_kind.values())
