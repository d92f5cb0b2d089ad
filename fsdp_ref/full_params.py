"""Full parameters for a while: what `summon_full_params` does.

Inside the context every module holds its parameters again, registered and named as before
wrapping. They lie in memory of their own, so a forward that is still to be differentiated keeps
what it saved. Writes persist as a whole or not at all: on the way out every rank is asked what
it holds, and a write on some ranks only is reported instead of being cut into a patchwork. See
[fsdp_ref.edits][] for how.

With `rank0_only` one rank per unit sees the parameters and the others pay no memory: the first
rank of the unit's group, and of its first copy if it has several. So each weight of a model with
mixed groups is seen exactly once. That rank's edits then count for everybody; they are sent to
those who own the pieces. DeepSpeed's `GatheredParameters` calls it the modifier rank; torch
refuses the combination.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from fsdp_ref.collectives import explained
from fsdp_ref.edits import write_back
from fsdp_ref.errors import SummonContextError
from fsdp_ref.exact import drop_exact, gather_exact, show_exact
from fsdp_ref.full_grads import hidden_gradients, show_full_gradients
from fsdp_ref.rank_group import RankGroup
from fsdp_ref.states import Phase, ShardState
from fsdp_ref.unit import Unit


@contextmanager
def full_parameters(
    units: Sequence[Unit],
    groups: Sequence[RankGroup],
    *,
    writeback: bool,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Register the original parameters of ``units`` with their full values. Collective.

    Args:
        units: Units of one model, in the same order on all ranks.
        groups: The root's groups: all of their ranks keep the edits, or none does.
        writeback: Whether edits persist; every rank has to make the same ones.
        rank0_only: Only the first rank of each unit sees them, and only its edits count.
        offload_to_cpu: Whether they are shown on the CPU.
        with_grads: Whether `.grad` is the full mean gradient, and edits of it persist too.

    Yields:
        Nothing; the parameters are in their modules.

    Raises:
        SummonContextError: If a unit is summoned already, or is inside its forward or backward;
            on the way out, if an edit cannot be kept, such as another shape.
        SummonDisagreementError: If ranks wrote different values; nothing is written then. Or if
            only some ranks have gradients to show.
        UnsynchronizedStepError: If gradients are to be shown and are not reduced yet.
        SilentRanksError: If a rank does not take part.
    """
    for unit in units:
        _refuse_when_busy(unit)
    readers = {unit for unit in units if not rank0_only or is_first(unit)}
    with ExitStack() as stack:
        for unit in units:
            stack.enter_context(_shown(unit, unit in readers, rank0_only, offload_to_cpu))
        unless_kept = stack.enter_context(_requires_grad_restored(units))
        gradients = None
        if with_grads:
            gradients = show_full_gradients(units, readers, groups, rank0_only=rank0_only)
        yield
        if writeback:
            with explained("summon_full_params, comparing what ranks wrote", groups):
                write_back(units, readers, groups, gradients, rank0_only=rank0_only)
            unless_kept.pop_all()


def is_first(unit: Unit) -> bool:
    """Return whether this is the rank that sees the unit under `rank0_only`."""
    replicate = unit.placement.replicate
    return unit.group.rank == 0 and (replicate is None or replicate.rank == 0)


@contextmanager
def _shown(unit: Unit, reads: bool, rank0_only: bool, offload_to_cpu: bool) -> Iterator[None]:
    """Show one unit's parameters on ranks that read; collective, as far as it is gathered."""
    replicate = unit.placement.replicate
    leaves = tuple(leaf for flat_param in unit.flat_params for _, leaf in flat_param._leaves)
    with ExitStack() as stack:
        stack.enter_context(_summoned(unit))
        for flat_param in unit.flat_params:
            stack.enter_context(hidden_gradients(flat_param))
            flat_param.follow_requires_grad()
        # Edits are made to copies: the weights that autograd saved in a forward are untouched.
        stack.enter_context(_unsafe_preserve_version_counter(leaves))
        if not rank0_only:
            gather_exact(unit)
        elif replicate is None or replicate.rank == 0:
            gather_exact(unit, reader=0)
        if reads:
            stack.callback(drop_exact, unit)
            show_exact(unit, torch.device("cpu") if offload_to_cpu else None)
            stack.callback(_hide, unit)
            unit.registered.show()
        yield


@contextmanager
def _summoned(unit: Unit) -> Iterator[None]:
    if unit.state is ShardState.UNSHARDING:
        unit.reshard()  # gathered ahead by a forward that an exception has ended
    unit.summoned = True
    try:
        yield
    finally:
        unit.summoned = False


def _hide(unit: Unit) -> None:
    for original in [o for flat_param in unit.flat_params for o in flat_param._originals]:
        for module, attribute, _ in original.places:
            module.__dict__.pop(attribute, None)
            module._parameters[attribute] = original.parameter  # whatever replaced it
    unit.registered.hide()
    unit.registered.set_gathered(unit.state is ShardState.UNSHARDED)


@contextmanager
def _requires_grad_restored(units: Sequence[Unit]) -> Iterator[ExitStack]:
    """Freeze and thaw on the way out as on the way in, unless the caller takes the stack away."""
    with ExitStack() as stack:
        for flat_param in [flat_param for unit in units for flat_param in unit.flat_params]:
            for _, leaf in flat_param._leaves:
                stack.callback(leaf.requires_grad_, leaf.requires_grad)
        yield stack


def _refuse_when_busy(unit: Unit) -> None:
    busy = {Phase.FORWARD: "a forward under way"}.get(unit.phase)
    if torch._C._current_graph_task_id() != -1:
        busy = "a backward under way"
    if unit.summoned:
        busy = "summon_full_params entered again"
    if busy is not None:
        raise SummonContextError.at(
            unit.where,
            expected="a unit that is neither summoned nor inside a forward or backward",
            found=busy,
            fix="Leave the inner context, or open one context around everything.",
        )
