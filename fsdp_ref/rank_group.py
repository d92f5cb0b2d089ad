"""Which ranks share a unit, and the live process group once it exists.

Sharding is arithmetic: it needs the ranks and this process's position among them, nothing
more. The live `ProcessGroup` is needed only when tensors move, so it may come later.
`process_groups.py` fills it in, for the whole tree at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch.distributed import ProcessGroup

from fsdp_ref.errors import GroupNotCreatedError


@dataclass(eq=False)
class RankGroup:
    """The ranks that share a unit.

    Attributes:
        ranks: Global ranks, in the order of the group.
        rank: This process's position in `ranks`.
        process_group: The live group, or `None` until `process_groups.create` has made it.
        asked: How the group was asked for, for messages, such as `"process_group='node'"`.
        piece: What all of these ranks must hold alike, in words; empty if each holds its own.
        pairs_by_order: Whether messages of a unit are told apart by their order alone, so that
            gathers and reductions need a group each.
        reductions: The second live group, for the reductions of such units.

    Examples:
        Half of four ranks, seen by global rank 3. No process is needed for this much.

        >>> group = RankGroup(ranks=(2, 3), rank=1)
        >>> group.size, group.process_group
        (2, None)
    """

    ranks: tuple[int, ...]
    rank: int
    process_group: ProcessGroup | None = None
    asked: str = ""
    piece: str = ""
    pairs_by_order: bool = False
    reductions: ProcessGroup | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the live groups behind when pickled; they belong to this process."""
        return {**self.__dict__, "process_group": None, "reductions": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> RankGroup:
        """Share the live groups with a copy."""
        return replace(self)

    @property
    def size(self) -> int:
        """Number of ranks that share the unit."""
        return len(self.ranks)

    @property
    def live(self) -> ProcessGroup:
        """The live process group; local, it never creates one.

        Raises:
            GroupNotCreatedError: If the group was not created yet.
        """
        if self.process_group is None:
            raise GroupNotCreatedError.at(
                f"group of ranks {list(self.ranks)}",
                expected="a live process group",
                found="a group that was not created yet",
                fix="Run the outermost unit first: it creates the groups of the whole tree.",
            )
        return self.process_group

    @property
    def live_for_reductions(self) -> ProcessGroup:
        """The live process group on which gradients travel; local, it never creates one.

        Not every rank issues a gather and a reduction in one order. On one group NCCL would
        pair the one with the other.

        Raises:
            GroupNotCreatedError: If the group was not created yet.
        """
        return self.live if self.reductions is None else self.reductions


@dataclass(eq=False)
class Placement:
    """Where a unit's weights are: cut over some ranks, copied over others, whole for how long.

    Attributes:
        shard: The ranks that share one copy; each holds a shard.
        replicate: The ranks that hold the same shard of other copies, this one among them;
            `None` when there is one copy only.
        reshard_after_forward: Whether full parameters are dropped between forward and backward.
    """

    shard: RankGroup
    replicate: RankGroup | None = None
    reshard_after_forward: bool = True

    @property
    def groups(self) -> list[RankGroup]:
        """The groups to go through, one after the other, to reach all ranks of all copies."""
        return [self.shard] if self.replicate is None else [self.shard, self.replicate]

    @property
    def copies(self) -> int:
        """Number of copies of the unit that are kept equal."""
        return 1 if self.replicate is None else self.replicate.size

    @property
    def size(self) -> int:
        """Number of ranks over which the gradient is averaged."""
        return self.shard.size * self.copies
