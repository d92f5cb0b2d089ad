"""Weights that exist in several versions, because their unit's group is smaller than the model's.

A full state dict has one place per name. Here the groups tell each other what they have: one
digest per weight to find out whether the versions are equal, or the versions themselves.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fsdp_ref import agreement
from fsdp_ref.agreement import name_ranks
from fsdp_ref.collectives import broadcast, explained
from fsdp_ref.errors import ReplicasDifferError, this_rank
from fsdp_ref.originals import OriginalParameter
from fsdp_ref.rank_group import RankGroup
from fsdp_ref.recording import record
from fsdp_ref.row_shards import rows_of
from fsdp_ref.unit import Unit

_MOST_NAMES_SHOWN = 3


class Versions:
    """What the groups inside a model hold under the same names."""

    def __init__(self, units: Sequence[Unit], replicas: str) -> None:
        """Find out which units exist in several versions. Collective, if there are any.

        Args:
            units: All units of the model, outermost first; their groups are live.
            replicas: `"refuse"` to compare versions, `"all"` to bring them together, `"mine"` to
                do nothing.
        """
        self._replicas, self._ranks = replicas, list[int]()
        self._digests: dict[str, str] = {}
        self.others: dict[str, dict[int, Tensor]] = {}
        self.buffers: set[str] = set()  # those in `others`; ranks of one version may differ in them
        self.firsts: dict[Unit, list[int]] = {}
        root = units[0].placement
        small = [unit for unit in units if unit.placement.size < root.size]
        if small and replicas != "mine":
            self._ranks = sorted(rank for row in rows_of(root) for rank in row)
            mine = [first_rank(unit) for unit in small]
            heard = agreement.exchange("versions of small groups", json.dumps(mine), self._ranks)
            for unit, column in zip(small, zip(*map(json.loads, heard), strict=True), strict=True):
                self.firsts[unit] = sorted(set(column))

    def wants(self, unit: Unit) -> list[int]:
        """Return the positions in the unit's group of ranks that have to see its values.

        Args:
            unit: The unit.

        Returns:
            None, one, or all of them.
        """
        if unit not in self.firsts:
            return []
        if self._replicas == "all":
            return list(range(unit.group.size))
        return [at for at, rank in enumerate(unit.group.ranks) if rank == first_rank(unit)]

    def note(
        self,
        unit: Unit,
        prefix: str,
        fulls: Mapping[OriginalParameter, Tensor],
        buffers: Mapping[str, Tensor],
    ) -> None:
        """Take the digests of a unit's whole weights, or tell the others the weights.

        Collective for `"all"`, local otherwise.

        Args:
            unit: The unit.
            prefix: What its names begin with.
            fulls: Its whole weights, where this rank has them.
            buffers: Its buffers by their full names.
        """
        if unit not in self.firsts:
            return
        if self._replicas == "refuse":
            for original, full in fulls.items():
                self._digests[prefix + original.name] = _digest(full)
            return
        for original, full in fulls.items():
            versions = self._everybodys(unit, full)
            for _, _, name in original.places:
                self.others[prefix + name] = versions
        for name, buffer in buffers.items():
            self.others[name] = self._everybodys(unit, buffer.detach())
            self.buffers.add(name)

    def _everybodys(self, unit: Unit, mine: Tensor) -> dict[int, Tensor]:
        """Return the versions of all groups, by their first ranks. Collective."""
        versions = {}
        for first in self.firsts[unit]:
            value = mine.clone() if first == first_rank(unit) else torch.empty_like(mine)
            send_from(first, self._ranks, value, unit, "its versions")
            versions[first] = value
        return versions

    def refuse_differences(self, where: str) -> None:
        """Raise on every rank if groups hold different weights. Collective, if there are any.

        Args:
            where: Whose state dict it is, for the message.

        Raises:
            ReplicasDifferError: If they do, naming weights and ranks.
        """
        if not self.firsts or self._replicas != "refuse":
            return
        texts = agreement.exchange("versions of weights", json.dumps(self._digests), self._ranks)
        heard: dict[str, dict[str, list[int]]] = {}  # by name and digest, the ranks
        for rank, text in zip(self._ranks, texts, strict=True):
            said: dict[str, str] = json.loads(text)
            for name, digest in said.items():
                heard.setdefault(name, {}).setdefault(digest, []).append(rank)
        differ = {name: list(found.values()) for name, found in heard.items() if len(found) > 1}
        if differ:
            name, ranks = next(iter(differ.items()))
            shown = ", ".join(f"'{name}'" for name in list(differ)[:_MOST_NAMES_SHOWN])
            more = len(differ) - _MOST_NAMES_SHOWN
            raise ReplicasDifferError.at(
                f"{where}, state_dict",
                expected="one version of each weight",
                found=f"{len(ranks)} versions of {shown}{f' and {more} more' if more > 0 else ''}, "
                f"of which {name_ranks(ranks[0])} and {name_ranks(ranks[1])} have one each",
                fix='Ask for them all with state_dict_type("full", replicas="all"), for this '
                'rank\'s with replicas="mine", or for the sharded form.',
            )


def send_from(sender: int, ranks: Sequence[int], value: Tensor, unit: Unit, what: str) -> None:
    """Overwrite a value on all ranks with what one of them holds. Collective.

    Args:
        sender: A global rank.
        ranks: All that take part, that one among them.
        value: Of one shape and dtype on all ranks; written in place.
        unit: The unit that it belongs to.
        what: What is sent, for messages.
    """
    order = (sender, *(rank for rank in ranks if rank != sender))
    group = RankGroup(order, order.index(this_rank()))
    with explained(f"{unit.where}, {what}", [group]):
        sent = broadcast([value], group)
    record(unit.name, unit.phase.value, "broadcast",
           bytes_on_wire=sent, group=order, dtype=value.dtype)  # fmt: skip


def first_rank(unit: Unit) -> int:
    """Return the first of the ranks that have this rank's version of a unit's weights.

    Under a hybrid strategy collective when it is first asked for.

    Args:
        unit: The unit.

    Returns:
        A global rank.
    """
    return min(map(min, rows_of(unit.placement)))


def _digest(full: Tensor) -> str:
    """Return a text that is equal for equal values, and for no others."""
    here = full.detach().cpu().contiguous()
    memory = (ctypes.c_char * here.nbytes).from_address(here.data_ptr()) if here.nbytes else b""
    return hashlib.sha256(memory).hexdigest()
