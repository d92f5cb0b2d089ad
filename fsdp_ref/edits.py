"""What ranks wrote inside `summon_full_params`, and whether it persists: as a whole or not at all.

Every rank owns a slice of each unit. It asks the others what they hold in its slice, and
compares bit by bit; one small all-reduce then tells everybody whether anybody found a difference.
Only after that is anything written. Under `rank0_only` there is nothing to compare: the rank
that saw the parameters sends each owner its slice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fsdp_ref.collectives import broadcast, gather_versions_of_my_slice, scatter
from fsdp_ref.copies import versions_of_copies
from fsdp_ref.errors import SummonContextError
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.full_grads import (
    gradients_given,
    keep_gradients,
    refuse_lost_gradients,
    written_gradient,
)
from fsdp_ref.rank_group import RankGroup
from fsdp_ref.recording import record
from fsdp_ref.unit import Unit
from fsdp_ref.votes import Ballot


@dataclass(frozen=True)
class Edit:
    """What was written over one shard of this rank.

    Attributes:
        where: What it belongs to, for messages.
        shard: The shard as it is, ``(shard_numel,)``.
        written: What was written in its place.
        differs: Whether other ranks wrote something else there.
        keep: Called with `written` if it persists and any rank changed anything.
        is_new: Whether there was no such shard before.
    """

    where: str
    shard: Tensor
    written: Tensor
    differs: bool
    keep: Callable[[Tensor], object]
    is_new: bool = False

    @property
    def changed(self) -> bool:
        """Whether this rank would have to write anything to keep it."""
        return self.is_new or not _same(self.shard, self.written)


def write_back(
    units: Sequence[Unit],
    readers: Collection[Unit],
    groups: Sequence[RankGroup],
    gradients: Mapping[FlatParameter, Tensor] | None = None,
    *,
    rank0_only: bool = False,
) -> None:
    """Copy edits into the shards if all ranks of each unit hold the same values. Collective.

    Besides values, freezing or thawing persists, and with ``gradients`` so does their absence.

    Args:
        units: Summoned units, in the same order on all ranks.
        readers: Those of which this rank sees the parameters.
        groups: The root's groups.
        gradients: What the parameters' gradients are views of; `None` if they are not shown.
        rank0_only: Take what the first rank of each unit wrote, instead of comparing.

    Raises:
        SummonContextError: If an edit cannot be kept: another shape, a parameter that was removed,
            one frozen without the others of its flat parameter, a gradient nobody asked for.
        SummonDisagreementError: On every rank of ``groups``, if any ranks differ in any unit.
    """
    for unit in units:
        if unit in readers:
            _take_back(unit)
            if gradients is None:
                refuse_lost_gradients(unit)
    given: dict[FlatParameter, list[bool]] = {}
    if gradients is not None:  # who has any decides what is sent, so all must know it first
        ballot = Ballot()
        _ask_of_leaves(ballot, "whether there is a gradient of", gradients_given, units, readers)
        given = _per_leaf(units, iter(ballot.count(units, groups)))
    edits = []
    for unit in units:
        for number, flat_param in enumerate(unit.flat_params):
            full = flat_param.shown if unit in readers else None
            edits.append(_edit_weights(unit, number, full, rank0_only))
            if gradients is not None and any(given[flat_param]):
                if unit in readers:
                    full = written_gradient(flat_param, gradients.get(flat_param))
                edits.append(_edit_gradient(unit, number, full, rank0_only))
    ballot = Ballot()
    _ask_of_leaves(ballot, "requires_grad of", _trainable, units, readers)
    for edit in edits:
        ballot.object_to(edit.where, edit.differs)
        ballot.ask(f"changes of {edit.where}", edit.changed or None)
    heard = iter(ballot.count(units, groups))
    for flat_param, wanted in _per_leaf(units, heard).items():
        _freeze(flat_param, wanted)
    _keep(edits, [changed for _, changed in zip(heard, heard, strict=True)])
    for flat_param, which in given.items():
        keep_gradients(flat_param, which)


def _take_back(unit: Unit) -> None:
    """Follow replaced memory and replaced parameters; refuse what cannot be kept."""
    for flat_param in unit.flat_params:
        flat_param.take_back_data()
        if not flat_param._options.use_orig_params:
            _refuse_partial_freeze(unit, flat_param)
    unit.registered.take_over_replacements()


def _refuse_partial_freeze(unit: Unit, flat_param: FlatParameter) -> None:
    # One flat parameter is trained, or it is not: an optimizer sees it as a whole.
    wanted = _trainable(flat_param)
    if any(wanted) != all(wanted):
        changed = [
            slot.name
            for (slot, _), trainable in zip(flat_param._leaves, wanted, strict=True)
            if trainable != flat_param.requires_grad
        ]
        raise SummonContextError.at(
            unit.where,
            expected="all parameters of a flat parameter frozen or none",
            found=f"only {', '.join(changed)} {'frozen' if flat_param.requires_grad else 'thawed'}",
            fix="Freeze before wrapping, or wrap with use_orig_params=True.",
        )


def _trainable(flat_param: FlatParameter) -> list[bool]:
    return [leaf.requires_grad for _, leaf in flat_param._leaves]


def _freeze(flat_param: FlatParameter, trainable: Sequence[bool]) -> None:
    for (_, leaf), wanted in zip(flat_param._leaves, trainable, strict=True):
        leaf.requires_grad_(wanted)
    flat_param.requires_grad_(any(trainable))


def _ask_of_leaves(
    ballot: Ballot,
    question: str,
    answer: Callable[[FlatParameter], list[bool]],
    units: Sequence[Unit],
    readers: Collection[Unit],
) -> None:
    """Ask those who see the parameters one question about each of them."""
    for unit in units:
        prefix = f"{unit.name}." if unit.name else ""
        for flat_param in unit.flat_params:
            names = [slot.name for slot, _ in flat_param._leaves]
            answers: list[bool | None] = [None] * len(names)
            if unit in readers:
                answers = [*answer(flat_param)]
            for name, mine in zip(names, answers, strict=True):
                ballot.ask(f"{question} '{prefix}{name}'", mine)


def _per_leaf(units: Sequence[Unit], answers: Iterator[bool]) -> dict[FlatParameter, list[bool]]:
    """Sort the answers to such questions by flat parameter."""
    return {
        flat_param: [next(answers) for _ in flat_param._leaves]
        for unit in units
        for flat_param in unit.flat_params
    }


def _edit_weights(unit: Unit, number: int, full: Tensor | None, rank0_only: bool) -> Edit:
    flat_param = unit.flat_params[number]
    written, differs = _written(unit, number, full, rank0_only)
    written = _apart(written, flat_param)
    return Edit(unit.where, flat_param.detach(), written, differs, flat_param.copy_)


def _edit_gradient(unit: Unit, number: int, full: Tensor | None, rank0_only: bool) -> Edit:
    flat_param = unit.flat_params[number]
    before = flat_param._saved_grad_shard
    written, differs = _written(unit, number, full, rank0_only)
    where = f"the gradient of {unit.where}"
    if before is not None:
        return Edit(where, before, _apart(written, before), differs, before.copy_)
    written = _apart(written, flat_param).to(flat_param.kept_gradient_dtype)
    return Edit(where, written, written, differs, partial(setattr, flat_param, "grad"), is_new=True)


def _apart(written: Tensor, shard: Tensor) -> Tensor:
    """Copy what was written to the shard's dtype and device.

    Always a copy: this rank's slice alone would keep the whole alive on the device.
    """
    return written.to(shard.device, shard.dtype, copy=True)


def _written(unit: Unit, number: int, full: Tensor | None, rank0_only: bool) -> tuple[Tensor, bool]:
    """Return what was written in this rank's slice, and whether ranks differ. Collective."""
    flat_param, tag = unit.flat_params[number], unit.tag(number, reduction=False)
    device = flat_param.compute_device
    full = None if full is None else full.to(device)
    if full is None or rank0_only:
        mine = torch.empty(flat_param.numel(), dtype=flat_param.dtype, device=device)
        _receive_mine(unit, full, mine, tag)
        return mine, False
    versions = gather_versions_of_my_slice(full, unit.group, tag)
    unit.record_collective("all-to-all", flat_param, flat_param.dtype)
    mine = versions[unit.group.rank]
    versions += versions_of_copies(unit, mine, tag)
    return mine, not all(_same(mine, version) for version in versions)


