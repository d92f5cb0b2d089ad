"""Which ranks share a unit, and the live process group once it exists.

Sharding is arithmetic: it needs the ranks and this process's position among them, nothing
more. The live `ProcessGroup` is needed only when tensors move, so it may come later.
`process_groups.py` fills it in, for the whole tree at once.
"""

from __future__ import annotations

from dataclasses import dataclass
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

    def __getstate__(self) -> dict[str, Any]:
        """Leave the live group behind when pickled; it belongs to this process."""
        return {**self.__dict__, "process_group": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> RankGroup:
        """Share the live group with a copy."""
        return RankGroup(self.ranks, self.rank, self.process_group, self.asked)

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
