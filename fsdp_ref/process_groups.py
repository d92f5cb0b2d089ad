"""Who shares a unit, and so who averages its gradient with whom.

Every unit is sharded over a group of ranks. By default that is all of them. A unit may be
given another group: an expert that lives on one rank, a layer that is shared inside a host
only. The group decides three things at once: over which ranks the weights are cut, which
ranks gather them, and over which ranks the gradient is averaged.

# Who averages with whom

Take four ranks. The root unit has no `process_group`, so all four average its gradient. A
layer given `process_group="set2"` is averaged by ranks 0 and 1 together, and by ranks 2 and
3 together. From the first step on there are two versions of that layer, one in each pair. A
layer given `process_group="self"` exists in four versions. That is what experts want, and
what a dense layer does not want.

Tip: A dense layer in a group smaller than the world drifts, and nothing stops it
    The ranks outside the group see other data, so they take other steps. Give small groups
    to weights that are meant to differ, such as experts, and leave all others in the default
    group.

    Proof: process_groups/who_averages_with_whom

# How to say a group

- `None`: all ranks.
- A `ProcessGroup` that this rank is a member of.
- A list of global ranks, this one among them. Each rank names its own group, so ranks 2 and
  3 say `[2, 3]` where ranks 0 and 1 say `[0, 1]`. The order in the list does not matter.
- A word, in either case. A word is the same on every rank, which makes it the easiest to
  get right.
- A pair of these, for [strategies][fsdp_ref.strategies] that cut within one group and copy
  across another.

These are the words:

| word | the groups | size of a group |
|---|---|---|
| `'self'`, `'set1'` | each rank alone | one |
| `'setK'` | blocks of K consecutive ranks | K |
| `'node'` | the ranks of one host | the local world size |
| `'modK'` | ranks that are equal modulo K | the world size divided by K |
| `'local_rank_across_nodes'` | the ranks with one local rank, across hosts | the number of hosts |

In `setK` the number is the size of a group. In `modK` it is the *number of groups*. Both must
divide the world size. Ask [table][fsdp_ref.process_groups.table] when in doubt; it needs no
processes:

    >>> print(table("mod2", world_size=8))
    mod2 on 8 ranks: 2 groups of 4
      0 2 4 6
      1 3 5 7

# A group for some modules only

A policy may return a dict of arguments for the unit that it selects, `process_group` among
them. All other units keep the arguments of the outermost constructor. The enclosing unit does
not hold the parameters of a unit inside it, so the two never average the same weight.

Tip: Give experts their group through the policy, not by editing the model
    A policy that returns `{"process_group": "self"}` for one class changes these units and
    nothing else. The model's code knows nothing of it, and runs unsharded as before.

    Proof: process_groups/experts_through_a_policy

# Groups are created late

Making a process group is itself a collective: all ranks of the world take part, also those
that stay outside, and in the same order. One group too many on one rank breaks the next group
on all. Cutting weights into shards needs only arithmetic. So a constructor notes the ranks
and makes nothing. When the outermost unit is set up, the ranks compare what all their units
asked for, and then make the union of it in one order. Equal sets of ranks share one group,
however they were spelt.

If the ranks do not fit together, all of them get an error that names the unit's position and
the ranks. Without the comparison they would wait for each other.

# Pitfalls

- A group gives its members equal weight. If `'self'` experts see different numbers of tokens,
  their gradients are means over different numbers of tokens too.
- A layer's group must contain all ranks that should agree on the layer. A group that merely
  contains this rank is enough to run, and not enough to be right.
- `state_dict` shows the versions that this rank's groups hold. If rank 0 alone writes a file,
  the versions of a layer in other groups are not in it.
- `'node'` and `'local_rank_across_nodes'` need to know how many processes run on each host.
  `torchrun` says so in the environment. Other launchers may not.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from fsdp_ref import agreement
from fsdp_ref.errors import (
    GroupMembershipError,
    GroupWordError,
    RankDisagreementError,
    this_rank,
)
from fsdp_ref.rank_group import RankGroup

_WORDS = "'self', 'node', 'local_rank_across_nodes', 'setK' or 'modK' with a number K"

# Ranks to group, for each default group; weak, so that destroying it drops its groups.
_caches: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ProcessGroup]] = WeakKeyDictionary()


def rank_lists(word: str, world_size: int, local_world_size: int | None = None) -> list[list[int]]:
    """Return the groups that a word means, as lists of global ranks. Pure arithmetic.

    Args:
        word: `'self'`, `'node'`, `'local_rank_across_nodes'`, `'setK'` or `'modK'`, in either
            case.
        world_size: Number of ranks.
        local_world_size: Number of ranks on each host; by default what `torchrun` wrote into
            the environment. Only `'node'` and `'local_rank_across_nodes'` read it.

    Returns:
        The groups in order of their lowest rank; each rank is in exactly one.

    Raises:
        GroupWordError: If the word is unknown, its number does not divide the world size, or
            the local world size is needed and unknown.

    Examples:
        >>> rank_lists("set2", world_size=4)
        [[0, 1], [2, 3]]
        >>> rank_lists("mod2", world_size=4)
        [[0, 2], [1, 3]]
        >>> rank_lists("NODE", world_size=4, local_world_size=2)
        [[0, 1], [2, 3]]
    """
    kind, number = _parse(word, local_world_size)
    if number < 1 or world_size < 1 or world_size % number:
        raise GroupWordError.at(
            f"process_group={word!r}",
            expected=f"a number that divides the world size {world_size}",
            found=str(number),
            fix=f"Divisors are {', '.join(map(str, _divisors(world_size)))}."
            if world_size > 0
            else "The world has at least one rank.",
        )
    if kind == "set":
        return [list(range(at, at + number)) for at in range(0, world_size, number)]
    return [list(range(at, world_size, number)) for at in range(number)]


def _parse(word: str, local_world_size: int | None) -> tuple[str, int]:
    """Reduce every word to one of two kinds, and its number."""
    lower = word.lower()
    if lower == "self":
        return "set", 1
    if lower == "node":
        return "set", _local_world_size(word, local_world_size)
    if lower == "local_rank_across_nodes":
        return "mod", _local_world_size(word, local_world_size)
    match = re.fullmatch(r"(set|mod)([0-9]+)", lower)
    if match is None:
        raise GroupWordError.at(
            f"process_group={word!r}",
            expected=_WORDS,
            found=repr(word),
            fix="A list of ranks or a ProcessGroup is possible as well.",
        )
    return match[1], int(match[2])


def _local_world_size(word: str, given: int | None) -> int:
    if given is not None:
        return given
    from_launcher = os.environ.get("LOCAL_WORLD_SIZE")
    if from_launcher is None:
        raise GroupWordError.at(
            f"process_group={word!r}",
            expected="the number of ranks on each host",
            found="no LOCAL_WORLD_SIZE in the environment",
            fix="Start with torchrun, set the variable, or use 'setK' or 'modK'.",
        )
    return int(from_launcher)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def table(word: str, world_size: int, local_world_size: int | None = None) -> str:
    """Return a printable table of the groups that a word means. Needs no processes.

    Args:
        word: The word, as in [rank_lists][fsdp_ref.process_groups.rank_lists].
        world_size: Number of ranks.
        local_world_size: Number of ranks on each host; only some words need it.

    Returns:
        A heading and one line for each group.

    Raises:
        GroupWordError: If the word does not make groups of this world.

    Examples:
        >>> print(table("local_rank_across_nodes", world_size=8, local_world_size=4))
        local_rank_across_nodes on 8 ranks: 4 groups of 2
          0 4
          1 5
          2 6
          3 7
    """
    groups = rank_lists(word, world_size, local_world_size)
    count = f"{len(groups)} group{'s' if len(groups) > 1 else ''} of {len(groups[0])}"
    rows = ["  " + " ".join(map(str, ranks)) for ranks in groups]
    return "\n".join(
        [f"{word} on {world_size} rank{'s' if world_size > 1 else ''}: {count}", *rows]
    )


def resolve(
    process_group: ProcessGroup | str | Sequence[int] | None,
    *,
    where: str,
    world_size: int | None = None,
    local_world_size: int | None = None,
) -> RankGroup:
    """Turn a `process_group` argument into the ranks it means. Local: nothing is created.

    Args:
        process_group: `None` for all ranks, a live group, a word, or a list of global ranks.
        where: Who asks, for messages, such as ``"unit 'layers.0'"``.
        world_size: Number of ranks; by default that of the default process group.
        local_world_size: Number of ranks on each host; by default as `torchrun` says.

    Returns:
        The ranks and this rank's place among them. Its group is live already for `None` and
        for a `ProcessGroup`, and otherwise once [create][fsdp_ref.process_groups.create] ran.

    Raises:
        GroupMembershipError: If this rank is not in the group, or if no process group exists
            that could tell the number of ranks.
        GroupWordError: If the word is unknown or does not divide the world, or if a list names
            ranks twice or ranks that do not exist.

    Examples:
        >>> resolve("set2", where="unit 'expert'", world_size=4).ranks
        (0, 1)
    """
    if process_group is None:
        return _everyone(where)
    if isinstance(process_group, ProcessGroup):
        return _of_live_group(process_group, where)
    if cast(object, process_group) is dist.GroupMember.NON_GROUP_MEMBER:  # new_group's outsiders
        raise _not_a_member("a group made without it", where)
    if world_size is None:
        world_size = _everyone(where).size
    asked = f"{where}, process_group={process_group!r}"
    if isinstance(process_group, str):
        lists = rank_lists(process_group, world_size, local_world_size)
        ranks = next((ranks for ranks in lists if this_rank() in ranks), [])
    else:
        ranks = _checked_list(process_group, world_size, asked)
    if this_rank() not in ranks:
        raise _not_a_member(f"the ranks {ranks}", where)
    return RankGroup(tuple(ranks), ranks.index(this_rank()), asked=asked)


def _everyone(where: str) -> RankGroup:
    if not dist.is_initialized():
        raise GroupMembershipError.at(
            where,
            expected="a default process group",
            found="none",
            fix="Call torch.distributed.init_process_group() before wrapping.",
        )
    world = distributed_c10d._get_default_group()
    return RankGroup(tuple(range(dist.get_world_size())), dist.get_rank(), world, asked=where)


def _of_live_group(group: ProcessGroup, where: str) -> RankGroup:
    if group not in distributed_c10d._world.pg_group_ranks:
        raise GroupMembershipError.at(
            where,
            expected="a live process group",
            found="one that was destroyed",
            fix="Make the group after the last destroy_process_group().",
        )
    ranks = dist.get_process_group_ranks(group)
    if this_rank() not in ranks:
        raise _not_a_member(f"a group of the ranks {ranks}", where)
    return RankGroup(
        tuple(ranks),
        ranks.index(this_rank()),
        group,
        asked=f"{where}, process_group=<group {group.group_name}>",
    )


def _checked_list(process_group: Sequence[int], world_size: int, asked: str) -> list[int]:
    ranks = list(process_group) if isinstance(process_group, Sequence) else []
    if not ranks or not all(type(rank) is int for rank in ranks):
        raise GroupWordError.at(
            asked,
            expected=f"a ProcessGroup, a list of ranks, {_WORDS}",
            found=repr(process_group),
            fix="Name this rank's own group only, as whole numbers.",
        )
    if len(set(ranks)) < len(ranks) or min(ranks) < 0 or max(ranks) >= world_size:
        raise GroupWordError.at(
            asked,
            expected=f"ranks from 0 to {world_size - 1}, each at most once",
            found=repr(ranks),
            fix="Ranks are global ranks, counted over all hosts.",
        )
    return sorted(ranks)


def _not_a_member(group: str, where: str) -> GroupMembershipError:
    return GroupMembershipError.at(
        where,
        expected=f"a process group that rank {this_rank()} is in",
        found=group,
        fix="Each rank names the group that it belongs to itself; a word does so by itself.",
    )


def create(groups: Sequence[RankGroup], *, timeout: timedelta | None = None) -> None:
    """Make the live process groups that a tree of units asked for.

    Collective over the default process group: every rank calls this, with as many groups, in
    the same order of units. It costs one exchange of texts through the store, and the start of
    each group that does not exist yet. Equal sets of ranks share one group; the set of all
    ranks is the default group itself.

    Args:
        groups: One entry for each unit, in the order of units. Entries without a live group
            are given one.
        timeout: How long to wait for the other ranks; by default as long as the process group
            does.

    Raises:
        RankDisagreementError: On every rank, if ranks have different numbers of units, or if
            a rank is in a group for which the other members did not ask at the same position.
        SilentRanksError: If a rank did not call this in time, naming it.
        GroupMembershipError: If there is no default process group.
    """
    world = _everyone("process_groups.create")
    missing = {world.ranks}
    if world.size > 1:
        requests = agreement.exchange(
            "process groups", _request(groups), world.ranks, timeout=timeout
        )
        missing = _union(dict(enumerate(map(json.loads, requests))))
    cache = _caches.setdefault(world.live, {world.ranks: world.live})
    for ranks in sorted(missing - cache.keys()):
        cache[ranks] = dist.new_group(ranks, timeout=agreement.time_limit())
    for group in groups:
        if group.process_group is None:
            group.process_group = cache[group.ranks]


def _request(groups: Sequence[RankGroup]) -> str:
    """Describe this rank's groups: for each unit its ranks, its live group's name, who asked."""
    return json.dumps([[_spell(group.ranks), _name(group), group.asked] for group in groups])


def _name(group: RankGroup) -> str:
    """Name a live group that is not the default one; two groups may have equal ranks."""
    if group.process_group in (None, dist.group.WORLD):
        return ""
    return str(group.live.group_name)


def _spell(ranks: Sequence[int]) -> str:
    """Spell ranks as short as a person would: runs instead of every rank of a large world.

    >>> _spell([0, 1, 2, 3, 6])
    '0-3,6'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] + 1 == rank:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def _read(spelling: str) -> tuple[int, ...]:
    """Undo `_spell`."""
    ranks: list[int] = []
    for run in spelling.split(","):
        first, _, last = run.partition("-")
        ranks.extend(range(int(first), int(last or first) + 1))
    return tuple(ranks)


