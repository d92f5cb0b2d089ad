"""The state of an optimizer, from every rank's pieces to whole weights, one unit at a time.

Which state there is depends on the rank: a rank that owns nothing of a weight may have no state for
it, and after a load or a frozen weight nobody may have any. If that decided who sends what,
ranks would wait for each other. So the ranks of a group first tell each other in words what they
have; those that have nothing then send zeros of the right kind, or the disagreement is an error
on all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_ref.agreement import exchange, name_ranks
from fsdp_ref.errors import OptimizerStateError
from fsdp_ref.exact import gather_shards, record_gather
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.optim_keys import Entry
from fsdp_ref.optimizer_watch import own_pieces
from fsdp_ref.rank_group import RankGroup
from fsdp_ref.unit import Unit

State = Mapping[Any, Mapping[str, Any]]
"""The `"state"` of an optimizer's own state dict: by key, then by the name of the value."""

Spec = list[Any]
"""What ranks tell each other of one value: `["shard", dtype]` for one element per element of the
weight, `["scalar", dtype, value]` for a tensor of no dimension, `["value", value]` for a number or
a word, `["object", type]` for anything else."""


def own_values(entry: Entry, state: State) -> dict[str, Any]:
    """Return this rank's state of one parameter, that of whole weights cut to its piece. Local.

    Args:
        entry: The parameter.
        state: The optimizer's state.

    Returns:
        By name; empty if there is none.

    Raises:
        OptimizerStateError: If a tensor has neither the piece's shape, nor the weight's, nor none.
    """
    values = dict(state.get(entry.key, {}))
    if entry.flat_param is None:
        return values
    whole = entry.parameter is entry.flat_param
    return own_pieces(values, entry.flat_param, None if whole else entry.slots[0])


# Who has what


@dataclass(frozen=True, eq=False)
class Part:
    """What one rank group agrees to have of one parameter.

    Attributes:
        entry: The parameter.
        values: This rank's state of it.
        specs: What all ranks have, by name.
    """

    entry: Entry
    values: Mapping[str, Any]
    specs: Mapping[str, Spec]

    def constant(self, name: str) -> Any:
        """Return a value that is the same for all ranks: a scalar, or anything but a tensor."""
        kind, *rest = self.specs[name]
        if kind == "scalar":
            return torch.tensor(rest[1], dtype=getattr(torch, rest[0]))
        return rest[0] if kind == "value" else self.values[name]


def agreed_parts(entries: Sequence[Entry], units: Sequence[Unit], state: State) -> list[Part]:
    """Let the ranks of each group tell each other what state they have. Collective.

    Args:
        entries: The optimizer's parameters.
        units: The model's units, in the same order on all ranks.
        state: This rank's state.

    Returns:
        One part for each parameter that has any state on any rank of its group.

    Raises:
        OptimizerStateError: On every rank of a group, if its ranks have different state.
        SilentRanksError: If a rank does not take part.
    """
    groups: dict[tuple[int, ...], RankGroup] = {u.group.ranks: u.group for u in units}
    parts: dict[Entry, Part] = {}
    for ranks, group in groups.items():
        theirs = [e for e in entries if e.flat_param is not None and _ranks(e) == ranks]
        values = {entry: _try_own_values(entry, state) for entry in theirs}
        mine = json.dumps([[list(e.names), e.group, _specs(v)] for e, v in values.items()])
        topic = f"optimizer state over {name_ranks(ranks)}"
        texts = exchange(topic, mine, ranks) if len(ranks) > 1 else [mine]
        heard = {rank: json.loads(text) for rank, text in zip(ranks, texts, strict=True)}
        _refuse_other_parameters(topic, heard)
        for number, (entry, own) in enumerate(values.items()):
            said = {rank: told[number][2] for rank, told in heard.items()}
            specs = _common(entry, group, said)
            if specs:
                parts[entry] = Part(entry, own if isinstance(own, dict) else {}, specs)
    for entry in entries:
        if entry.flat_param is None and entry.key in state:
            own = dict(state[entry.key])
            parts[entry] = Part(entry, own, {name: ["object", ""] for name in own})
    return [parts[entry] for entry in entries if entry in parts]


def _ranks(entry: Entry) -> tuple[int, ...]:
    return () if entry.flat_param is None else entry.flat_param._group.ranks


def _try_own_values(entry: Entry, state: State) -> dict[str, Any] | str:
    """Return the values, or what is wrong with them: all ranks must hear of it."""
    try:
        return own_values(entry, state)
    except OptimizerStateError as error:
        return str(error)


def _specs(values: Mapping[str, Any] | str) -> dict[str, Spec] | str:
    return values if isinstance(values, str) else {n: _spec(v) for n, v in values.items()}


def _spec(value: Any) -> Spec:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.dim() > 0:
            return ["shard", dtype]
        return ["object", dtype] if value.is_complex() else ["scalar", dtype, value.item()]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["value", value]
    return ["object", type(value).__name__]


