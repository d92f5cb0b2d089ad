"""Do all ranks agree? Asked before tensors move, because afterwards it is a hang.

A collective trusts its callers. If one rank built another model, or named another group, the
ranks wait for each other until the process group's timeout, or one of them is aborted. So
each rank describes in a text what it is about to do, and the texts are compared first.

The texts travel through the key-value store that the default process group was started with.
That moves no tensors, needs no further group, and does not care whether texts have equal
length. It can also say who is missing, which a collective cannot.

Whether weights still agree, after they were trained, is the question of
[check_replicas][fsdp_ref.replicas.check_replicas], which is found here as well.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from fsdp_ref.errors import GroupMembershipError, RankDisagreementError, SilentRanksError, this_rank

_MOST_DIFFERENCES_SHOWN = 3


class _Mailbox:
    """This process's connection to the store, and how often it has used each topic."""

    def __init__(self) -> None:
        store: Any = distributed_c10d._get_default_store()  # torch has no public accessor
        # A clone, because a blocking wait holds its connection, which NCCL's watchdog needs.
        self.store: Store = PrefixStore("fsdp_ref/agreement", store.clone())
        self.timeout = time_limit()
        self.rounds: defaultdict[str, int] = defaultdict(int)

    def next_round(self, topic: str, ranks: tuple[int, ...]) -> tuple[str, str]:
        """Return the key prefixes of this round and of the one before it.

        Counted per topic and ranks: ranks outside ``ranks`` do not take part, so one counter
        for all would drift apart.
        """
        name = f"{topic}/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
        number = self.rounds[name]
        self.rounds[name] += 1
        return f"{name}/{number}", f"{name}/{number - 1}"


# Weak keys: destroying the default process group drops its mailbox and its counters.
_mailboxes: WeakKeyDictionary[ProcessGroup, _Mailbox] = WeakKeyDictionary()


def _mailbox() -> _Mailbox:
    default_group = distributed_c10d._get_default_group()
    if default_group not in _mailboxes:
        _mailboxes[default_group] = _Mailbox()
    return _mailboxes[default_group]


def time_limit() -> timedelta:
    """Return how long collectives of the default process group wait, as it was started with.

    Returns:
        The shortest limit of its backends; that of its store where a backend tells none.
    """
    default_group = distributed_c10d._get_default_group()
    backends = [default_group._get_backend(device) for device in default_group._device_types]
    limits = [
        backend.options._timeout
        for backend in backends
        if getattr(backend, "options", None) is not None
    ]
    store: Any = distributed_c10d._get_default_store()
    return min(limits) if limits else store.timeout


def compare(
    topic: str,
    mine: str,
    ranks: Sequence[int],
    *,
    timeout: timedelta | None = None,
    fix: str = "Run the same code with the same arguments on every rank.",
) -> None:
    r"""Raise on every rank unless all ranks hand in the same text.

    Collective: every rank of ``ranks`` calls this, for the same topics in the same order.
    It costs a few short messages to the store. Only hashes are exchanged at first; the texts
    follow when the hashes differ, which all ranks see alike.

    Args:
        topic: What is being compared, such as ``"structure of the model"``; begins the message.
        mine: This rank's text. Put one fact in each line: the message shows the first line
            that differs.
        ranks: Global ranks that take part, this one among them.
        timeout: How long to wait for the others; by default as long as the process group does.
        fix: What the reader should do when the texts differ, as a sentence.

    Raises:
        RankDisagreementError: If the texts differ, on every rank, naming the ranks that differ
            from the majority and the first line in which they do.
        SilentRanksError: If a rank did not hand in its text in time, naming it.
        GroupMembershipError: If this rank is not one of ``ranks``, or if there are others but
            no process group.

    Examples:
        One rank agrees with itself, also without a process group.

        >>> compare("units", "layers.0\nlayers.1", ranks=[0])
    """
    digests = exchange(topic, hashlib.sha256(mine.encode()).hexdigest(), ranks, timeout=timeout)
    if len(set(digests)) == 1:
        return
    texts = exchange(f"{topic}/text", mine, ranks, timeout=timeout)
    raise RankDisagreementError.at(
        topic,
        expected=f"the same on {name_ranks(ranks)}",
        found=describe_differences(dict(zip(ranks, texts, strict=True))),
        fix=fix,
    )


def exchange(
    topic: str, mine: str, ranks: Sequence[int], *, timeout: timedelta | None = None
) -> list[str]:
    """Return every rank's text to every rank.

    Collective: every rank of ``ranks`` calls this, for the same topics in the same order.

    Args:
        topic: What the texts are about; begins the message when a rank stays silent.
        mine: This rank's text.
        ranks: Global ranks that take part, this one among them.
        timeout: How long to wait for the others; by default as long as the process group does.

    Returns:
        One text per rank, in the order of ``ranks``.

    Raises:
        SilentRanksError: If a rank did not hand in its text in time, naming it. A rank that
            comes too late gets the error as well.
        GroupMembershipError: If this rank is not one of ``ranks``, or if there are others but
            no process group.

    Examples:
        >>> exchange("greeting", "hello", ranks=[0])
        ['hello']
    """
    _check_member(topic, ranks)
    if len(ranks) == 1:
        return [mine]
    mailbox = _mailbox()
    store, limit = mailbox.store, mailbox.timeout if timeout is None else timeout
    this_round, last_round = mailbox.next_round(topic, tuple(ranks))
    keys = [f"{this_round}/{rank}" for rank in ranks]
    store.set(f"{this_round}/{this_rank()}", mine)
    try:
        store.wait(keys, limit)
    except RuntimeError as error:
        raise _silent_ranks(store, topic, this_round, ranks, limit) from error
    if store.check([f"{this_round}/gave up"]):
        raise _too_late(topic, store.get(f"{this_round}/gave up").decode())
    # Whoever has written this round has read the last one, so its texts can go.
    store.delete_key(f"{last_round}/{this_rank()}")
    return [text.decode() for text in store.multi_get(keys)]


