"""Did all ranks cut their shards from the same weights? Asked once, before the first forward.

Every rank builds the whole model, or one unit of it, and keeps its own piece. If ranks drew
different numbers, the pieces do not belong together: the weight is a patchwork, of a size and a
spread like any other, and nothing looks wrong. So each rank remembers a fingerprint of the whole
weights while it has them, and the fingerprints are compared before the weights are used.

Writing to shards after they were cut goes wrong in the opposite way. With one seed on all ranks
every shard gets the same numbers. That is seen on the shards themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_ref import agreement
from fsdp_ref.agreement import name_ranks
from fsdp_ref.errors import FSDPError, IdenticalShardsError, InitialWeightsDifferError
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.originals import OriginalParameter
from fsdp_ref.rank_group import RankGroup
from fsdp_ref.unit import Unit

_FEWEST_ELEMENTS = 16  # smaller shards may be equal by chance or by design


def fingerprint(values: Tensor) -> Tensor:
    """Return two numbers that are equal for equal values, in practice for no others. Local.

    They are integers computed from the bits, so neither the device nor the order of summation
    changes them. Nothing is copied to the host.

    Args:
        values: Any tensor.

    Returns:
        The sum and the exclusive-or of the values' memory, shape `(2,)`, dtype `int64`.

    Examples:
        >>> torch.equal(fingerprint(torch.ones(3, 2)), fingerprint(torch.ones(3, 2)))
        True
        >>> torch.equal(fingerprint(torch.ones(3, 2)), fingerprint(torch.zeros(3, 2)))
        False
    """
    raw = values.detach().contiguous().as_strided((values.numel(),), (1,)).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    head, tail = raw[:whole], raw.new_zeros(8)
    tail[: raw.numel() - whole] = raw[whole:]
    last = tail.view(torch.int64)
    if whole == 0:
        return torch.cat([last, last])
    if head.storage_offset() % 8:
        head = head.clone()
    words = head.view(torch.int64)
    mixed = torch.hash_tensor(words).view(torch.int64)
    return torch.cat([words.sum() + last, mixed ^ last])


def take_fingerprints(originals: Iterable[OriginalParameter]) -> dict[str, Tensor]:
    """Return the fingerprint of each original parameter, by name. Local; one pass over them."""
    return {o.name: fingerprint(o.parameter) for o in originals}


class InitialWeights:
    """What the weights of one unit were when they were cut, kept until they are first used."""

    def __init__(
        self, unit: Unit, whole: Mapping[str, Tensor], from_meta: Iterable[str] = ()
    ) -> None:
        """Take the fingerprints of the shards too, to see later whether anybody wrote to them.

        Args:
            unit: The unit.
            whole: What `take_fingerprints` returned before the weights were cut.
            from_meta: Names of parameters that the constructor has initialised, on each rank
                for itself.
        """
        self.whole: dict[str, Tensor] = dict(whole)
        self.from_meta = frozenset(from_meta)
        cut = unit.flat_params if unit.placement.size > 1 else []
        self.shards = [_shard_of(flat_param) for flat_param in cut]

    def replaced(self, unit: Unit, names: Iterable[str]) -> None:
        """Forget parameters that were given whole values since; every rank does that alike. Local.

        Args:
            unit: The unit.
            names: The parameters, as the unit calls them.
        """
        given = set(names)
        for name in given:
            self.whole.pop(name, None)
        for number, flat_param in enumerate(unit.flat_params[: len(self.shards)]):
            if any(slot.name in given for slot in flat_param._layout.slots):
                self.shards[number] = _shard_of(flat_param)


def _shard_of(flat_param: FlatParameter) -> tuple[torch.dtype, Tensor]:
    return flat_param.dtype, fingerprint(flat_param.data)


@dataclass(frozen=True)
class FlatState:
    """What one rank knows of one flat parameter.

    Attributes:
        where: Its unit.
        whole: For each original parameter its fingerprint, and whether it was on meta; `None`
            if it was given whole values since.
        shard: Fingerprint of the shard now.
        written: Whether the shard was written to, other than with a piece of whole values.
        varied: Whether it was written to, has many elements, and not all the same.
        groups: The ranks that share it; then those that hold copies, if there are copies.
    """

    where: str
    whole: dict[str, list[Any] | None]
    shard: list[int]
    written: bool
    varied: bool
    groups: list[list[int]]


Units = Sequence[tuple[Unit, InitialWeights]]


def compare_initial_weights(units: Units, groups: Sequence[RankGroup]) -> None:
    """Raise on every rank unless the shards of all units were cut from the same weights.

    Collective: every rank of ``groups`` calls this, for the same units. It costs one pass over
    the shards and one exchange of texts for each group, with one digest for each set of ranks.

    Args:
        units: Each unit with what is remembered of its weights.
        groups: The root's groups.

    Raises:
        InitialWeightsDifferError: If ranks that share or copy a unit cut it from different
            weights, naming unit, parameter and ranks.
        IdenticalShardsError: If ranks wrote the same numbers to their shards of a unit.
        SilentRanksError: If a rank does not take part.
    """
    mine, ranks, topic = flat_states(units), [group.ranks for group in groups], "initial weights"
    summary = json.dumps([_digests(mine), any(state.written for state in mine)])
    heard = agreement.exchange_through(topic, summary, ranks)
    agreed: dict[str, str] = {}
    suspicious = False
    for digests, written in map(json.loads, heard.values()):
        differ = [agreed.setdefault(key, digest) != digest for key, digest in digests.items()]
        suspicious = suspicious or written or any(differ)
    if suspicious:
        details = json.dumps([asdict(state) for state in mine])
        heard = agreement.exchange_through(f"{topic}/details", details, ranks)
        objections = find_objections(
            {rank: [FlatState(**one) for one in json.loads(said)] for rank, said in heard.items()}
        )
        for error in objections:
            raise error


def flat_states(units: Units) -> list[FlatState]:
    """Bring everything that is known here to the host, in one copy for each device."""
    known = [
        (unit, initial, flat_param, before, fingerprint(flat_param.data))
        for unit, initial in units
        if unit.placement.size > 1
        for flat_param, before in zip(unit.flat_params, initial.shards, strict=True)
    ]
    tensors = [tensor for _, _, _, (_, before), now in known for tensor in (before, now)]
    tensors += [tensor for _, initial in units for tensor in initial.whole.values()]
    on_host = _to_host(tensors)
    states = []
    for unit, initial, flat_param, (dtype, before), now in known:
        written = dtype == flat_param.dtype and on_host[id(before)] != on_host[id(now)]
        whole: dict[str, list[Any] | None] = {}
        for slot in flat_param._layout.slots:
            known_value = initial.whole.get(slot.name)
            whole[slot.name] = None
            if known_value is not None:
                whole[slot.name] = [on_host[id(known_value)], slot.name in initial.from_meta]
        groups = [list(group.ranks) for group in unit.placement.groups]
        varied = written and _is_varied(flat_param.data)
        states.append(FlatState(unit.where, whole, on_host[id(now)], written, varied, groups))
    return states


def _to_host(tensors: list[Tensor]) -> dict[int, list[int]]:
    """Return the values of small tensors of equal shape, by the tensors' identity."""
    values: dict[int, list[int]] = {}
    for device in {tensor.device for tensor in tensors}:
        there = [tensor for tensor in tensors if tensor.device == device]
        values |= dict(zip(map(id, there), torch.stack(there).tolist(), strict=True))
    return values