def _union(requests: dict[int, list[list[str]]]) -> set[tuple[int, ...]]:
    """Return the sets of ranks to be live, having checked that the requests fit together."""
    if len({len(request) for request in requests.values()}) > 1:
        names = {
            rank: "\n".join(asked.split(", process_group=")[0] for _, _, asked in request)
            for rank, request in requests.items()
        }
        raise RankDisagreementError.at(
            "process groups",
            expected="as many units on every rank",
            found=agreement.describe_differences(names),
            fix="Build and wrap the same model on every rank.",
        )
    union: set[tuple[int, ...]] = set()
    for at, _ in enumerate(requests[0]):
        union |= _sets_of_one_unit({rank: request[at] for rank, request in requests.items()}, at)
    return union


def _sets_of_one_unit(asked: dict[int, list[str]], at: int) -> set[tuple[int, ...]]:
    """Check that all members of each set asked for just that set; return those to be made."""
    members: dict[tuple[str, str], list[int]] = {}
    for rank, (spelling, name, _) in asked.items():
        members.setdefault((spelling, name), []).append(rank)
    for (spelling, _), owners in members.items():
        others = sorted(set(_read(spelling)) - set(owners))
        if others:
            found = "; ".join(
                f"rank {rank} asking for ranks {asked[rank][0]} ({asked[rank][2]})"
                for rank in (owners[0], others[0])
            )
            raise RankDisagreementError.at(
                f"process groups: unit number {at}",
                expected=f"all of ranks {spelling} to ask for this group",
                found=found,
                fix="Give the same word on every rank, or lists that do not overlap.",
            )
    return {_read(spelling) for spelling, name in members if not name}
