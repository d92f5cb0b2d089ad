"""One FSDP unit: gathers its parameters before use and reduces its gradient after.

The methods appear in the order in which a training step fires them. A unit never decides
*when* a reduction is issued or what stays in memory after a forward; `schedule.py` does.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fsdp_ref.collectives import PendingGather, PendingReduction, bytes_per_gather, explained
from fsdp_ref.errors import (
    DoubleBackwardError,
    ShardStateError,
    WeightsChangedError,
)
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.inputs_outputs import alias_inputs, tensors_in, warn_of_output
from fsdp_ref.rank_group import Placement
from fsdp_ref.recording import record, watch
from fsdp_ref.registered import RegisteredNames
from fsdp_ref.states import LEGAL_MOVES, NEXT_PHASES, Phase, ShardState

_moments = itertools.count(1)
_MOST_OPEN_CALLS = 4096  # forwards whose backward never comes must not pile up


class Schedule(Protocol):
    """What a unit asks of the schedule of its root."""

    def forward_begins(self, unit: Unit) -> int:
        """Note that a unit's forward begins; return the number of the root's forward."""

    def keeps_after_forward(self, unit: Unit) -> bool:
        """Say whether a unit stays unsharded until its backward."""

    def forward_failed(self) -> None:
        """Forget what the running forward has noted so far."""

    def weights_changed(self) -> None:
        """Forget forwards whose backward would now be wrong."""

    def backward_begins(self, call: Call) -> None:
        """Note that a unit's backward begins."""

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


