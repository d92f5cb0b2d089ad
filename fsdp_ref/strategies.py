"""Sharding strategies: what is cut, what is copied, and what stays whole after a forward.

Cutting saves memory and costs messages. A strategy says where to stop. Hand it to the
constructor as `sharding_strategy`; a policy may return another one for a single unit.

| strategy | parameters | gradients, optimizer state | between forward and backward |
| --- | --- | --- | --- |
| `FULL_SHARD` | cut over the group | cut | dropped |
| `SHARD_GRAD_OP` | cut over the group | cut | kept whole |
| `NO_SHARD` | copied to all of the group | copied | kept whole |
| `HYBRID_SHARD` | cut within a host, copied across hosts | as the parameters | dropped |
| `_HYBRID_SHARD_ZERO2` | cut within a host, copied across hosts | as the parameters | kept whole |

The group is `process_group`, by default all ranks. Dropping costs one more all-gather in the
backward of every unit but the root, and saves the memory of the whole model between forward
and backward. The root is never dropped there, because its backward follows at once. Copies
cost memory; their gradients are averaged by an all-reduce after the reduce-scatter.

The hybrid strategies take a pair of groups, or a mesh of two dimensions. Left out, it is one
host and, across hosts, the ranks of equal local rank. See
[process groups][fsdp_ref.process_groups]. What is sent on each level stands in a
[timeline][fsdp_ref.Timeline]: `summary().bytes_by_ranks`. Copies must start equal; the first
forward compares them.

Tip: Keep weights whole after a forward if they fit
    `SHARD_GRAD_OP` sends what plain data parallelism sends, and cuts gradients and the state of
    the optimizer all the same. It needs memory for the whole model between forward and backward.
    `FULL_SHARD` needs it for two units, and pays with one more all-gather.

    Proof: strategies/bytes_and_memory
"""

from __future__ import annotations

import difflib
from enum import Enum
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fsdp_ref import process_groups, rank_words
from fsdp_ref.errors import GroupWordError, StrategyError, this_rank
from fsdp_ref.rank_group import Placement, RankGroup

_KEPT_WHOLE = ("SHARD_GRAD_OP", "NO_SHARD", "_HYBRID_SHARD_ZERO2")
_HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
PLACE_ARGUMENTS = ("sharding_strategy", "process_group", "device_mesh")
"""The constructor arguments that say where a unit's weights are."""
_NAMES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", *_HYBRID)


def strategy_name(strategy: Any, where: str) -> str:
    """Return the name of a strategy given as torch's enum, as a word in either case, or `None`.

    Args:
        strategy: `None` means `FULL_SHARD`.
        where: Who asks, for messages.

    Returns:
        One of the names in the table of this module.

    Raises:
        StrategyError: If there is no such strategy.

    Example:
        >>> strategy_name("full_shard", "unit 'layer'"), strategy_name(None, "unit 'layer'")
        ('FULL_SHARD', 'FULL_SHARD')
    """
    if strategy is None:
        return "FULL_SHARD"
    name = strategy.name if isinstance(strategy, Enum) else strategy
    if isinstance(name, str) and name.upper() in _NAMES:
        return name.upper()
    nearest = difflib.get_close_matches(str(name).upper(), _NAMES, n=1)
    raise StrategyError.at(
        f"{where}, sharding_strategy={strategy!r}",
        expected=f"one of {', '.join(_NAMES)}",
        found=repr(strategy),
        fix=f"Did you mean {nearest[0]!r}?" if nearest else "Torch's enum works as well.",
    )


