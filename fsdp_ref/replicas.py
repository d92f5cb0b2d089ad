"""Did weights drift apart? Compares what ranks hold that never exchange it.

A unit averages its gradient over its own group. Put it in a group that is smaller than the
world, such as `'set2'` on four ranks, and it exists twice: two weights of one name, trained on
different tokens, that nobody compares. For an expert that is the purpose. For a dense layer it is
a mistake that no error and no loss curve shows: outputs depend on the rank, and a checkpoint
written by the first rank drops what the others learned. The same goes for ignored parameters and
for those that no unit holds, which every rank trains alone.

[check_replicas][fsdp_ref.replicas.check_replicas] finds them. It is there as
`fsdp_ref.agreement.check_replicas` too. Call it after a few steps of a new configuration, or
before a checkpoint is written: the report's `ok` says whether something drifted, and printed it is
a table, as in [a run][drift-of-a-dense-layer]. What is meant to differ is named, such as
`expected=["experts"]`, as in [another][mixture-of-experts].

Weights that are equal at the start and get equal gradients stay equal bit by bit, so bits are
compared. No weight is sent. Each rank computes one number from its shard of each weight, in which
every element counts with its place; the numbers of a group's shards add up to that of the whole
weight, however many ranks share it. Equal weights always have equal numbers, so there is no false
alarm. Different ones have equal numbers by chance only, as rarely as two random numbers of 64
bits are equal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_ref import agreement
from fsdp_ref.agreement import name_ranks
from fsdp_ref.collectives import all_reduce, explained
from fsdp_ref.columns import align, ranks_in_words
from fsdp_ref.errors import OptionError, SummonContextError, this_rank
from fsdp_ref.flat_param import is_sharded
from fsdp_ref.rank_group import RankGroup
from fsdp_ref.state_dict import clean_name
from fsdp_ref.unit_module import UnitModule

_TOPIC = "check_replicas"
_ELEMENTS_AT_ONCE = 1 << 20  # so that the numbers computed from a large shard need little memory
_AS_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Difference:
    """A parameter or buffer that has different values on different ranks.

    Attributes:
        name: Its name in the plain model.
        is_buffer: Whether it is a buffer.
        shared_by: The sets of ranks that hold one whole value together.
        equal_on: The sets of ranks that have equal values; the largest one first.
        expected: Whether it was said to differ.
    """

    name: str
    is_buffer: bool
    shared_by: tuple[Ranks, ...]
    equal_on: tuple[Ranks, ...]
    expected: bool


@dataclass(frozen=True)
class ReplicaReport:
    """What [check_replicas][fsdp_ref.replicas.check_replicas] found; prints as a table.

    Attributes:
        compared: How many parameters, and buffers if asked for, were compared.
        ranks: The ranks that took part.
        differences: Those with different values, in the order of the model.
    """

    compared: int
    ranks: Ranks
    differences: tuple[Difference, ...]

    @property
    def drifted(self) -> tuple[Difference, ...]:
        """The differences that nobody expected."""
        return tuple(found for found in self.differences if not found.expected)

    @property
    def expected(self) -> tuple[Difference, ...]:
        """The differences that were said to be there."""
        return tuple(found for found in self.differences if found.expected)

    @property
    def ok(self) -> bool:
        """Whether nothing has drifted."""
        return not self.drifted

    def __str__(self) -> str:
        number, where = (
            len(self.drifted),
            f"of {self.compared} compared on {name_ranks(self.ranks)}",
        )
        verb = "differ" if number > 1 else "differs"
        lines = [f"{number or 'nothing'} {where} {verb} unexpectedly"]
        for title, found in (("", self.drifted), ("differs as expected", self.expected)):
            lines += [title] if title and found else []
            lines += _table(found) if found else []
        return "\n".join(lines)


def _table(differences: Sequence[Difference]) -> list[str]:
    rows = [("  name", "one value on", "equal values on")]
    for found in differences:
        name = f"  {found.name} (buffer)" if found.is_buffer else f"  {found.name}"
        rows.append((name, _sets(found.shared_by), _sets(found.equal_on)))
    return align(rows)


def _sets(sets: Sequence[Ranks]) -> str:
    return " | ".join(map(ranks_in_words, sets))


def check_replicas(
    model: nn.Module,
    *,
    expected: Iterable[str | nn.Module] = (),
    buffers: bool = False,
) -> ReplicaReport:
    """Find weights of one name that have different values on ranks that do not share them.

    Collective: every rank calls this with the same arguments, between steps. It makes one pass
    over the shards, one all-reduce of a number per weight within each group, and an exchange of
    short texts; of longer ones if something differs. It changes nothing.

    Args:
        model: The wrapped model, or a module that contains units.
        expected: What is meant to differ, such as experts: patterns as for file names that fit
            a whole name (`"layers.*.experts.*"`), names of modules or parameters (`"experts"`
            stands for everything inside modules of that name), or the modules themselves.
        buffers: Whether to compare buffers too. Running statistics of batch norm differ between
            ranks, unless something synchronises them.

    Returns:
        What differs, where, and what of it was expected; the same on every rank.

    Raises:
        OptionError: If something expected fits no name in the model: it may be misspelt.
        RankDisagreementError: If ranks were given different arguments.
        SilentRanksError: If a rank does not take part.
        SummonContextError: If called inside `summon_full_params`, where weights may have been
            edited.

    Examples:
        >>> from fsdp_ref import FullyShardedDataParallel
        >>> dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, backend="gloo")
        >>> report = check_replicas(FullyShardedDataParallel(nn.Linear(2, 3)))
        >>> report.ok
        True
        >>> print(report)
        nothing of 2 compared on rank 0 differs unexpectedly
        >>> dist.destroy_process_group()
    """
    ranks = tuple(range(dist.get_world_size() if dist.is_initialized() else 1))
    parts = [(clean_name(name), part) for name, part in model.named_modules()
             if isinstance(part, UnitModule)]  # fmt: skip
    _refuse_summoned(parts)
    agreement.compare(_TOPIC, f"buffers={buffers}", ranks)
    for _, part in parts:
        part._set_up()
    mine = {name: (digest, group.ranks) for name, digest, group in _numbers_of_shards(parts)}
    names_of_buffers = set()
    for name, tensor, is_buffer in _outside_of_units(model, buffers):
        mine[name] = (int(_number(_values(tensor), 0)), (this_rank(),))
        names_of_buffers |= {name} if is_buffer else set()
    is_expected = _fits(model, expected, mine)
    differences = [
        Difference(name, name in names_of_buffers, shared_by, equal_on, name in is_expected)
        for name, shared_by, equal_on in _compare(mine, ranks)
    ]
    return ReplicaReport(len(mine), ranks, tuple(differences))


def _refuse_summoned(parts: Sequence[tuple[str, UnitModule]]) -> None:
    for _, part in parts:
        if part._unit.summoned:
            raise SummonContextError.at(
                f"{part._unit.where}, {_TOPIC}",
                expected="a unit at rest",
                found="summon_full_params around the call",
                fix="Close the context first.",
            )


# What this rank holds


def _numbers_of_shards(
    parts: Sequence[tuple[str, UnitModule]],
) -> Iterator[tuple[str, int, RankGroup]]:
    """Yield the number of each whole parameter in units. Collective within the units' groups."""
    by_ranks: dict[Ranks, tuple[RankGroup, list[str], list[Tensor]]] = {}
    for path, part in parts:
        group = part._unit.group
        _, names, numbers = by_ranks.setdefault(group.ranks, (group, [], []))
        for flat_param in part._unit.flat_params:
            flat_param.prepare()
            shard = _values(flat_param.data)
            for slot in flat_param._layout.slots:
                first, start, numel = flat_param._layout.overlap(slot, group.rank)
                number = _number(shard[start : start + numel], first)
                numbers.append(number.to(flat_param.compute_device))
                names.append(f"{path}.{slot.name}" if path else slot.name)
    for group, names, numbers in by_ranks.values():
        if numbers:
            total = torch.stack([number.to(numbers[0].device) for number in numbers])
            with explained(_TOPIC, [group]):
                all_reduce(total, dist.ReduceOp.SUM, [group])
            yield from zip(names, total.tolist(), [group] * len(names), strict=True)


