"""Full parameters for those who look at them from outside, apart from those to compute with.

`summon_full_params` and state dicts gather a unit into memory of its own: in the parameters' own
dtype, where the unit may compute in a lower one, and beside what autograd keeps for a backward.
So whoever looks, or edits what is thrown away afterwards, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from fsdp_ref.collectives import bytes_per_gather, explained, start_all_gather, start_gather
from fsdp_ref.recording import record
from fsdp_ref.states import ShardState
from fsdp_ref.unit import Unit


def gather_exact(unit: Unit, reader: int | None = None) -> None:
    """Gather the full parameters of a unit in their own dtype; `shown` leads to them. Collective.

    Args:
        unit: The unit; every rank of its group calls this.
        reader: Position in the group of the only rank that wants them, `None` for all. The
            others then need no memory for them.

    Raises:
        SilentRanksError: If a rank of the group does not take part.
    """
    for flat_param in unit.flat_params:
        flat_param.prepare()
    fulls = gather_shards(unit, dict(enumerate(unit.flat_params)), reader)
    for number, flat_param in enumerate(unit.flat_params):
        flat_param._exact = fulls[number]
        record_gather(unit, flat_param, reader)


def show_exact(unit: Unit, device: torch.device | None = None) -> None:
    """Let the original parameters be views of what `gather_exact` has gathered.

    Args:
        unit: The unit.
        device: Where to move it first.
    """
    for flat_param in unit.flat_params:
        full = flat_param.shown
        flat_param._exact = full if device is None else full.to(device)
        flat_param._leaves.point_at(flat_param.shown)


def drop_exact(unit: Unit) -> None:
    """Drop what `gather_exact` gathered; the parameters are again what the unit's state says."""
    for flat_param in unit.flat_params:
        flat_param._exact = None
        if unit.state is ShardState.UNSHARDED:
            flat_param._leaves.point_at(flat_param.shown, to_compute=True)
        else:
            flat_param.free()


def gather_shards(
    unit: Unit, shards: Mapping[int, Tensor], reader: int | None = None
) -> dict[int, Tensor | None]:
    """Join shards of all ranks of a unit: of its parameters, or of their gradients. Collective.

    Args:
        unit: The unit; every rank of its group calls this.
        shards: This rank's shard, ``(shard_numel,)``, per number of the flat parameter.
        reader: Position in the group of the only rank that wants the result, `None` for all.

    Returns:
        The whole, ``(padded_numel,)``, per number, on the device to compute on, in memory of
        its own; `None` for ranks that do not want it.
    """
    fulls, gathers = {}, []
    with explained(f"{unit.where}, all-gather of full values", [unit.group]):
        for number, at_rest in shards.items():
            shard = at_rest.detach().to(unit.flat_params[number].compute_device)
            wanted = reader in (None, unit.group.rank)
            full = shard.new_empty(unit.group.size * shard.numel()) if wanted else None
            tag = unit.tag(number, reduction=False)
            if full is not None and reader is None:
                gathers.append((shard, start_all_gather(full, shard, unit.group, tag)))
            else:
                gather = start_gather(full, shard, unit.group, reader or 0, tag)
                gathers.append((shard, gather))
            fulls[number] = full
        for _, gather in gathers:  # each shard is kept until it was sent
            gather.wait()
    return fulls


def record_gather(unit: Unit, shard: Tensor, reader: int | None) -> None:
    """Record that shards of a unit have gone to all of its ranks, or to one."""
    if reader is None:
        operation, sent = "all-gather", bytes_per_gather(shard.numel(), shard.dtype, unit.group)
    else:
        operation, sent = "gather", 0 if unit.group.rank == reader else shard.nbytes
    record(unit.name, unit.phase.value, operation,
           bytes_on_wire=sent, group=unit.group.ranks, dtype=shard.dtype)  # fmt: skip


@contextmanager
def exact_values(unit: Unit, reader: int | None = None) -> Iterator[None]:
    """Let `shown` lead to the full parameters in their own dtype for a while. Collective.

    The original parameters stay what they are.

    Args:
        unit: The unit.
        reader: Position in the group of the only rank that wants them, `None` for all.

    Yields:
        Nothing.
    """
    gather_exact(unit, reader)
    try:
        yield
    finally:
        for flat_param in unit.flat_params:
            flat_param._exact = None
