"""Full gradients beside full parameters: what `summon_full_params(with_grads=True)` adds.

A gradient shard is gathered like a parameter shard. Every original parameter's `.grad` is then
the mean over the ranks, whole; clipping by value, printing norms or clearing some of them is code
as for a plain model. Whether there is a gradient at all is asked of all ranks first: if only some
had one, the others would never take part in the gather.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fsdp_ref.errors import SummonContextError
from fsdp_ref.exact import gather_shards, record_gather
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.optimizer_watch import refuse_unreduced
from fsdp_ref.rank_group import RankGroup
from fsdp_ref.unit import Unit
from fsdp_ref.votes import Ballot


@contextmanager
def hidden_gradients(flat_param: FlatParameter) -> Iterator[None]:
    """Let the original parameters have no `.grad`; with `use_orig_params` it is no full one.

    Args:
        flat_param: Their flat parameter.

    Yields:
        Nothing. Afterwards `.grad` is what the flat parameter holds then.
    """
    flat_param.take_back_gradients()
    try:
        yield
    finally:
        for _, leaf in flat_param._leaves:
            leaf.grad = None
        flat_param.show_gradients()


def show_full_gradients(
    units: Sequence[Unit],
    readers: Collection[Unit],
    groups: Sequence[RankGroup],
    *,
    rank0_only: bool,
) -> dict[FlatParameter, Tensor]:
    """Set every original parameter's `.grad` to its full mean gradient. Collective.

    Args:
        units: Summoned units, in the same order on all ranks.
        readers: Those of which this rank sees the parameters.
        groups: The root's groups.
        rank0_only: Only the first rank of each unit sees anything.

    Returns:
        The full gradients, ``(padded_numel,)``, that the parameters' are views of.

    Raises:
        UnsynchronizedStepError: If gradients from inside `no_sync` are not reduced yet.
        SummonDisagreementError: If only some ranks have a gradient.
    """
    flat_params = [flat_param for unit in units for flat_param in unit.flat_params]
    refuse_unreduced(flat_params, "summon_full_params(with_grads=True)")
    ballot = Ballot()
    for unit in units:
        for flat_param in unit.flat_params:
            has = flat_param._saved_grad_shard is not None
            ballot.ask(f"whether {unit.where} has a gradient", has)
    ballot.count(units, groups)
    shown = {}
    for unit in units:
        replicate = unit.placement.replicate
        if rank0_only and replicate is not None and replicate.rank != 0:
            continue  # nobody sees this copy
        fulls = gather_shards(unit, _gradient_shards(unit), 0 if rank0_only else None)
        for number, full in fulls.items():
            flat_param = unit.flat_params[number]
            shard = flat_param._saved_grad_shard
            record_gather(unit, flat_param if shard is None else shard, 0 if rank0_only else None)
            if full is not None and unit in readers:
                shown[flat_param] = _show(flat_param, full)
    return shown


def _gradient_shards(unit: Unit) -> dict[int, Tensor]:
    shards = {n: flat_param._saved_grad_shard for n, flat_param in enumerate(unit.flat_params)}
    return {number: shard for number, shard in shards.items() if shard is not None}


def _show(flat_param: FlatParameter, full: Tensor) -> Tensor:
    full = full.to(flat_param.shown.device, flat_param.dtype)  # those of the parameter, as a rule
    for index, (slot, leaf) in enumerate(flat_param._leaves):
        if not flat_param._options.use_orig_params or index in flat_param._given:
            leaf.grad = full[slot.offset : slot.stop].view(slot.shape)
    return full


# On the way out


def gradients_given(flat_param: FlatParameter) -> list[bool]:
    """Return which original parameters have a gradient now."""
    return [leaf.grad is not None for _, leaf in flat_param._leaves]


def written_gradient(flat_param: FlatParameter, full: Tensor | None) -> Tensor:
    """Return the full gradient as the original parameters have it now; zeros where they have none.

    Args:
        flat_param: A flat parameter some of whose parameters have a gradient.
        full: What the gradients were views of, if there were any; it is written to.

    Returns:
        One tensor, ``(padded_numel,)``.
    """
    if full is None:
        full = torch.zeros_like(flat_param.shown)
    for slot, leaf in flat_param._leaves:
        view = full[slot.offset : slot.stop]
        if leaf.grad is None:
            view.zero_()
        elif slot.numel and leaf.grad.data_ptr() != view.data_ptr():
            view.copy_(leaf.grad.detach().reshape(-1))
    return full


def keep_gradients(flat_param: FlatParameter, given: Sequence[bool]) -> None:
    """Let the parameters that have a gradient keep it; forget the flat one if none has.

    Args:
        flat_param: Their flat parameter, whose gradient shard holds what was written.
        given: Which original parameters have a gradient.
    """
    if not any(given):
        flat_param.grad = None
    flat_param._given = {index for index, anywhere in enumerate(given) if anywhere}


def refuse_lost_gradients(unit: Unit) -> None:
    """Raise if gradients were set that nobody asked to see, and so nobody would keep.

    Args:
        unit: A unit summoned without gradients.

    Raises:
        SummonContextError: If so.
    """
    for flat_param in unit.flat_params:
        for slot, leaf in flat_param._leaves:
            if leaf.grad is not None:
                raise SummonContextError.at(
                    f"{unit.where}, '{slot.name}'",
                    expected="no gradients set inside summon_full_params",
                    found="a gradient, which would be lost",
                    fix="Pass with_grads=True to see and set gradients.",
                )
