"""The root's schedule: what stays in memory, when gradients are reduced, how a backward ends.

The rule behind everything here: nothing that only one rank knows may decide a collective.
Which of its parameters got a gradient is such a thing, so reductions follow the order of the
forward, backwards, and one small exchange at the end settles what differed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_ref.collectives import PendingReduction, all_reduce
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.rank_group import RankGroup
from fsdp_ref.recording import record
from fsdp_ref.states import Phase
from fsdp_ref.unit import Call, Unit

_ISSUED, _USED = 1, 2  # what a rank says of a flat parameter at the end of a backward


@dataclass
class _Reduction:
    """The reduce-scatter of one flat parameter, from issue to accumulation."""

    flat_param: FlatParameter
    used_here: bool
    pending: PendingReduction
    shard: Tensor | None = None

    def finish(self) -> None:
        """Wait for the result; take it over at once if this rank used the parameter."""
        if self.shard is None:
            self.shard = self.pending.wait()
            if self.used_here:
                self.flat_param.accumulate(self.shard)


@dataclass
class _Backward:
    """One run of autograd's engine; a re-entrant checkpoint opens another one inside."""

    begun: list[Unit] = field(default_factory=list)
    reduced: list[Unit] = field(default_factory=list)
    reductions: list[_Reduction] = field(default_factory=list)