class Unit:
    """The flat parameters of one wrapped module, their memory state and place in the step."""

    def __init__(
        self,
        name: str,
        flat_params: Sequence[FlatParameter],
        placement: Placement,
        registered: RegisteredNames,
    ) -> None:
        """Start in SHARDED and IDLE; `schedule` is set when the root is set up."""
        self.name = name
        self.flat_params = list(flat_params)
        self.group, self.placement = placement.shard, placement
        self.registered = registered
        self.index = 0  # position in the tree of units, equal on all ranks
        self.root_number = 0  # tells models apart that are alive at the same time
        self.state = ShardState.SHARDED
        self.summoned = False  # inside summon_full_params
        self.phases: list[Phase] = []  # innermost last; IDLE when empty
        self.schedule: Schedule | None = None
        self.calls: deque[Call] = deque(maxlen=_MOST_OPEN_CALLS)  # that backward may return to
        self._gathers: list[PendingGather] = []
        self._gathered: list[tuple[int, int]] = []
        for flat_param in self.flat_params:
            flat_param._unit = weakref.ref(self)
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

    def unshard(self) -> None:
        """Make the full parameters available. Collective, unless they are there already."""
        if self.state is ShardState.UNSHARDED and self._gathered != self.generations():
            self.reshard()  # the shards changed since: never use stale weights
        if self.state is ShardState.SHARDED:
            self.start_unshard()
        if self.state is ShardState.UNSHARDING:
            self.finish_unshard()

    def start_unshard(self) -> None:
        """Issue the all-gathers of all flat parameters together. Collective."""
        for flat_param in self.flat_params:
            flat_param.prepare()
        self.move(ShardState.UNSHARDING)
        self._gathered = self.generations()
        for number, flat_param in enumerate(self.flat_params):
            with explained(f"{self.where}, all-gather", [self.group]):
                self._gathers.append(flat_param.start_unshard(self.tag(number, reduction=False)))
            self.record_collective("all-gather", flat_param, flat_param.compute_dtype)

    def finish_unshard(self) -> None:
        """Wait for the all-gathers; the module sees full parameters afterwards."""
        gathers, self._gathers = self._gathers, []
        with explained(f"{self.where}, all-gather", [self.group]):
            for gather in gathers:
                gather.wait()
        for flat_param in self.flat_params:
            flat_param.finish_unshard()
        self.move(ShardState.UNSHARDED)
        self.registered.set_gathered(True)
        record(self.name, self.phase.value, "unshard")

    def reshard(self) -> None:
        """Drop the full parameters; nothing happens when they are not in memory."""
        if self.state is ShardState.SHARDED:
            return
        for gather in self._gathers:
            gather.wait()
        self._gathers.clear()
        self.registered.set_gathered(False)
        for flat_param in self.flat_params:
            flat_param.free()
        self.move(ShardState.SHARDED)
        record(self.name, self.phase.value, "reshard")

    def generations(self) -> list[tuple[int, int]]:
        """Return one value per flat parameter that changes whenever its shard does."""
        return [flat_param.generation for flat_param in self.flat_params]

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
        self.unshard()
        self.registered.set_in_forward(True)
        if not torch.is_grad_enabled():
            return None, args, kwargs
        call = Call(self, forward, self.generations())
        call.marked_inputs, args, kwargs = alias_inputs(args, kwargs, call.passed_an_input)
        return call, args, kwargs

    def post_forward(self, call: Call | None, output: Any) -> Any:
        """Watch the outputs for their gradient, and drop the parameters if the schedule says so."""
        self.leave_forward()
        found = [] if call is None else tensors_in(output)
        if call is not None and output is not None and not found:
            warn_of_output(output, self.where)
        watched = [tensor for tensor in found if tensor.requires_grad]
        if watched and call is not None:
            call.end = next(_moments)
            self.calls.append(call)
            torch.autograd.graph.register_multi_grad_hook(
                watched, lambda _: self.pre_backward(call), mode="any"
            )
        recomputing = self.phase is Phase.PRE_BACKWARD  # its backward follows immediately
        if not recomputing and not (watched and self._schedule.keeps_after_forward(self)):
            self.reshard()
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
                fix="Call backward() before changing weights, or run the forward again.",
            )
        call.awaited_inputs, call.done = call.marked_inputs, False
        if call not in self.calls:  # a second backward through a graph that was kept
            self.calls.append(call)
        self._schedule.backward_begins(call)
        if self.phase is not Phase.PRE_BACKWARD:
            self.enter(Phase.PRE_BACKWARD)
        self.unshard()

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

    def start_reduction(self) -> list[PendingReduction]:
        """Issue the reduce-scatters of the trainable flat parameters. Collective."""
        self.enter(Phase.POST_BACKWARD)
        reductions = []
        for number, flat_param in enumerate(self.flat_params):
            if flat_param.requires_grad:
                with explained(f"{self.where}, reduce-scatter", [self.group]):
                    reductions.append(flat_param.start_reduction(self.tag(number, reduction=True)))
                dtype = flat_param._precision.gradient_dtype(flat_param.dtype)
                self.record_collective("reduce-scatter", flat_param, dtype)
        return reductions

    def finish_backward(self) -> None:
        """Drop the full parameters after the gradient was taken care of."""
        if self.phase is not Phase.POST_BACKWARD:
            self.enter(Phase.POST_BACKWARD)
        self.reshard()
        self.enter(Phase.IDLE)

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

    def tag(self, number: int, *, reduction: bool) -> int:
        """Return the number that keeps a flat parameter's messages apart from all others."""
        # Gathers and reductions of different units, and of different models, never meet: each
        # has a number of its own. The remainders keep it within the 31 bits that a tag may have.
        unit = self.root_number % 256 * 8192 + self.index % 8192
        return (unit * 64 + number % 64) * 2 + int(reduction)

    def record_collective(
        self, operation: str, flat_param: FlatParameter, dtype: torch.dtype
    ) -> None:
        """Record that shards of a flat parameter go to the other ranks."""
        record(
            self.name,
            self.phase.value,
            operation,
            bytes_on_wire=bytes_per_gather(flat_param.numel(), dtype, self.group),
            group=self.group.ranks,
            dtype=dtype,
        )