def exchange_through(topic: str, mine: str, groups: Sequence[Sequence[int]]) -> dict[int, str]:
    """Return the texts of all ranks that can be reached through several groups.

    With the rows and the columns of a grid, everybody hears everybody. Collective: every rank
    of every group calls this, for the same topics in the same order.

    Args:
        topic: What the texts are about; begins the message when a rank stays silent.
        mine: This rank's text.
        groups: Global ranks of each group; this rank is in all of them.

    Returns:
        The texts by global rank, in its order.

    Raises:
        SilentRanksError: If a rank did not hand in its text in time, naming it.
        GroupMembershipError: If this rank is not in a group, or if there are others but no
            process group.

    Examples:
        >>> exchange_through("greeting", "hello", [[0], [0]])
        {0: 'hello'}
    """
    heard = {this_rank(): mine}
    for ranks in groups:
        for texts in exchange(topic, json.dumps(heard), ranks):
            heard |= {int(rank): text for rank, text in json.loads(texts).items()}
    return dict(sorted(heard.items()))


def _check_member(topic: str, ranks: Sequence[int]) -> None:
    if this_rank() not in ranks:
        raise GroupMembershipError.at(
            topic,
            expected=f"a comparison among ranks that include rank {this_rank()}",
            found=f"ranks {list(ranks)}",
            fix="Only the ranks of the group may ask.",
        )
    if len(ranks) > 1 and not dist.is_initialized():
        raise GroupMembershipError.at(
            topic,
            expected=f"a process group to reach {name_ranks(ranks)}",
            found="none",
            fix="Call torch.distributed.init_process_group() first.",
        )


def _silent_ranks(
    store: Store, topic: str, this_round: str, ranks: Sequence[int], limit: timedelta
) -> SilentRanksError:
    """Find out who is missing, and leave word for those who come later."""
    try:
        silent = [rank for rank in ranks if not store.check([f"{this_round}/{rank}"])]
        store.set(f"{this_round}/gave up", str(this_rank()))
    except RuntimeError:
        return SilentRanksError.at(
            topic,
            expected=f"a word from {name_ranks(ranks)}",
            found="that the key-value store is gone",
            fix="The process that holds it, usually rank 0, has ended: look at its output.",
        )
    return SilentRanksError.at(
        topic,
        expected=f"a word from {name_ranks(ranks)} within {limit.total_seconds():g} s",
        found=f"{name_ranks(silent)} silent" if silent else "the last of them just after it",
        fix="See whether they raised an error, hang, or never make this call.",
    )


def _too_late(topic: str, waiting_rank: str) -> SilentRanksError:
    return SilentRanksError.at(
        topic,
        expected="all ranks to take part in time",
        found=f"that this rank came after rank {waiting_rank} had stopped waiting for it",
        fix="Find out what delayed this rank, or give init_process_group a longer timeout.",
    )


def describe_differences(texts: dict[int, str]) -> str:
    r"""Say which ranks differ from the majority, and in which line first.

    Args:
        texts: Text per rank; at least two of them differ.

    Returns:
        A clause for an error message. Where no text has a majority, that of the lowest rank
        counts as the common one.

    Examples:
        >>> describe_differences({0: "a\nb", 1: "a\nc", 2: "a\nb"})
        'rank 1 with `c` in line 2 where ranks 0, 2 have `b`'
    """
    owners: dict[str, list[int]] = {}
    for rank, text in texts.items():
        owners.setdefault(text, []).append(rank)
    common = max(owners, key=lambda text: len(owners[text]))  # the first one among equals
    differences = [
        _first_difference(text, ranks, common, owners[common])
        for text, ranks in owners.items()
        if text != common
    ]
    shown = "; ".join(differences[:_MOST_DIFFERENCES_SHOWN])
    hidden = len(differences) - _MOST_DIFFERENCES_SHOWN
    return shown if hidden <= 0 else f"{shown}; and {hidden} other texts"


def _first_difference(text: str, ranks: list[int], common: str, common_ranks: list[int]) -> str:
    lines, common_lines = text.split("\n"), common.split("\n")
    number = 0
    while lines[number : number + 1] == common_lines[number : number + 1] != []:
        number += 1
    line, common_line = (
        f"`{found[number]}`" if number < len(found) else "nothing"
        for found in (lines, common_lines)
    )
    have = "has" if len(common_ranks) == 1 else "have"
    return (
        f"{name_ranks(ranks)} with {line} in line {number + 1} "
        f"where {name_ranks(common_ranks)} {have} {common_line}"
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks for a message.

    Args:
        ranks: The ranks.

    Returns:
        ``"rank 1"``, ``"ranks 0, 2"``, or ``"ranks 0 to 3"`` for three or more in a row.

    Examples:
        >>> name_ranks([1]), name_ranks([0, 2]), name_ranks([0, 1, 2, 3])
        ('rank 1', 'ranks 0, 2', 'ranks 0 to 3')
    """
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"ranks {ordered[0]} to {ordered[-1]}"
    return f"ranks {', '.join(map(str, ordered))}"


def __getattr__(name: str) -> Any:
    """Return `check_replicas` from its own room, which knows of units and so stands above."""
    if name == "check_replicas":
        return importlib.import_module("fsdp_ref.replicas").check_replicas
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
