"""What words and lists say about ranks: arithmetic, before there is any process or group.

A word means the same lists on every rank. A list of lists does too, so each rank finds its own
group in it. A plain list of ranks is one rank's own group and says nothing about the others.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fsdp_ref.errors import GroupWordError

WORDS = "'self', 'node', 'local_rank_across_nodes', 'setK' or 'modK' with a number K"
_MOST_SHOWN = 4  # lists, in a message; every rank's request goes to every other rank


def from_environment(variable: str, where: str) -> int | None:
    """Return a number that a launcher such as `torchrun` wrote into the environment.

    Args:
        variable: `"WORLD_SIZE"` or `"LOCAL_WORLD_SIZE"`.
        where: Who asks, for messages.

    Returns:
        The number; `None` if the variable is not set.

    Raises:
        GroupWordError: If it is no number above 0.
    """
    text = os.environ.get(variable)
    if text is None:
        return None
    if not re.fullmatch(r"\s*0*[1-9][0-9]*\s*", text):
        raise GroupWordError.at(
            where,
            expected=f"a number above 0 in the environment variable {variable}",
            found=repr(text),
            fix="torchrun sets it; with another launcher, set it yourself.",
        )
    return int(text)


def word_lists(
    word: str, world_size: int, local_world_size: int | None = None, where: str | None = None
) -> list[list[int]]:
    """Return the groups that a word means; see [rank_lists][fsdp_ref.process_groups.rank_lists].

    Args:
        word: The word, in either case.
        world_size: Number of ranks.
        local_world_size: Number of ranks on each host; by default from the environment.
        where: Who asks, for messages.

    Returns:
        The groups in order of their lowest rank.

    Raises:
        GroupWordError: If the word is unknown, its number does not divide the world size, or
            the local world size is needed and unknown.
    """
    where = where or f"process_group={word!r}"
    kind, number = _parse(word, local_world_size, where)
    if number < 1 or world_size < 1 or world_size % number:
        raise GroupWordError.at(
            where,
            expected=f"a number that divides the world size {world_size}",
            found=str(number),
            fix=f"Divisors are {', '.join(map(str, _divisors(world_size)))}."
            if world_size > 0
            else "The world has at least one rank.",
        )
    if kind == "set":
        return [list(range(at, at + number)) for at in range(0, world_size, number)]
    return [list(range(at, world_size, number)) for at in range(number)]


def _parse(word: str, local_world_size: int | None, where: str) -> tuple[str, int]:
    """Reduce every word to one of two kinds, and its number."""
    lower = word.lower()
    if lower == "self":
        return "set", 1
    if lower == "node":
        return "set", _local_world_size(local_world_size, where)
    if lower == "local_rank_across_nodes":
        return "mod", _local_world_size(local_world_size, where)
    match = re.fullmatch(r"(set|mod)(-?[0-9]+)", lower)
    if match is None:
        raise GroupWordError.at(
            where,
            expected=WORDS,
            found=repr(word),
            fix="A list of ranks, a list of such lists or a ProcessGroup is possible as well.",
        )
    return match[1], int(match[2])


def _local_world_size(given: int | None, where: str) -> int:
    if given is None:
        given = from_environment("LOCAL_WORLD_SIZE", where)
    if given is None:
        raise GroupWordError.at(
            where,
            expected="the number of ranks on each host",
            found="no LOCAL_WORLD_SIZE in the environment",
            fix="Start with torchrun, set the variable, or use 'setK' or 'modK'.",
        )
    return given


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


# Lists


def is_list(asked: object) -> bool:
    """Return whether something is a sequence other than text."""
    return isinstance(asked, Sequence) and not isinstance(asked, str)


def is_lists(asked: Any) -> bool:
    """Return whether something is a sequence of sequences of numbers: groups, all of them."""
    return (
        is_list(asked)
        and len(asked) > 0
        and all(is_list(ranks) and all(isinstance(rank, int) for rank in ranks) for ranks in asked)
    )


def checked_ranks(ranks: Any, world_size: int, where: str) -> list[int]:
    """Return the ranks of one group in order.

    Args:
        ranks: The group, in any order.
        world_size: Number of ranks.
        where: Who asks, for messages.

    Returns:
        The ranks, lowest first.

    Raises:
        GroupWordError: If it is no list of ranks, or names ranks twice or ranks that do not exist.
    """
    ranks = list(ranks) if is_list(ranks) else ranks
    if not isinstance(ranks, list) or not ranks or not all(type(rank) is int for rank in ranks):
        raise GroupWordError.at(
            where,
            expected=f"a ProcessGroup, a list of ranks, a list of such lists, {WORDS}",
            found=repr(ranks),
            fix="Name this rank's own group, or all groups, as whole numbers.",
        )
    if len(set(ranks)) < len(ranks) or min(ranks) < 0 or max(ranks) >= world_size:
        raise GroupWordError.at(
            where,
            expected=f"ranks from 0 to {world_size - 1}, each at most once",
            found=repr(ranks),
            fix="Ranks are global ranks, counted over all hosts.",
        )
    return sorted(ranks)


def checked_lists(lists: Sequence[Any], world_size: int, where: str) -> list[list[int]]:
    """Return the groups of a list of lists, which need not be equally large.

    Args:
        lists: All groups of the world.
        world_size: Number of ranks.
        where: Who asks, for messages.

    Returns:
        The groups in order of their lowest rank, each in order.

    Raises:
        GroupWordError: If a list is no group, or if a rank is in two of them or in none.
    """
    groups = lists if is_list(lists) else [lists]
    checked = sorted(checked_ranks(ranks, world_size, where) for ranks in groups)
    owners = Counter(rank for ranks in checked for rank in ranks)
    twice = sorted(rank for rank, count in owners.items() if count > 1)
    if twice:
        raise GroupWordError.at(
            where,
            expected="each rank in one of the lists",
            found=f"ranks {spell_ranks(twice)} in more than one",
            fix="To cut within one group and copy across the other, choose HYBRID_SHARD.",
        )
    missing = [rank for rank in range(world_size) if rank not in owners]
    if missing:
        raise GroupWordError.at(
            where,
            expected=f"each rank from 0 to {world_size - 1} in one of the lists",
            found=f"ranks {spell_ranks(missing)} in none",
            fix="Give ranks that share with nobody a list of their own.",
        )
    return checked


def refuse_no_grid(
    shards: Sequence[Sequence[int]], copies: Sequence[Sequence[int]], where: str
) -> None:
    """Raise unless groups that cut and groups that copy are the rows and columns of grids.

    Args:
        shards: The groups that share one copy each.
        copies: The groups that hold the same shard of different copies.
        where: Who asks, for messages.

    Raises:
        GroupWordError: If members of a group that copies would hold different shards.
    """
    places = {r: (at, len(ranks)) for ranks in shards for at, r in enumerate(ranks)}
    rows = {rank: row for row, ranks in enumerate(shards) for rank in ranks}
    for ranks in copies:
        if len({places[r] for r in ranks}) > 1 or len({rows[r] for r in ranks}) < len(ranks):
            raise GroupWordError.at(
                where,
                expected="groups that share one rank only, at the same position in each copy",
                found=f"ranks {spell_ranks(ranks)} to copy, of {spell_lists(shards)}",
                fix="The first group holds one copy; the second, the same shard of each copy.",
            )


# Spelling


def spell_ranks(ranks: Sequence[int]) -> str:
    """Spell ranks as short as a person would: runs instead of every rank of a large world.

    Args:
        ranks: Ranks in order.

    Returns:
        The runs, with commas.

    Examples:
        >>> spell_ranks([0, 1, 2, 3, 6])
        '0-3,6'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] + 1 == rank:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def read_ranks(spelling: str) -> tuple[int, ...]:
    """Undo `spell_ranks`.

    Args:
        spelling: What it returned.

    Returns:
        The ranks.

    Examples:
        >>> read_ranks("0-3,6")
        (0, 1, 2, 3, 6)
    """
    ranks: list[int] = []
    for run in spelling.split(","):
        first, _, last = run.partition("-")
        ranks.extend(range(int(first), int(last or first) + 1))
    return tuple(ranks)


def spell_lists(lists: Sequence[Sequence[int]]) -> str:
    """Spell groups for a message, the first few of them.

    Args:
        lists: The groups, each in order.

    Returns:
        A short text.

    Examples:
        >>> spell_lists([[0, 1], [2, 3]])
        '[0-1], [2-3]'
    """
    more = f" and {len(lists) - _MOST_SHOWN} more" if len(lists) > _MOST_SHOWN else ""
    return ", ".join(f"[{spell_ranks(ranks)}]" for ranks in lists[:_MOST_SHOWN]) + more
