"""One run of autograd's engine through the units: who begins, who is reduced when, how it ends.

The rule behind everything here: *nothing that only one rank knows may decide a collective*.
Which outputs got a gradient on this rank is such a thing. So every rank gathers and reduces
the same units in the same order, the order of the forward backwards, whether it needs them or
not; and one small exchange at the end settles which gradients count.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_ref.buckets import start_reductions
from fsdp_ref.collectives import (
    PendingReduction,
    all_reduce,
    bytes_per_all_reduce,
    explained,
)
from fsdp_ref.copies import add_up_over_copies
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.rank_group import RankGroup
from fsdp_ref.recording import record, waiting
from fsdp_ref.states import Phase
from fsdp_ref.unit import Call, Unit

_ISSUED, _USED = 1, 2  # what a rank says of a flat parameter at the end of a backward


@dataclass
class _Reduction:
    """The reduce-scatter of one flat parameter, from issue to accumulation."""

    unit: Unit
    flat_param: FlatParameter
    used_here: list[bool]
    pending: PendingReduction | None = None  # until it is sent
    shard: Tensor | None = None

    def finish(self) -> None:
        """Wait for the result; take it over at once if this rank used the parameter."""
        if self.shard is None and self.pending is not None:
            where, groups = f"{self.unit.where}, reduce-scatter", self.unit.placement.groups
            with explained(where, groups), waiting(self.unit.name, "reduce-scatter"):
                self.shard = add_up_over_copies(self.unit, self.pending.wait())
            if any(self.used_here):
                self.flat_param.accumulate(self.shard)

    def settle(self, used_anywhere: list[bool]) -> None:
        """Take over what only other ranks used; publish the gradient.

        Used by no rank: `.grad` stays `None`, as in a model that is not sharded.
        """
        self.finish()
        if any(used_anywhere) and not any(self.used_here) and self.shard is not None:
            self.flat_param.accumulate(self.shard)
        self.flat_param.publish_gradient(used_anywhere)


class Backward:
    """One run; a re-entrant checkpoint opens another one inside."""

    def __init__(self, units: Sequence[Unit], *, synchronize: bool) -> None:
        """Begin a run.

        Args:
            units: All units of the tree, in an order that all ranks share.
            synchronize: Whether gradients are reduced; false inside `no_sync`.
        """
        self.units = units
        self.synchronize = synchronize
        self.calls: dict[Call, None] = {}  # begun, in order
        self._ahead: list[Call] = []  # those still to come, the next one last
        self.forwards: set[int] = set()  # which forwards this run goes back through
        self.reduced: dict[Unit, None] = {}
        self.reductions: list[_Reduction] = []
        self._in_flight: list[_Reduction] = []  # the last of them
        self._waiting: dict[Unit, list[_Reduction]] = {}  # for the rest of their bucket
        self._unreduced: dict[Unit, None] = {}  # whose backward has begun

    @property
    def begun(self) -> list[Unit]:
        """The units whose backward has begun in this run, each once."""
        return list(dict.fromkeys(call.unit for call in self.calls))

    # While it runs

    def begin(self, call: Call) -> None:
        """The gradient has reached an output of ``call``; first catch up with other ranks."""
        if call in self.calls:
            return
        if call.forward not in self.forwards:
            self._expect_forward(call.forward)
        self.catch_up(call.end)
        self.calls[call] = None
        if call.unit not in self.reduced:
            self._unreduced[call.unit] = None

    def _expect_forward(self, forward: int) -> None:
        """Autograd works from the end of a forward to its beginning: so will its calls come."""
        self.forwards.add(forward)
        self._ahead += [call for unit in self.units for call in unit.calls
                        if call.forward == forward and not call.done]  # fmt: skip
        self._ahead.sort(key=lambda call: call.end)

    def repeated(self, call: Call) -> None:
        """Expect the call of a forward that checkpointing has just repeated."""
        if call.forward in self.forwards:
            self._ahead.append(call)

    def next_call(self) -> Call | None:
        """Return the call that this run comes to next, as far as forwards tell."""
        while self._ahead and (self._ahead[-1].done or self._ahead[-1] in self.calls):
            self._ahead.pop()
        return self._ahead[-1] if self._ahead else None

    def catch_up(self, end: int) -> None:
        """Take part in the backward of calls that ended after ``end`` and never began here.

        Autograd works from the end, so what has not begun by now gets no gradient on this
        rank. Other ranks may be gathering it at this moment.
        """
        while (call := self.next_call()) is not None and call.end > end:
            call.unit.pre_backward(call)
            if call.marked_inputs:
                call.unit.post_backward(call)

    def complete(self, call: Call) -> None:
        """Reduce a unit's gradient, after those of all units that came later in the forward."""
        if not self.synchronize:
            call.unit.finish_backward()
            return
        self._reduce_later_than(call.number, but=call.unit)
        self._reduce(call.unit)

    def complete_all(self) -> None:
        """Reduce every unit that ran forward, also those whose inputs needed no gradient here.

        On other ranks they may have needed one; then those wait for this rank.
        """
        if self.synchronize:
            self._reduce_later_than(-1)

    def _reduce_later_than(self, number: int, but: Unit | None = None) -> None:
        """Reduce units, last first, whose pending call began after ``number``."""
        inside = itertools.takewhile(lambda other: other.end > number, reversed(self._ahead))
        later = {
            pending.number: unit
            for unit in {**self._unreduced, **{other.unit: None for other in inside}}
            if (pending := unit.first_pending_call()) is not None
            and pending.forward in self.forwards
            and pending.number > number
            and unit is not but
            and unit not in self.reduced
        }
        for moment in sorted(later, reverse=True):
            self._reduce(later[moment])

    def _reduce(self, unit: Unit) -> None:
        """Drop a unit's full parameters; reduce its gradient, at once or with its bucket's."""
        companions = [unit] if unit in self.reduced else self._companions(unit)
        trainable = [p for p in unit.flat_params if p.requires_grad]
        self._waiting[unit] = [_Reduction(unit, p, p.used()) for p in trainable]
        self.reduced[unit] = None
        self._unreduced.pop(unit, None)
        unit.finish_backward()
        if all(companion in self._waiting for companion in companions):
            self._send(companions)

    def _companions(self, unit: Unit) -> list[Unit]:
        """Return the units whose gradients leave together with this one's, itself among them.

        All ranks have to come to the same answer, so it only asks which units ran forward.
        """
        ran = [one for one in unit.bucket if any(c.forward in self.forwards for c in one.calls)]
        return ran if unit in ran else [unit]

    def _send(self, units: Sequence[Unit]) -> None:
        """Issue the reduce-scatters of units whose gradients are complete."""
        for reduction in self._in_flight:  # no more than one message's gradients
            reduction.finish()
        self._in_flight = [reduction for unit in units for reduction in self._waiting.pop(unit)]
        pending = dict(start_reductions(units))
        for reduction in self._in_flight:
            reduction.pending = pending[reduction.flat_param]
        self.reductions += self._in_flight

    def _send_the_rest(self) -> None:
        """Issue what waits in vain, because a unit was reduced again without its companions."""
        while self._waiting:
            unit = next(iter(self._waiting))
            self._send([one for one in self._companions(unit) if one in self._waiting])

    def wait_for_reductions(self) -> None:
        """Wait for what is in flight, after an exception; dropping it would break other ranks."""
        for reduction in self._in_flight:
            if reduction.pending is not None:
                reduction.pending.wait()

    # When it ends

    def reduce_the_rest(
        self, groups: Sequence[RankGroup], order: str, still_open: set[Unit]
    ) -> bool:
        """Agree with the other ranks on what is left to reduce, reduce it, publish gradients.

        Args:
            groups: The root's groups.
            order: The order in which this rank ran the units.
            still_open: Units that another run, around this one, is still busy with.

        Returns:
            Whether all ranks ran the units in the same order; nothing is reduced otherwise.
        """
        said = {p: self._say(p, unit, still_open) for unit in self.units for p in unit.flat_params}
        digest = zlib.crc32(order.encode())
        device = next(iter(said)).compute_device if said else torch.device("cpu")
        # The largest of -digest is minus the smallest digest: equal only if all are equal.
        mine = [digest, -digest, *itertools.chain(*said.values())]
        values = torch.tensor(mine, device=device)
        self._record_exchange(values, groups)
        with explained("the end of a backward", groups):
            all_reduce(values, dist.ReduceOp.MAX, groups)
        largest, minus_smallest, *rest = values.tolist()
        if largest != -minus_smallest:
            return False
        settled = iter(rest)
        said = {p: list(itertools.islice(settled, len(words))) for p, words in said.items()}
        for unit in reversed(self.units):
            if any(any(said[p]) for p in unit.flat_params) and unit not in self.reduced:
                self._reduce(unit)
        self._send_the_rest()
        for reduction in self.reductions:
            reduction.settle([word == _USED for word in said[reduction.flat_param]])
        return True

    def _say(self, flat_param: FlatParameter, unit: Unit, still_open: set[Unit]) -> list[int]:
        """Say what this rank has gradients for, or at least takes part in a reduction of."""
        waiting = itertools.chain(*self._waiting.values())
        reductions = itertools.chain(self.reductions, waiting)
        issued = [r.used_here for r in reductions if r.flat_param is flat_param]
        used = flat_param.used()
        if unit in still_open:
            used = [False] * len(used)
        for earlier in issued:
            used = [one or other for one, other in zip(used, earlier, strict=True)]
        return [_USED if one else _ISSUED if issued else 0 for one in used]

    def _record_exchange(self, values: Tensor, groups: Sequence[RankGroup]) -> None:
        root = self.units[0]
        for group in groups:
            sent, ranks = bytes_per_all_reduce(values, group), group.ranks
            record(root.name, root.phase.value, "all-reduce",
                   bytes_on_wire=sent, group=ranks, dtype=values.dtype)  # fmt: skip

    def release(self, run: int, still_open: set[Unit]) -> None:
        """Drop the full parameters and the calls that this run has dealt with."""
        for unit in self.begun:
            if unit not in still_open and unit.phase is not Phase.IDLE:
                unit.finish_backward()
            for flat_param in unit.flat_params:
                flat_param.show_gradients()
        for call in self.calls:
            call.done = True
        for unit in self.units:  # also forwards repeated in this run that nothing came back to
            unit.forget_calls(lambda call: call.done or call.forward == -run)
