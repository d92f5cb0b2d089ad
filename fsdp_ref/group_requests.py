"""Do the groups fit together that all ranks ask for, and which of them are to be made?

A rank says for each unit which ranks it takes to share it. That is short, also in large worlds:
each of its groups is spelt once. How somebody asked, word for word, is sent only if something
does not fit, for the message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch.distributed as dist

from fsdp_ref import agreement
from fsdp_ref.errors import RankDisagreementError
from fsdp_ref.rank_group import RankGroup
from fsdp_ref.rank_words import read_ranks, spell_ranks

Words: TypeAlias = Sequence[Sequence[str]]
"""For each rank, how it asked for each of its groups."""


class Key(NamedTuple):
    """What a live group is kept under; a set of ranks may have two.

    Attributes:
        ranks: Global ranks.
        for_reductions: Whether it is the second one.
    """

    ranks: tuple[int, ...]
    for_reductions: bool


class Misfit(Exception):
    """Requests that do not fit together, alike on every rank that has read them.

    Attributes:
        explain: Makes the error from the words in which all ranks asked.
    """

    def __init__(self, explain: Callable[[Words], RankDisagreementError]) -> None:
        super().__init__("requests for process groups do not fit together")
        self.explain = explain


class _Wanted(NamedTuple):
    """What one rank says of one group."""

    ranks: str  # spelt
    name: str  # of a live group; two groups may have equal ranks
    piece: str  # what all members hold, if that has to be the same
    pairs_by_order: bool  # whether reductions need a group of their own


def request(groups: Sequence[RankGroup]) -> str:
    """Describe this rank's groups, each different one once. Local.

    Args:
        groups: Its groups, in the order of units.

    Returns:
        A text for `union`.
    """
    numbers: dict[_Wanted, int] = {}
    mine = [numbers.setdefault(_wanted(group), len(numbers)) for group in groups]
    return json.dumps([list(numbers), mine])


def _wanted(group: RankGroup) -> _Wanted:
    live = group.process_group not in (None, dist.group.WORLD)
    name = str(group.live.group_name) if live else ""
    return _Wanted(spell_ranks(group.ranks), name, group.piece, group.pairs_by_order)


def union(requests: Sequence[str]) -> set[Key]:
    """Return the groups to be live, having checked that all requests fit together. Local.

    Args:
        requests: What `request` returned on each rank, in rank order.

    Returns:
        The groups, the same on every rank.

    Raises:
        Misfit: If ranks have different numbers of units, if a rank is in a group for which the
            other members did not ask at the same position, or if members hold different pieces.
    """
    read = [json.loads(text) for text in requests]
    if len({len(numbers) for _, numbers in read}) > 1:
        raise Misfit(_other_number_of_units)
    wanted = [[_Wanted(*one) for one in different] for different, _ in read]
    keys: set[Key] = set()
    seen: set[tuple[int, ...]] = set()
    for at, column in enumerate(zip(*(numbers for _, numbers in read), strict=True)):
        if column not in seen:  # many units ask alike
            seen.add(column)
            one_unit = [mine[number] for mine, number in zip(wanted, column, strict=True)]
            keys |= _keys_of_one_unit(one_unit, at)
    return keys


def _keys_of_one_unit(wanted: Sequence[_Wanted], at: int) -> set[Key]:
    """Check that all members of each set asked for just that set; return what is to be made."""
    members: dict[tuple[str, str], list[int]] = {}
    for rank, one in enumerate(wanted):
        members.setdefault((one.ranks, one.name), []).append(rank)
    keys = set()
    for (spelling, name), owners in members.items():
        ranks = read_ranks(spelling)
        if others := sorted(set(ranks) - set(owners)):
            raise Misfit(_another_group(wanted, at, owners[0], others[0]))
        if len({wanted[rank].piece for rank in owners}) > 1:
            raise Misfit(_other_pieces(wanted, at, owners))
        if not name:
            keys.add(Key(ranks, for_reductions=False))
        if len(ranks) > 1 and any(wanted[rank].pairs_by_order for rank in owners):
            keys.add(Key(ranks, for_reductions=True))
    return keys


# What does not fit


def _unit(asked: str) -> str:
    return asked.split(", process_group=")[0]


def _other_number_of_units(words: Words) -> RankDisagreementError:
    names = {rank: "\n".join(map(_unit, asked)) for rank, asked in enumerate(words)}
    return RankDisagreementError.at(
        "process groups",
        expected="as many units on every rank",
        found=agreement.describe_differences(names),
        fix="Build and wrap the same model on every rank.",
    )


def _another_group(
    wanted: Sequence[_Wanted], at: int, one: int, other: int
) -> Callable[[Words], RankDisagreementError]:
    def explain(words: Words) -> RankDisagreementError:
        found = [
            f"rank {rank} asking for ranks {wanted[rank].ranks} ({words[rank][at]})"
            for rank in (one, other)
        ]
        return RankDisagreementError.at(
            f"process groups: {_unit(words[one][at])}",
            expected=f"all of ranks {wanted[one].ranks} to ask for this group",
            found="; ".join(found),
            fix="Give the same word on every rank, or lists that do not overlap.",
        )

    return explain


def _other_pieces(
    wanted: Sequence[_Wanted], at: int, owners: Sequence[int]
) -> Callable[[Words], RankDisagreementError]:
    def explain(words: Words) -> RankDisagreementError:
        pieces = {rank: wanted[rank].piece for rank in owners}
        return RankDisagreementError.at(
            f"process groups: {_unit(words[owners[0]][at])}",
            expected=f"ranks {wanted[owners[0]].ranks} to hold copies of one shard",
            found=agreement.describe_differences(pieces),
            fix="Give the ranks that share a copy in one order in every copy.",
        )

    return explain