def _is_varied(shard: Tensor) -> bool:
    raw = shard.reshape(-1, 1).view(torch.uint8)  # as bytes, so that NaN equals NaN
    return len(raw) >= _FEWEST_ELEMENTS and not torch.equal(raw, raw[:1].expand_as(raw))


def _digests(states: Sequence[FlatState]) -> dict[str, str]:
    """Return one digest of the whole weights for each set of ranks."""
    by_ranks: dict[str, list[Any]] = {}
    for state in states:
        for ranks in state.groups:
            by_ranks.setdefault(json.dumps(ranks), []).append([state.where, state.whole])
    return {
        ranks: hashlib.sha256(json.dumps(weights).encode()).hexdigest()
        for ranks, weights in by_ranks.items()
    }


def find_objections(states: Mapping[int, Sequence[FlatState]]) -> Iterator[FSDPError]:
    """Yield an error for each flat parameter that ranks hold wrongly, in an order that all share.

    Args:
        states: For each rank, its flat parameters, in the same order.

    Yields:
        The errors.
    """
    for of_all_ranks in zip(*states.values(), strict=True):
        by_rank = dict(zip(states, of_all_ranks, strict=True))
        for kind, judge in enumerate((_judge_shards, _judge_copies)):
            groups = {tuple(s.groups[kind]) for s in by_rank.values() if len(s.groups) > kind}
            for ranks in sorted(groups):
                yield from judge({rank: by_rank[rank] for rank in ranks if rank in by_rank})


