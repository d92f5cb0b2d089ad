"""Units that exist in several copies: their gradients are averaged, their edits compared.

Under a hybrid strategy each host holds one copy of the unit, cut over its ranks. Ranks that
hold the same shard of different copies form a group of their own, the replicate group.
"""

from __future__ import annotations

from torch import Tensor

from fsdp_ref.collectives import (
    add_up_gradients,
    bytes_per_all_reduce,
    bytes_per_gather,
    start_all_gather,
)
from fsdp_ref.recording import record
from fsdp_ref.unit import Unit


def add_up_over_copies(unit: Unit, shard: Tensor) -> Tensor:
    """Add up a reduced gradient shard over the unit's copies, if there are any. Collective."""
    replicate = unit.placement.replicate
    if replicate is None or unit.has_comm_hook:
        return shard
    sent = bytes_per_all_reduce(shard, replicate)
    record(unit.name, unit.phase.value, "all-reduce",
           bytes_on_wire=sent, group=replicate.ranks, dtype=shard.dtype)  # fmt: skip
    return add_up_gradients(shard, replicate)


def versions_of_copies(unit: Unit, mine: Tensor, tag: int) -> list[Tensor]:
    """Ask the unit's other copies what they hold in place of ``mine``. Collective."""
    replicate = unit.placement.replicate
    if replicate is None:
        return []
    versions = mine.new_empty(replicate.size * mine.numel())
    sent = bytes_per_gather(mine.numel(), mine.dtype, replicate)
    record(unit.name, unit.phase.value, "all-gather",
           bytes_on_wire=sent, group=replicate.ranks, dtype=mine.dtype)  # fmt: skip
    start_all_gather(versions, mine.contiguous(), replicate, tag).wait()
    return list(versions.view(replicate.size, -1))