def _refuse_other_parameters(topic: str, heard: Mapping[int, Any]) -> None:
    """Raise on every rank unless their optimizers hold the same parameters in the same groups."""
    held = {rank: [(names, group) for names, group, _ in told] for rank, told in heard.items()}
    first, *others = held
    for rank in others:
        if held[rank] != held[first]:
            differing = [a for a in held[first] if a not in held[rank]]
            differing += [b for b in held[rank] if b not in held[first]]
            name = differing[0][0][0] if differing else "the order"
            raise OptimizerStateError.at(
                topic,
                expected="optimizers of the same parameters in the same groups on every rank",
                found=f"ranks {first} and {rank} that differ in '{name}'",
                fix="Build the optimizer alike on every rank.",
            )


def _common(entry: Entry, group: RankGroup, said: Mapping[int, Any]) -> dict[str, Spec]:
    """Return the state that all ranks have that own anything of a parameter, or raise on all."""
    where = f"optimizer state of '{entry.names[0]}'"
    for told in said.values():
        if isinstance(told, str):
            raise OptimizerStateError(told)
    owners = [rank for n, rank in enumerate(group.ranks) if entry.owned_by(n)]
    counted = owners or list(group.ranks)
    specs: dict[str, Spec] = said[counted[0]]
    for rank in counted:
        differing = [n for n in {**specs, **said[rank]} if said[rank].get(n) != specs.get(n)]
        if differing:
            name = differing[0]
            raise OptimizerStateError.at(
                where,
                expected="the same kind of state on every rank that holds a part of it",
                found=f"'{name}' {_words(specs.get(name))} on rank {counted[0]}, "
                f"{_words(said[rank].get(name))} on rank {rank}",
                fix="Do all ranks make the same steps, and load the same state?",
            )
    objects = [name for name, spec in specs.items() if spec[0] == "object"]
    if any(name not in told for name in objects for told in said.values()):
        raise OptimizerStateError.at(
            where,
            expected="state that can be told to ranks without a part of the weight",
            found=" and ".join(map(repr, objects)),
            fix="Keep numbers, words and tensors in the state.",
        )
    return specs


def _words(spec: Spec | None) -> str:
    return "missing" if spec is None else " ".join(map(str, spec))


# Putting together


def gathered(
    parts: Sequence[Part], units: Sequence[Unit], *, first_only: bool = False
) -> Iterator[tuple[Unit, str, str, Tensor]]:
    """Yield the state of whole weights, one after the other. Collective.

    At most one value of one flat parameter is whole at a time; keep none of what is yielded
    without copying it.

    Args:
        parts: What `agreed_parts` has returned.
        units: The model's units, in the same order on all ranks.
        first_only: Gather to the first rank of each unit only; the others get nothing.

    Yields:
        Unit, stored name of the weight, name of the value, and a view of the whole.

    Raises:
        SilentRanksError: If a rank does not take part.
    """
    by_flat: dict[FlatParameter, list[Part]] = {}
    for part in parts:
        if part.entry.flat_param is not None:
            by_flat.setdefault(part.entry.flat_param, []).append(part)
    for unit in units:
        replicate = unit.placement.replicate
        if first_only and replicate is not None and replicate.rank != 0:
            continue
        for number, flat_param in enumerate(unit.flat_params):
            inside = by_flat.get(flat_param, [])
            for name, dtype in _shards_in(inside):
                shard = _joined(flat_param, inside, name, dtype)
                full = gather_shards(unit, {number: shard}, 0 if first_only else None)[number]
                record_gather(unit, shard, 0 if first_only else None)
                if full is not None:
                    for part in inside:
                        if part.specs.get(name) == ["shard", dtype]:
                            yield from _cut_up(unit, part.entry, name, full)


def _shards_in(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """Return names and dtypes of values that are cut, in an order that all ranks share."""
    found = {(n, spec[1]) for p in parts for n, spec in p.specs.items() if spec[0] == "shard"}
    return sorted(found)


def _joined(flat_param: FlatParameter, parts: Sequence[Part], name: str, dtype: str) -> Tensor:
    """Return one value of all weights in a flat parameter as one shard, `(shard_numel,)`."""
    wanted = [part for part in parts if part.specs.get(name) == ["shard", dtype]]
    whole = wanted[0].values.get(name) if wanted[0].entry.parameter is flat_param else None
    if isinstance(whole, Tensor):
        return whole
    shard = torch.zeros_like(flat_param.data, dtype=getattr(torch, dtype))
    for part in wanted:
        value = part.values.get(name)
        if isinstance(value, Tensor):
            part.entry.piece(shard).copy_(value)
    return shard


def _cut_up(
    unit: Unit, entry: Entry, name: str, full: Tensor
) -> Iterator[tuple[Unit, str, str, Tensor]]:
    if entry.flat_param is None:
        return
    for stored, number in zip(entry.names, entry.slots, strict=True):
        slot = entry.flat_param._layout.slots[number]
        yield unit, stored, name, full[slot.offset : slot.stop].view(slot.shape)
