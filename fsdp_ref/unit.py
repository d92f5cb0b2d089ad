"""One FSDP unit: gathers its parameters before use and reduces its gradient after.

The methods appear in the order in which a training step fires them. A unit never decides
*when* a reduction is issued or what stays in memory after a forward; `schedule.py` does.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fsdp_ref.collectives import CommHook, PendingReduction, explained
from fsdp_ref.containers import tensors_in
from fsdp_ref.errors import (
    DoubleBackwardError,
    WeightsChangedError,
)
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.inputs_outputs import SideOutputs, alias_inputs, own_copies, warn_of_output
from fsdp_ref.options import Options, Prefetch
from fsdp_ref.rank_group import Placement
from fsdp_ref.registered import RegisteredNames
from fsdp_ref.states import Phase
from fsdp_ref.unit_state import UnitState

_moments = itertools.count(1)
_MOST_OPEN_CALLS = 4096  # forwards whose backward never comes must not pile up


class Schedule(Protocol):
    """What a unit asks of the schedule of its root."""

    def forward_begins(self, unit: Unit) -> int:
        """Note that a unit's forward begins; return the number of the root's forward."""

    def gather_ahead_in_forward(self, unit: Unit) -> None:
        """Start to gather the unit that comes after ``unit`` in the forward, if asked to."""

    def keeps_after_forward(self, unit: Unit) -> bool:
        """Say whether a unit stays unsharded until its backward."""

    def forward_ended(self, unit: Unit, call: Call | None) -> None:
        """Note a call that a backward may come back to."""

    def forward_failed(self) -> None:
        """Forget what the running forward has noted so far."""

    def weights_changed(self) -> None:
        """Forget forwards whose backward would now be wrong."""

    def backward_begins(self, call: Call) -> None:
        """Note that a unit's backward begins."""

    def gather_ahead(self, unit: Unit, moment: Prefetch) -> None:
        """Start to gather the unit that the backward needs next, if ``unit`` asks for it now."""

    def gradient_complete(self, call: Call) -> None:
        """Reduce the gradient of a unit that the backward has passed."""


@dataclass(eq=False)
class Call:
    """One forward of a unit that autograd may come back to.

    Attributes:
        unit: The unit that was called.
        forward: Number of the root's forward that it belongs to.
        generations: State of the shards when the forward read them.
        number: When it began; counts the beginnings and ends of all calls of the process.
        end: When it ended.
        marked_inputs: How many inputs need a gradient.
        awaited_inputs: How many of them the running backward has not reached yet.
        done: Whether the backward has passed this call.
    """

    unit: Unit
    forward: int
    generations: list[tuple[int, int]]
    number: int = field(default_factory=_moments.__next__)
    end: int = 0
    marked_inputs: int = 0
    awaited_inputs: int = 0
    done: bool = False

    def passed_an_input(self) -> None:
        """Autograd has computed the gradient of one marked input."""
        self.awaited_inputs -= 1
        if self.awaited_inputs == 0:
            self.unit.post_backward(self)


