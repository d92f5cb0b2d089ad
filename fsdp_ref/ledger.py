"""What a recording adds up to, beside what a training step has to send.

# The prediction

A step is a fixed series of collectives, so what it sends follows from the model's units alone. With
parameters of P bytes in all, in a group of N ranks, each rank sends:

| collective | bytes that one rank sends |
| --- | --- |
| all-gather of all parameters | (N - 1) / N of P |
| reduce-scatter of all gradients | (N - 1) / N of P |
| all-reduce in a ring, as plain data parallelism does it | the sum of these two |

Under `FULL_SHARD` the root is gathered and reduced once each, and costs what plain data parallelism
costs. Every other unit is gathered once more, for its backward, and costs half as much again. The
whole step sends `1 + 0.5 (1 - root share)` of what plain data parallelism sends, where the root
share is the part of the parameters that lies in the root. `SHARD_GRAD_OP` does not gather again and
sends the same as plain data parallelism; so does `NO_SHARD`, which all-reduces. Hybrid strategies
gather and reduce within a host only, and all-reduce shards across hosts.

What changes it:

- Mixed precision: gathers count in `param_dtype`, reductions in `reduce_dtype`.
- Frozen parameters are gathered, and not reduced.
- Inside `no_sync` nothing is reduced.
- Padding is sent too.
- CPU offload moves nothing between ranks.

At the end of a backward the ranks agree on which parameters were used. That is an all-reduce of a
few integers, listed apart. So is what ranks exchange in calls such as `clip_grad_norm_`.

# When measured and expected differ

The prediction is for steps in which each unit runs forward and backward once. A unit that is called
twice is gathered twice. One whose output needs no gradient is not gathered for a backward. One
that no rank used is neither gathered nor reduced. An evaluation, `summon_full_params` or
`state_dict` inside the recording gathers as well. A communication hook sends what it likes; what is
listed is what the reduce-scatter in its place would have sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from fsdp_ref.columns import align, dtype_in_words, ranks_in_words, rich_table
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.recording import Event
from fsdp_ref.unit_module import UnitModule

_Key = TypeVar("_Key")

# The arithmetic


@dataclass(frozen=True)
class Steps:
    """How many training steps a recording covers.

    Attributes:
        synchronized: Forwards and backwards whose gradients are reduced.
        unsynchronized: Forwards and backwards inside `no_sync`.
    """

    synchronized: int = 1
    unsynchronized: int = 0


class _Kind(NamedTuple):
    """What tells messages apart."""

    unit: str
    operation: str
    ranks: tuple[int, ...]
    dtype: torch.dtype | None


@dataclass(frozen=True)
class _Messages:
    kind: _Kind
    count: int
    bytes_each: int


def ring_all_reduce_bytes(nbytes: int, world_size: int) -> int:
    """Return the bytes that one rank sends in an all-reduce in a ring.

    Args:
        nbytes: Size of what is reduced.
        world_size: Number of ranks.

    Returns:
        Bytes: as many as an all-gather and a reduce-scatter of as much send together.

    Examples:
        >>> ring_all_reduce_bytes(1000, world_size=4)
        1500
    """
    return 2 * (world_size - 1) * nbytes // world_size


def _expected(model: nn.Module, steps: Steps) -> Iterator[_Messages]:
    """Yield what the units of a model send, from their layouts, placements and dtypes alone."""
    parts = UnitModule.fsdp_modules(model)
    roots = dict.fromkeys(part._root() for part in parts)
    names = {part: name or "root" for root in roots for name, part in root._named_units()}
    for part in parts:
        if part in roots:
            yield from _agreement(part, steps)
        for flat_param in part._unit.flat_params:
            yield from _of_weights(names[part], part, flat_param, steps)
            if flat_param.requires_grad:
                yield from _of_gradients(names[part], part, flat_param, steps)


def _of_weights(
    unit: str, part: UnitModule, flat_param: FlatParameter, steps: Steps
) -> Iterator[_Messages]:
    placement, dtype = part._unit.placement, flat_param.compute_dtype
    again = placement.reshard_after_forward and not part.check_is_root()
    gathers = (steps.synchronized + steps.unsynchronized) * (2 if again else 1)
    sent = (placement.shard.size - 1) * flat_param.numel() * dtype.itemsize
    yield _Messages(_Kind(unit, "all-gather", placement.shard.ranks, dtype), gathers, sent)


def _of_gradients(
    unit: str, part: UnitModule, flat_param: FlatParameter, steps: Steps
) -> Iterator[_Messages]:
    placement, dtype = part._unit.placement, flat_param.gradient_dtype
    shard_bytes = flat_param.numel() * dtype.itemsize
    kind = _Kind(unit, "reduce-scatter", placement.shard.ranks, dtype)
    sent = (placement.shard.size - 1) * shard_bytes
    yield _Messages(kind, steps.synchronized, sent)
    copies = placement.replicate
    if copies is not None and not part._unit.has_comm_hook:
        kind = _Kind(unit, "all-reduce", copies.ranks, dtype)
        sent = ring_all_reduce_bytes(shard_bytes, copies.size)
        yield _Messages(kind, steps.synchronized, sent)


def _agreement(root: UnitModule, steps: Steps) -> Iterator[_Messages]:
    """Yield the exchange at the end of each synchronizing backward."""
    numbers = 2  # the order of the units, in two forms; then what was used
    for part in UnitModule.fsdp_modules(root):
        for flat_param in part._unit.flat_params:
            one_by_one = part._unit.options.use_orig_params
            numbers += len(flat_param._layout.slots) if one_by_one else 1
    for group in root._unit.placement.groups:
        kind = _Kind("root", "all-reduce", group.ranks, torch.int64)
        sent = ring_all_reduce_bytes(numbers * torch.int64.itemsize, group.size)
        yield _Messages(kind, steps.synchronized, sent)


def _ddp_bytes(model: nn.Module, steps: Steps) -> int:
    """Return what plain data parallelism sends for the same parameters, in their own dtypes."""
    trainable: Counter[UnitModule] = Counter()
    for part in UnitModule.fsdp_modules(model):
        for flat_param in part._unit.flat_params:
            if flat_param.requires_grad:
                nbytes = flat_param._layout.total_numel * flat_param.dtype.itemsize
                trainable[part._root()] += nbytes
    return steps.synchronized * sum(
        ring_all_reduce_bytes(nbytes, root._unit.placement.size)
        for root, nbytes in trainable.items()
    )


# The table


@dataclass(frozen=True)
class Entry:
    """What one unit sent in one kind of collective, on this rank.

    Attributes:
        unit: The unit's name, or the call, as in [Event][fsdp_ref.Event].
        operation: What was sent, as in [Event][fsdp_ref.Event].
        ranks: Global ranks that took part.
        dtype: What was sent.
        count: How often.
        bytes_sent: Bytes that this rank sent to others, in all.
        expected_count: How often it was to be; `None` if no model was given, or if it belongs
            to a call, such as ``clip_grad_norm_()``, instead of a unit.
        expected_bytes: How many bytes; `None` likewise.
    """

    unit: str
    operation: str
    ranks: tuple[int, ...]
    dtype: torch.dtype | None
    count: int
    bytes_sent: int
    expected_count: int | None
    expected_bytes: int | None

    @property
    def is_agreement(self) -> bool:
        """Whether ranks only agreed on something, for the model or in a call of a method."""
        integers = self.dtype is not None and not self.dtype.is_floating_point
        return integers or self.unit.endswith("()")  # weights and gradients are never integers

    @property
    def is_as_expected(self) -> bool:
        """Whether count and bytes are as expected; without a model nothing is expected."""
        found = (self.count, self.bytes_sent)
        return self.expected_bytes is None or found == (self.expected_count, self.expected_bytes)

    def cells(self) -> tuple[str, ...]:
        """What the table says about it."""
        return (self.unit, self.operation, ranks_in_words(self.ranks), dtype_in_words(self.dtype),
                *_numbers([self]))  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """What a recording adds up to; prints as a table.

    Attributes:
        entries: One for each unit and kind of collective.
        peak_unsharded_bytes: The most bytes of full parameters that were in memory at once.
        ddp_bytes: What a rank would have sent under plain data parallelism: an all-reduce in a
            ring, over the ranks of the root, of all trainable parameters in their own dtypes.
            `None` if no model was given.
    """

    entries: tuple[Entry, ...]
    peak_unsharded_bytes: int
    ddp_bytes: int | None = None

    @property
    def bytes_sent(self) -> int:
        """Bytes of weights and gradients that this rank sent."""
        return sum(self.bytes_by_unit.values())

    @property
    def bytes_by_unit(self) -> dict[str, int]:
        """Bytes of weights and gradients that this rank sent, by unit."""
        return self._bytes_by(lambda entry: entry.unit)

    @property
    def bytes_by_operation(self) -> dict[str, int]:
        """Bytes of weights and gradients that this rank sent, by operation."""
        return self._bytes_by(lambda entry: entry.operation)

    @property
    def bytes_by_ranks(self) -> dict[tuple[int, ...], int]:
        """Bytes of weights and gradients that this rank sent, by the ranks that took part.

        Under a hybrid strategy these are its two levels: inside a copy, and across the copies.
        """
        return self._bytes_by(lambda entry: entry.ranks)

    def _bytes_by(self, key: Callable[[Entry], _Key]) -> dict[_Key, int]:
        sums: Counter[_Key] = Counter()
        for entry in self.entries:
            if not entry.is_agreement:
                sums[key(entry)] += entry.bytes_sent
        return dict(sums)

    @property
    def ratio_to_ddp(self) -> float | None:
        """`bytes_sent`, where what plain data parallelism sends is 1."""
        return self.bytes_sent / self.ddp_bytes if self.ddp_bytes else None

    @property
    def differences(self) -> tuple[Entry, ...]:
        """The entries that are not as expected."""
        return tuple(entry for entry in self.entries if not entry.is_as_expected)

    def _rows(self) -> list[tuple[str, ...]]:
        weights = [entry for entry in self.entries if not entry.is_agreement]
        rows = [_HEADER, *(entry.cells() for entry in weights)]
        for operation in self.bytes_by_operation:
            same = [entry for entry in weights if entry.operation == operation]
            rows.append(("all units", operation, "", "", *_numbers(same)))
        rows.append(("all units", "all of these", "", "", *_numbers(weights)))
        for entry in self.entries:
            if entry.is_agreement:
                label = "end of backward" if entry.unit == "root" else entry.unit
                rows.append((label, *entry.cells()[1:]))
        return rows

    def __str__(self) -> str:
        lines = align(self._rows(), _RIGHT)
        lines.append(f"full parameters in memory: at most {self.peak_unsharded_bytes:,} bytes")
        if self.ddp_bytes is not None:
            lines.append(f"plain data parallelism would send {self.ddp_bytes:,} bytes")
        if self.ratio_to_ddp is not None:
            lines[-1] += f"; this is {self.ratio_to_ddp:.4f} of it"
        return "\n".join(lines)

    def __rich__(self) -> Any:
        return rich_table(self._rows(), _RIGHT)


_HEADER = ("unit", "operation", "ranks", "dtype", "count", "bytes sent", "expected", "")
_RIGHT = {4, 5, 6}


def _numbers(entries: Sequence[Entry]) -> tuple[str, str, str, str]:
    """Add up entries: count, bytes, expected bytes, and a mark where they differ."""
    count = sum(entry.count for entry in entries)
    sent = sum(entry.bytes_sent for entry in entries)
    expected = [e.expected_bytes for e in entries if e.expected_bytes is not None]
    differs = not all(entry.is_as_expected for entry in entries)
    return (str(count), f"{sent:,}", f"{sum(expected):,}" if expected else "-",
            "differs" if differs else "")  # fmt: skip


def _unit_by_unit(kinds: Sequence[_Kind]) -> list[_Kind]:
    """Return each kind once, those of one unit together, in the order in which they came."""
    units = list(dict.fromkeys(kind.unit for kind in kinds))
    return sorted(dict.fromkeys(kinds), key=lambda kind: units.index(kind.unit))


def summarize(events: Sequence[Event], model: nn.Module | None, steps: Steps) -> Summary:
    """Add up events, and put beside them what was to be expected.

    Args:
        events: What was recorded.
        model: The wrapped model, or `None` to expect nothing.
        steps: How many training steps they cover.

    Returns:
        The summary.
    """
    counts: Counter[_Kind] = Counter()
    sent: Counter[_Kind] = Counter()
    for event in events:
        if event.group:
            kind = _Kind(event.unit, event.operation, event.group, event.dtype)
            counts[kind] += 1
            sent[kind] += event.bytes_on_wire
    expected_counts: Counter[_Kind] = Counter()
    expected: Counter[_Kind] = Counter()
    for messages in () if model is None else _expected(model, steps):
        expected_counts[messages.kind] += messages.count
        expected[messages.kind] += messages.count * messages.bytes_each
    kinds = _unit_by_unit([*counts, *(kind for kind in expected if expected_counts[kind])])
    entries = []
    for kind in kinds:
        predicted = model is not None and not kind.unit.endswith("()")
        entries.append(Entry(*kind, counts[kind], sent[kind],
                             expected_counts[kind] if predicted else None,
                             expected[kind] if predicted else None))  # fmt: skip
    peak = max((event.live_unsharded_bytes for event in events), default=0)
    return Summary(tuple(entries), peak, None if model is None else _ddp_bytes(model, steps))
