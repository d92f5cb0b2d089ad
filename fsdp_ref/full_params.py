"""Full parameters for a while: what `summon_full_params` does.

Inside the context every module holds its parameters again, registered and named as before
wrapping. Writes persist as a whole or not at all: on the way out every rank is asked what it
holds, and a write on some ranks only is reported instead of being cut into a patchwork.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist

from fsdp_ref.collectives import (
    all_reduce,
    explained,
    gather_versions_of_my_slice,
    record_all_reduce,
)
from fsdp_ref.copies import versions_of_copies
from fsdp_ref.errors import SummonContextError, SummonDisagreementError
from fsdp_ref.exact import exact_parameters
from fsdp_ref.rank_group import RankGroup
from fsdp_ref.states import Phase, ShardState
from fsdp_ref.unit import Unit


@contextmanager
def full_parameters(
    units: Sequence[Unit], groups: Sequence[RankGroup], *, writeback: bool
) -> Iterator[None]:
    """Unshard ``units`` and register their original parameters. Collective.

    Args:
        units: Units of one tree, in the same order on all ranks.
        groups: The root's groups: all of their ranks keep the edits, or none does.
        writeback: Whether edits persist; every rank has to make the same ones.

    Yields:
        Nothing; the parameters are in their modules.

    Raises:
        SummonContextError: If a unit is summoned already, or is inside its forward.
        SummonDisagreementError: If ranks wrote different values; nothing is written then.
    """
    for unit in units:
        _refuse_when_busy(unit)
    kept = [unit for unit in units if unit.state is ShardState.UNSHARDED]
    with ExitStack() as stack:
        for unit in units:
            # Without write-back the gathered weights may have been edited: never keep them.
            stack.callback(_put_back, unit, writeback and unit in kept)
            stack.enter_context(exact_parameters(unit))
            unit.summoned = True
            unit.registered.show()
        yield
        if writeback:
            for unit in units:
                for flat_param in unit.flat_params:
                    flat_param.take_back_data()
                unit.registered.take_over_replacements()
            with explained("summon_full_params, comparing what ranks wrote", groups):
                write_back(units, groups)


def _put_back(unit: Unit, keep: bool) -> None:
    unit.registered.hide()
    unit.summoned = False
    if keep and unit._gathered == unit.generations():
        unit.registered.set_gathered(True)
    else:
        unit.reshard()


def _refuse_when_busy(unit: Unit) -> None:
    if unit.summoned or unit.phase is Phase.FORWARD:
        raise SummonContextError.at(
            unit.where,
            expected="a unit that is neither summoned nor inside its forward",
            found="summon_full_params entered again" if unit.summoned else "a forward under way",
            fix="Leave the inner context, or open one context around everything.",
        )


def write_back(units: Sequence[Unit], groups: Sequence[RankGroup]) -> None:
    """Copy edits into the shards if all ranks of each unit hold the same values. Collective.

    Args:
        units: Unsharded units, in the same order on all ranks.
        groups: The root's groups.

    Raises:
        SummonDisagreementError: On every rank of ``groups``, if any ranks differ in any unit.
    """
    edits, disagreeing, changed = [], [], []
    for unit in units:
        for number, flat_param in enumerate(unit.flat_params):
            tag = unit.tag(number, reduction=False)
            versions = gather_versions_of_my_slice(flat_param.shown, unit.group, tag)
            unit.record_collective("all-to-all", flat_param, flat_param.dtype)
            mine = versions[unit.group.rank]
            versions += versions_of_copies(unit, mine, tag)
            edits.append((flat_param, mine))
            disagreeing.append(not all(_same(mine, version) for version in versions))
            changed.append(not _same(flat_param.data, mine))
    verdict = torch.tensor([disagreeing, changed], dtype=torch.int32, device=_device(units))
    record_all_reduce("summon_full_params()", verdict, groups)
    disagreeing, changed = all_reduce(verdict, dist.ReduceOp.MAX, groups).tolist()
    if any(disagreeing):
        names = [unit.where for unit in units for _ in unit.flat_params]
        differing = [name for name, bad in zip(names, disagreeing, strict=True) if bad]
        raise SummonDisagreementError.at(
            "summon_full_params",
            expected="the same values written on every rank",
            found=f"ranks that differ in {', '.join(dict.fromkeys(differing))}",
            fix="Make the same edit on every rank (same seed, no `if rank == 0`); the weights "
            "are as they were before the context.",
        )
    for (flat_param, mine), anywhere in zip(edits, changed, strict=True):
        # What no rank changed keeps its version, because a backward may still follow; what any
        # rank changed gets a new one on all ranks alike.
        if anywhere:
            with torch.no_grad():
                flat_param.copy_(mine)


def _device(units: Sequence[Unit]) -> torch.device:
    devices = [flat_param.device for unit in units for flat_param in unit.flat_params]
    return devices[0] if devices else torch.device("cpu")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bit by bit, so that NaN equals NaN and 0 differs from -0."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
