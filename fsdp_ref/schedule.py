"""The root's schedule: what stays in memory after a forward, and which backward is running.

It knows the order of the units, which no single unit does. What one backward does to them
stands in `backward.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from fsdp_ref.backward import Backward
from fsdp_ref.buckets import form_buckets
from fsdp_ref.options import Prefetch
from fsdp_ref.rank_group import RankGroup
from fsdp_ref.states import ShardState
from fsdp_ref.unit import Call, Unit


def _running_backward() -> int:
    """Return autograd's number of the backward that this thread is in, or -1."""
    return torch._C._current_graph_task_id()


class RootSchedule:
    """Runs the units below one root through training steps."""

    def __init__(
        self,
        units: Sequence[Unit],
        number: int,
        explain_disagreement: Callable[[str], None],
    ) -> None:
        """Take charge of ``units``, root first, in an order that all ranks share.

        Args:
            units: All units of the tree.
            number: Tells this model from others, and is equal on all ranks.
            explain_disagreement: Called on every rank with this rank's order of units when
                the orders differ; raises the error that says who differs in what.
        """
        self.units = list(units)
        self.synchronize = True
        self._explain_disagreement = explain_disagreement
        self._forwards = 0
        self._order: dict[Unit, None] = {}  # of the first forward since the last backward
        self._sequence: dict[Unit, None] = {}  # of the running forward of the root, without repeats
        self._followers: dict[Unit, Unit] = {}  # who came after whom in the one before it
        self._has_buckets = False
        self._backwards: dict[int, Backward] = {}  # by autograd's number of the run
        for index, unit in enumerate(self.units):
            unit.index, unit.root_number, unit.schedule = index, number, self

    @property
    def root(self) -> Unit:
        """The outermost unit."""
        return self.units[0]

    @property
    def groups(self) -> list[RankGroup]:
        """The root's groups; exchanges that concern the whole model run over them."""
        return self.root.placement.groups

    # Forward

    def forward_begins(self, unit: Unit) -> int:
        """Note the order of units; clean up if the last backward was broken off.

        Returns:
            The number of the root's forward, or minus that of the backward that repeats one.
        """
        if (run := _running_backward()) != -1:
            return -run
        if self._backwards:
            self.recover()
        if unit is self.root:
            self._forwards += 1
            self._sequence.clear()
        self._sequence[unit] = None
        if torch.is_grad_enabled():
            self._order[unit] = None
        return self._forwards

    def gather_ahead_in_forward(self, unit: Unit) -> None:
        """Start to gather the unit that followed in the last forward; see `forward_prefetch`."""
        follower = self._followers.get(unit)
        if unit.options.forward_prefetch and follower and _running_backward() == -1:
            follower.start_unshard_ahead(follower.bucket)

    def forward_ended(self, unit: Unit, call: Call | None) -> None:
        """Remember the order at the end of a whole forward; drop what it gathered in vain."""
        run = _running_backward()
        if run in self._backwards and call is not None:
            self._backwards[run].repeated(call)
        if unit is self.root and run == -1:
            self._followers = dict(itertools.pairwise(self._sequence))
            self._drop_what_nobody_used()

    def _drop_what_nobody_used(self) -> None:
        for unit in self.units:
            if unit.state is ShardState.UNSHARDING:
                unit.reshard()

    def keeps_after_forward(self, unit: Unit) -> bool:
        """Say whether the unit stays unsharded until its backward.

        The root always does: its backward starts right after its forward, so dropping it
        would only mean gathering it again at once.
        """
        return unit is self.root or not unit.placement.reshard_after_forward

    def forward_failed(self) -> None:
        """Forget the calls of a forward that raised; a recomputation stops early on purpose."""
        if _running_backward() == -1:
            self._drop_what_nobody_used()
            for unit in self.units:
                unit.forget_calls(lambda call: call.forward == self._forwards)

    def weights_changed(self) -> None:
        """Forget forwards whose backward would now be wrong; it raises if it comes."""
        for unit in self.units:
            unit.forget_calls(lambda call: True)

    def recover(self) -> None:
        """Start afresh after an exception left a backward unfinished."""
        for backward in self._backwards.values():
            backward.wait_for_reductions()
        self._backwards.clear()
        self._order.clear()
        for unit in self.units:
            unit.reset()

    # Backward

    def backward_begins(self, call: Call) -> None:
        """Note that a unit takes part in this run; arrange to be called when the run ends."""
        run = _running_backward()
        if run not in self._backwards:
            self._backwards[run] = Backward(self.units, synchronize=self.synchronize)
            # Runs when autograd has nothing left to do, before backward() returns.
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(run))
        self._backwards[run].begin(call)

    def gather_ahead(self, unit: Unit, moment: Prefetch) -> None:
        """Start to gather the unit that the backward needs next, if ``unit`` asks for it now."""
        backward = self._backwards.get(_running_backward())
        if backward is None or unit.options.backward_prefetch is not moment:
            return
        if (call := backward.next_call()) is not None:
            call.unit.start_unshard_ahead(call.unit.bucket)

    def gradient_complete(self, call: Call) -> None:
        """The backward has passed all calls of a unit."""
        self._backwards[_running_backward()].complete(call)

    def _end(self, run: int) -> None:
        """Finish the run: reduce what is left, set `.grad`, drop full parameters."""
        backward = self._backwards[run]
        backward.catch_up(end=-1)
        backward.complete_all()
        del self._backwards[run]
        still_open = {unit for other in self._backwards.values() for unit in other.begun}
        order = "\n".join(unit.name or "root" for unit in self._order)
        if backward.synchronize and not backward.reduce_the_rest(self.groups, order, still_open):
            self.recover()
            self._explain_disagreement(order)
        backward.release(run, still_open)
        if not self._backwards:
            self._drop_what_nobody_used()
            if backward.synchronize and not self._has_buckets:  # all ranks have the same order
                form_buckets(list(self._order), self.root)
                self._has_buckets = True
            self._order.clear()

    # Between steps

    @contextmanager
    def without_synchronization(self) -> Iterator[None]:
        """Keep unreduced gradients inside the context; see the wrapper's `no_sync`."""
        before, self.synchronize = self.synchronize, False
        try:
            yield
        finally:
            self.synchronize = before
