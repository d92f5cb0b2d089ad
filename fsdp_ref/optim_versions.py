"""Optimizer state of weights that exist in several versions, brought together on every rank.

A unit in a group smaller than the model's is another weight in each group, and so is its state.
The first rank of each group tells the others what it has, and sends one value after the other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_ref.agreement import exchange
from fsdp_ref.errors import this_rank
from fsdp_ref.optim_keys import Entry
from fsdp_ref.optim_words import Whole, decoded, encoded
from fsdp_ref.row_shards import rows_of
from fsdp_ref.small_groups import first_rank, send_from
from fsdp_ref.unit import Unit

Heard = dict[str, tuple[int, int, dict[str, Any]]]
"""By stored name: the rank that has it, the number of its group of hyperparameters, its state."""


def bring_together(
    state: dict[str, dict[str, Any]],
    groups: Sequence[dict[str, Any]],
    entries: Sequence[Entry],
    units: Sequence[Unit],
    root: Unit,
) -> None:
    """Add the versions of other groups to a full state dict, in place. Collective.

    Args:
        state: State by stored name, of this rank's version.
        groups: Groups by name; names of other versions are added.
        entries: The optimizer's parameters.
        units: The units of one model, in the same order on all ranks.
        root: The outermost of them.

    Raises:
        SilentRanksError: If a rank does not take part.
    """
    ranks = sorted(rank for row in rows_of(root.placement) for rank in row)
    small = [unit for unit in units if unit.placement.size < len(ranks)]
    if not small:
        return
    mine = [entry for entry in entries if _is_sender(entry, small)]
    told = {n: (e.group, encoded(state.get(n, {}))) for e in mine for n in e.names}
    texts = exchange("optimizer state of small groups", json.dumps(told), ranks)
    heard: Heard = {}
    for rank, text in zip(ranks, texts, strict=True):
        for name, (group, values) in json.loads(text).items():
            heard[name] = rank, group, decoded(values)
    for name, (sender, number, values) in sorted(heard.items()):
        if name not in groups[number]["params"]:
            groups[number]["params"].append(name)
        here = state.get(name, {})
        got = {n: _sent(here.get(n), v, sender, ranks, small[0]) for n, v in values.items()}
        if got:
            state.setdefault(name, got)


def _is_sender(entry: Entry, small: Sequence[Unit]) -> bool:
    unit: Unit | None = None if entry.flat_param is None else entry.flat_param._unit()
    return unit is not None and unit in small and first_rank(unit) == this_rank()


def _sent(mine: Any, told: Any, sender: int, ranks: Sequence[int], unit: Unit) -> Any:
    """Return a value of another rank, on all ranks. Collective where it is a tensor."""
    if not isinstance(told, Whole):
        return told
    value = torch.empty(told.shape, dtype=told.dtype)
    if sender == this_rank() and isinstance(mine, Tensor):
        value = mine
    send_from(sender, ranks, value, unit, "versions of optimizer state")
    return value