def _outside_of_units(model: nn.Module, buffers: bool) -> Iterator[tuple[str, Tensor, bool]]:
    for name, parameter in model.named_parameters():
        if not is_sharded(parameter):
            yield clean_name(name), parameter, False
    for name, buffer in model.named_buffers() if buffers else ():
        yield clean_name(name), buffer, True


def _values(tensor: Tensor) -> Tensor:
    """Return the elements' bits as integers, in one dimension."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.reshape(-1).view(_AS_INTEGERS[tensor.itemsize])


def _number(values: Tensor, first: int) -> Tensor:
    """Return a number to which each element contributes by its bits and its place.

    Args:
        values: Integers, consecutive elements of a parameter.
        first: The place of the first one.

    Returns:
        The sum of what they contribute, `int64`; it wraps around.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, values.numel(), _ELEMENTS_AT_ONCE):
        chunk = values[start : start + _ELEMENTS_AT_ONCE]
        places = torch.arange(chunk.numel(), device=chunk.device) + (first + start)
        # The finishing steps of the generator SplitMix64: each bit changes about half of them.
        mixed = (places + 1) * -0x61C8864680B583EB + chunk.to(torch.int64)
        mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
        mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
        total += (mixed ^ (mixed >> 31)).sum()
    return total


# What is expected