def _receive_mine(unit: Unit, full: Tensor | None, mine: Tensor, tag: int) -> None:
    """Fill ``mine`` with this rank's slice of what the reader of the unit holds."""
    group, replicate = unit.group, unit.placement.replicate
    if replicate is None or replicate.rank == 0:
        scatter(full, mine, group, sender=0, tag=tag)
        sent = (group.size - 1) * mine.nbytes if group.rank == 0 else 0
        record(unit.name, unit.phase.value, "scatter",
               bytes_on_wire=sent, group=group.ranks, dtype=mine.dtype)  # fmt: skip
    if replicate is not None:
        sent = broadcast([mine], replicate)
        record(unit.name, unit.phase.value, "broadcast",
               bytes_on_wire=sent, group=replicate.ranks, dtype=mine.dtype)  # fmt: skip


def _keep(edits: Sequence[Edit], changed: Sequence[bool]) -> None:
    """Write what any rank has changed."""
    for edit, anywhere in zip(edits, changed, strict=True):
        # What no rank changed keeps its version, because a backward may still follow; what any
        # rank changed gets a new one on all ranks alike.
        if anywhere:
            with torch.no_grad():
                edit.keep(edit.written)


def _same(one: Tensor, other: Tensor) -> bool:
    """Compare bit by bit, so that NaN equals NaN and 0 differs from -0."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