class RootSchedule:
    """Runs the units below one root through training steps."""

    def __init__(
        self,
        units: Sequence[Unit],
        group: RankGroup,
        explain_disagreement: Callable[[str], None],
    ) -> None:
        """Take charge of ``units``, root first, in an order that all ranks share.

        Args:
            units: All units of the tree.
            group: The root's group; the exchange at the end of a backward runs over it.
            explain_disagreement: Called on every rank with this rank's order of units when
                the orders differ; raises the error that says who differs in what.
        """
        self.units = list(units)
        self.group = group
        self.synchronize = True
        self._explain_disagreement = explain_disagreement
        self._order: list[Unit] = []  # of the first forward since the last backward
        self._backwards: dict[int, _Backward] = {}  # by autograd's number of the run
        for index, unit in enumerate(self.units):
            unit.index, unit.schedule = index, self

    @property
    def root(self) -> Unit:
        """The outermost unit."""
        return self.units[0]

    # Forward

    def forward_begins(self, unit: Unit) -> None:
        """Note the order of units; clean up if the last backward was broken off."""
        if torch._C._current_graph_task_id() != -1:
            return  # recomputation inside a backward
        if self._backwards:
            self.recover()
        if torch.is_grad_enabled() and unit not in self._order:
            self._order.append(unit)

    def keeps_after_forward(self, unit: Unit) -> bool:
        """Say whether the unit stays unsharded until its backward: only the root does.

        The root's backward starts right after its forward, so dropping it would only mean
        gathering it again at once.
        """
        return unit is self.root

    def recover(self) -> None:
        """Start afresh after an exception left a backward unfinished."""
        for backward in self._backwards.values():
            for reduction in backward.reductions:
                reduction.pending.wait()  # other ranks issued it too; dropping it breaks them
        self._backwards.clear()
        self._order.clear()
        for unit in self.units:
            unit.reset()

    # Backward

    def backward_begins(self, unit: Unit) -> None:
        """Note that a unit takes part in this run; arrange to be called when the run ends."""
        run = torch._C._current_graph_task_id()
        if run not in self._backwards:
            self._backwards[run] = _Backward()
            # Runs when autograd has nothing left to do, before backward() returns.
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(run))
        if unit not in self._backwards[run].begun:
            self._backwards[run].begun.append(unit)

    def gradient_complete(self, call: Call) -> None:
        """Reduce a unit's gradient, after those of all units that came later in the forward.

        A later unit whose gradient never left through its inputs on this rank may have done
        so on another one, which is reducing it now; here it takes part with what it has.
        """
        if not self.synchronize:
            call.unit.finish_backward()
            return
        backward = self._backwards[torch._C._current_graph_task_id()]
        pending = [(unit.first_pending_call(), unit) for unit in self.units]
        later = {first.number: unit for first, unit in pending if first is not None}
        for number in sorted(later, reverse=True):
            unit = later[number]
            if number > call.number and unit is not call.unit and unit not in backward.reduced:
                self._reduce(backward, unit)
        self._reduce(backward, call.unit)

    def _reduce(self, backward: _Backward, unit: Unit) -> None:
        """Issue a unit's reduce-scatters and drop its full parameters."""
        for reduction in backward.reductions:  # at most one unit's gradients stay in flight
            reduction.finish()
        trainable = [p for p in unit.flat_params if p.requires_grad]
        used = [flat_param.has_gradient for flat_param in trainable]
        pending = unit.start_reduction()
        backward.reductions += map(_Reduction, trainable, used, pending)
        backward.reduced.append(unit)
        unit.finish_backward()

    def _end(self, run: int) -> None:
        """Finish the run: reduce what is left, set `.grad`, drop full parameters."""
        backward = self._backwards.pop(run)
        still_open = {unit for other in self._backwards.values() for unit in other.begun}
        if self.synchronize:
            self._reduce_the_rest(backward, still_open)
        for unit in backward.begun:
            if unit not in still_open and unit.phase is not Phase.IDLE:
                unit.finish_backward()
        if not self._backwards:
            self._order.clear()

    def _reduce_the_rest(self, backward: _Backward, still_open: set[Unit]) -> None:
        """Agree with the other ranks on what is left to reduce, reduce it, publish gradients."""
        said = self._exchange(backward, still_open)
        for unit in reversed(self.units):
            said_by_any = any(said.get(flat_param, 0) for flat_param in unit.flat_params)
            if said_by_any and unit not in backward.reduced:
                self._reduce(backward, unit)
        for reduction in backward.reductions:
            reduction.finish()
            used_anywhere = said[reduction.flat_param] == _USED
            if used_anywhere and not reduction.used_here and reduction.shard is not None:
                reduction.flat_param.accumulate(reduction.shard)
            # Used by no rank: `.grad` stays `None`, as in a model that is not sharded.
            reduction.flat_param.publish_gradient()

    def _exchange(self, backward: _Backward, still_open: set[Unit]) -> dict[FlatParameter, int]:
        """Return for each flat parameter the most that any rank says of it. Collective."""
        flat_params = [
            flat_param for unit in self.units for flat_param in unit.flat_params
            if flat_param.requires_grad
        ]  # fmt: skip
        said = dict.fromkeys(flat_params, 0)
        for unit in self.units:
            for flat_param in unit.flat_params:
                if flat_param.requires_grad and flat_param.has_gradient and unit not in still_open:
                    said[flat_param] = _USED
        for reduction in backward.reductions:
            state = _USED if reduction.used_here else _ISSUED
            said[reduction.flat_param] = max(said[reduction.flat_param], state)
        order = "\n".join(unit.name or "root" for unit in self._order)
        digest = zlib.crc32(order.encode())
        device = flat_params[0].device if flat_params else torch.device("cpu")
        # The largest of -digest is minus the smallest digest: equal only if all are equal.
        values = torch.tensor([digest, -digest, *said.values()], device=device)
        all_reduce(values, dist.ReduceOp.MAX, self.group)
        record(
            self.root.name, self.root.phase.value, "all-reduce",
            bytes_on_wire=2 * (self.group.size - 1) * values.nbytes // self.group.size,
            group=self.group.ranks, dtype=values.dtype,
        )  # fmt: skip
        largest, minus_smallest, *settled = values.tolist()
        if largest != -minus_smallest:
            self.recover()
            self._explain_disagreement(order)
        return dict(zip(said, settled, strict=True))

    # Between steps

    @contextmanager
    def without_synchronization(self) -> Iterator[None]:
        """Keep unreduced gradients inside the context; see the wrapper's `no_sync`."""
        before, self.synchronize = self.synchronize, False
        try:
            yield
        finally:
            self.synchronize = before