class Unit(UnitState):
    """The hooks of one wrapped module, and the forwards that a backward may come back to."""

    def __init__(
        self,
        name: str,
        flat_params: Sequence[FlatParameter],
        placement: Placement,
        registered: RegisteredNames,
        options: Options,
    ) -> None:
        """Start in SHARDED and IDLE; `schedule` is set when the root is set up."""
        super().__init__(name, flat_params, placement, registered, options)
        self.schedule: Schedule | None = None
        self.calls: deque[Call] = deque(maxlen=_MOST_OPEN_CALLS)  # that backward may return to
        self.has_comm_hook = False
        self.bucket: Sequence[Unit] = ()  # whose messages go together with this unit's
        self._side_outputs = SideOutputs(registered.modules)

    def reduce_with(self, comm_hook: CommHook) -> None:
        """Let a hook reduce the gradients, which then come undivided."""
        self.has_comm_hook = True
        for unit in self.bucket:
            unit.bucket = ()
        for flat_param in self.flat_params:
            flat_param._comm_hook, flat_param._divisors = comm_hook, (1, 1)

    # A step

    def pre_forward(self, args: Any, kwargs: Any) -> tuple[Call | None, Any, Any]:
        """Gather the parameters, and mark the inputs so that backward says when it is through.

        Returns:
            The call (``None`` without gradients), and the arguments to use instead.
        """
        forward = self._schedule.forward_begins(self)
        self.enter(Phase.FORWARD)
        for flat_param in self.flat_params:
            flat_param.follow_requires_grad()
        self.registered.refuse_replacements()
        self.unshard(self.bucket)
        self._schedule.gather_ahead_in_forward(self)
        self.registered.set_in_forward(True)
        if not torch.is_grad_enabled():
            return None, args, kwargs
        call = Call(self, forward, self.generations())
        call.marked_inputs, args, kwargs = alias_inputs(args, kwargs, call.passed_an_input)
        return call, args, kwargs

    def post_forward(self, call: Call | None, output: Any) -> Any:
        """Watch the outputs for their gradient, and drop the parameters if the schedule says so."""
        torch.clear_autocast_cache()  # it would go on using copies of the weights of now
        self.leave_forward()
        output = own_copies(output, (flat_param.shown for flat_param in self.flat_params))
        found = [] if call is None else tensors_in(output)
        beside = [] if call is None else self._side_outputs.new()
        if call is not None and output is not None and not (found or beside):
            warn_of_output(output, self.where)
        watched = [tensor for tensor in (*found, *beside) if tensor.requires_grad]
        if watched and call is not None:
            call.end = next(_moments)
            self.calls.append(call)
            torch.autograd.graph.register_multi_grad_hook(
                watched, lambda _: self.pre_backward(call), mode="any"
            )
        recomputing = self.phase is Phase.PRE_BACKWARD  # its backward follows immediately
        if not recomputing and not (watched and self._schedule.keeps_after_forward(self)):
            self.reshard()
        self._schedule.forward_ended(self, call if watched else None)
        return output

    def abandon_forward(self) -> None:
        """Undo `pre_forward` after an exception, also checkpointing's early stop."""
        self.leave_forward()
        self._schedule.forward_failed()
        if self.phase is Phase.IDLE:
            self.reshard()

    def pre_backward(self, call: Call) -> None:
        """Gather again: autograd has just computed the gradient of one of the unit's outputs."""
        if torch.is_grad_enabled():  # autograd records the backward itself: create_graph=True
            raise DoubleBackwardError.at(
                self.where,
                expected="a backward that is not differentiated again",
                found="create_graph=True",
                fix="Compute gradients of gradients on a model that is not sharded.",
            )
        if call.generations != self.generations():
            raise WeightsChangedError.at(
                self.where,
                expected="the weights that its forward used",
                found="weights changed since, by an optimizer step, a load or an edit",
                fix="Call backward() before changing weights, or run the forward again. A forward "
                "that edits its own weights, like an embedding with max_norm, cannot be sharded.",
            )
        call.awaited_inputs, call.done = call.marked_inputs, False
        if call not in self.calls:  # a second backward through a graph that was kept
            self.calls.append(call)
        self._schedule.backward_begins(call)
        if self.phase is not Phase.PRE_BACKWARD:
            self.enter(Phase.PRE_BACKWARD)
        for flat_param in self.flat_params:
            flat_param.take_back_gradients()
        self.unshard(self.bucket)
        self._schedule.gather_ahead(self, Prefetch.BACKWARD_PRE)

    def post_backward(self, call: Call) -> None:
        """The gradient has left through the inputs of ``call``: is the unit's gradient complete?

        It is when no earlier call of the unit is still to come; the last one to be reached in
        the backward is the first one of the forward.
        """
        if call is self.first_pending_call():
            call.done = True
            self._schedule.gradient_complete(call)
        call.done = True

    def first_pending_call(self) -> Call | None:
        """Return the earliest forward that the backward has not passed yet."""
        pending = [call for call in self.calls if not call.done]
        return min(pending, key=lambda call: call.number, default=None)

    def forget_calls(self, outdated: Callable[[Call], bool]) -> None:
        """Drop the calls for which ``outdated`` is true."""
        kept = [call for call in self.calls if not outdated(call)]
        self.calls.clear()
        self.calls.extend(kept)

    def finish_backward(self) -> None:
        """Drop the full parameters: the gradient is complete."""
        self.enter(Phase.POST_BACKWARD)
        self.reshard()
        self._schedule.gather_ahead(self, Prefetch.BACKWARD_POST)
        self.enter(Phase.IDLE)

    def start_reduction(self) -> list[PendingReduction]:
        """Issue the reduce-scatters of the trainable flat parameters. Collective."""
        reductions, what = [], f"{self.where}, reduce-scatter"
        for number, flat_param in enumerate(self.flat_params):
            if flat_param.requires_grad:
                # What a hook of the reader raises is no sign of a silent rank.
                with nullcontext() if self.has_comm_hook else explained(what, [self.group]):
                    reductions.append(flat_param.start_reduction(self.tag(number, reduction=True)))
                self.record_reduction(flat_param, self)
        return reductions

    def record_reduction(self, flat_param: FlatParameter, sender: Unit) -> None:
        """Record that a gradient goes to the other ranks, in a sender's message."""
        dtype, phase = flat_param.gradient_dtype, Phase.POST_BACKWARD
        self.record_collective("reduce-scatter", flat_param, dtype, phase=phase, sender=sender)

    def reset(self) -> None:
        """Return to SHARDED and IDLE, whatever happened, and forget unfinished gradients."""
        self.phases.clear()
        self.reshard()
        self.calls.clear()
        for flat_param in self.flat_params:
            flat_param.discard_gradient()

    @property
    def _schedule(self) -> Schedule:
        if self.schedule is None:
            raise RuntimeError(f"{self.where} has no root yet; this is a bug in fsdp_ref")
        return self.schedule