def _judge_shards(found: dict[int, FlatState]) -> Iterator[FSDPError]:
    if not any(state.written for state in found.values()):
        yield from _judge_whole(found)
        return
    for ranks in _by_value({rank: state.shard for rank, state in found.items()}):
        state = found[ranks[0]]
        if len(ranks) > 1 and state.varied:
            yield IdenticalShardsError.at(
                state.where,
                expected="shards that are pieces of one weight",
                found=f"the same numbers in the shards of {_names(state)} on {name_ranks(ranks)}",
                fix="They were written after wrapping, with one seed: write whole weights, before "
                "wrapping or inside summon_full_params() or apply().",
            )


def _judge_copies(found: dict[int, FlatState]) -> Iterator[FSDPError]:
    if not any(state.written for state in found.values()):
        yield from _judge_whole(found)
        return
    ranks_by_value = _by_value({rank: state.shard for rank, state in found.items()})
    if len(ranks_by_value) > 1:
        state = found[ranks_by_value[0][0]]
        yield InitialWeightsDifferError.at(
            state.where,
            expected=f"equal copies on {name_ranks(list(found))}",
            found=f"{_names(state)} written after wrapping, with other values on "
            f"{name_ranks(ranks_by_value[1])} than on {name_ranks(ranks_by_value[0])}",
            fix="Write the same values on all ranks that hold copies.",
        )


def _judge_whole(found: dict[int, FlatState]) -> Iterator[FSDPError]:
    """Object if the ranks cut their pieces from different whole weights."""
    differing = [
        name
        for name in next(iter(found.values())).whole
        if len(_by_value({rank: state.whole[name] for rank, state in found.items()})) > 1
    ]
    if not differing:
        return
    values = {rank: state.whole[differing[0]] for rank, state in found.items()}
    loaded = [rank for rank, value in values.items() if value is None]
    on_meta = [rank for rank, value in values.items() if value is not None and value[1]]
    fix = (
        "Each rank would keep a piece of its own draw: seed all ranks alike before building the "
        "model, or give sync_module_states=True."
    )
    if loaded:
        rest = [rank for rank in values if rank not in loaded]
        how = f"loaded or written since on {name_ranks(loaded)} and not on {name_ranks(rest)}"
        fix = "Give every rank the same whole values."
    elif on_meta and len(on_meta) < len(values):
        rest = [rank for rank in values if rank not in on_meta]
        how = f"on meta on {name_ranks(on_meta)} and with values on {name_ranks(rest)}"
        fix = "Give sync_module_states=True, which sends the values."
    else:
        common, other = _by_value(values)[:2]
        how = f"with other values on {name_ranks(other)} than on {name_ranks(common)}"
    more = f", and {len(differing) - 1} more parameters" if len(differing) > 1 else ""
    yield InitialWeightsDifferError.at(
        next(iter(found.values())).where,
        expected=f"the same initial weights on {name_ranks(list(found))}",
        found=f"'{differing[0]}' {how}{more}",
        fix=fix,
    )


def _by_value(values: Mapping[int, Any]) -> list[list[int]]:
    """Return the ranks that have equal values, the most common value first."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(json.dumps(value), []).append(rank)
    return sorted(ranks.values(), key=lambda members: (-len(members), members))


def _names(state: FlatState) -> str:
    names = [f"'{name}'" for name in state.whole]
    return ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