def _fits(
    model: nn.Module, expected: Iterable[str | nn.Module], names: Iterable[str]
) -> frozenset[str]:
    """Return the names that are expected to differ."""
    known, found = list(names), set[str]()
    for one in expected:
        if isinstance(one, nn.Module):
            paths = [name for name, module in model.named_modules() if module is one]
            inside = tuple(clean_name(f"{path}." if path else "") for path in paths)
            fitting = {name for name in known if name.startswith(inside)}
        else:
            fitting = {name for name in known if fnmatchcase(name, one) or _is_inside(name, one)}
        if not fitting:
            raise OptionError.at(
                f"{_TOPIC}, expected",
                expected="modules of this model, or patterns that fit a name in it",
                found=type(one).__name__ if isinstance(one, nn.Module) else repr(one),
                fix=f"Names are like {known[0]!r}." if known else "It has no parameters.",
            )
        found |= fitting
    return frozenset(found)


def _is_inside(name: str, path: str) -> bool:
    return f".{path}." in f".{name}."


# Across ranks


def _compare(
    mine: dict[str, tuple[int, Ranks]], ranks: Ranks
) -> Iterator[tuple[str, tuple[Ranks, ...], tuple[Ranks, ...]]]:
    """Yield what differs: its name, who shares it, who has equal values. Collective."""
    text = json.dumps({name: digest for name, (digest, _) in mine.items()})
    summaries = agreement.exchange(
        f"{_TOPIC}/summary", hashlib.sha256(text.encode()).hexdigest(), ranks
    )
    if len(set(summaries)) == 1:
        return
    texts = agreement.exchange(f"{_TOPIC}/details", json.dumps(mine), ranks)
    heard = dict(zip(ranks, map(json.loads, texts), strict=True))
    for name in dict.fromkeys(name for values in heard.values() for name in values):
        equal: dict[int, list[int]] = {}
        shared: set[Ranks] = set()
        for rank, values in heard.items():
            if name in values:
                digest, group = values[name]
                equal.setdefault(digest, []).append(rank)
                shared.add(tuple(group))
        if len(equal) > 1:
            sets = sorted(map(tuple, equal.values()), key=lambda members: (-len(members), members))
            yield name, tuple(sorted(shared)), tuple(sets)