def place(
    sharding_strategy: Any = None,
    process_group: Any = None,
    device_mesh: DeviceMesh | None = None,
    *,
    where: str,
) -> Placement:
    """Turn the arguments of a unit into the ranks that share and copy it. Local.

    Args:
        sharding_strategy: As for [strategy_name][fsdp_ref.strategies.strategy_name].
        process_group: As for [resolve][fsdp_ref.process_groups.resolve]; a hybrid strategy
            takes a pair of such, the ranks that share and the ranks that copy. `None` means
            one host and, across hosts, the ranks of equal local rank. A mesh works here too.
        device_mesh: In place of `process_group`: one dimension, or for hybrid strategies two,
            of which the first copies and the second shares.
        where: Who asks, for messages.

    Returns:
        The placement; its groups may not be live yet.

    Raises:
        StrategyError: If there is no such strategy, if mesh and group are both given, or if the
            number of groups does not fit the strategy.
        GroupMembershipError: If this rank is not in a group.
        GroupWordError: If a word does not divide the world, or if the two groups of a pair
            are not the rows and columns of a grid.
    """
    name = strategy_name(sharding_strategy, where)
    if device_mesh is not None and process_group is not None:
        raise StrategyError.at(
            where, expected="a device mesh or a process group", found="both",
            fix="Leave out process_group; the mesh says who takes part.",
        )  # fmt: skip
    asked: Any = process_group if device_mesh is None else device_mesh
    if isinstance(asked, DeviceMesh):
        asked = _of_mesh(asked, where)
    whole = name in _KEPT_WHOLE
    if name in _HYBRID:
        shard, replicate = _pair(asked, where)
        return _copies(shard, replicate, whole)
    if _is_pair(asked) and not rank_words.is_lists(asked):
        raise StrategyError.at(
            where, expected=f"one group for {name}", found="a pair of groups",
            fix="Choose HYBRID_SHARD, which cuts within one and copies across the other.",
        )  # fmt: skip
    group = process_groups.resolve(asked, where=where)
    if name == "NO_SHARD":
        return _copies(process_groups.resolve("self", where=where), group, whole)
    return Placement(group, reshard_after_forward=not whole)


def _copies(shard: RankGroup, replicate: RankGroup, whole: bool) -> Placement:
    # Whoever is averaged with this rank has to hold the same piece of its own copy.
    replicate.piece = f"shard {shard.rank} of {shard.size}"
    return Placement(shard, replicate, reshard_after_forward=not whole)


def _pair(asked: Any, where: str) -> tuple[RankGroup, RankGroup]:
    if asked is None:
        asked = ("node", "local_rank_across_nodes")
    if not _is_pair(asked):
        raise StrategyError.at(
            where, expected="a pair of groups: the ranks that share, the ranks that copy",
            found=repr(asked), fix="For example ('node', 'local_rank_across_nodes').",
        )  # fmt: skip
    shard, replicate = (process_groups.resolve(one, where=where) for one in asked)
    if set(shard.ranks) & set(replicate.ranks) != {this_rank()}:
        raise GroupWordError.at(
            where, expected="groups that share this rank only",
            found=f"{list(shard.ranks)} and {list(replicate.ranks)}",
            fix="The first group holds one copy; the second, the same shard of each copy.",
        )  # fmt: skip
    if all(isinstance(one, str) or rank_words.is_lists(one) for one in asked):
        first, second = map(process_groups.rank_lists, asked)
        rank_words.refuse_no_grid(first, second, where)
    return shard, replicate


def _is_pair(asked: Any) -> bool:
    """Whether it can be two groups, rather than a list of two ranks."""
    is_two = rank_words.is_list(asked) and len(asked) == 2
    return is_two and not all(isinstance(one, int) for one in asked)


def _of_mesh(mesh: DeviceMesh, where: str) -> ProcessGroup | tuple[ProcessGroup, ProcessGroup]:
    """Return a mesh's group, or its two: the ranks that share, the ranks that copy."""
    if mesh.ndim == 1:
        return process_groups.group_of_mesh(mesh, 0, where)
    if mesh.ndim == 2:
        first, second = (process_groups.group_of_mesh(mesh, dim, where) for dim in (0, 1))
        return second, first
    raise StrategyError.at(
        where, expected="a mesh of one or two dimensions", found=f"{mesh.ndim} dimensions",
        fix="Take a part of it: mesh['replicate', 'shard'].",
    )  # fmt: skip
