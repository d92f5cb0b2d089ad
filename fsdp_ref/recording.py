"""`timeline()` records what happened to every unit, in order, while it is active.

When a run is slow or hangs, the order of its collectives says why. Tests assert on that order,
and snippets print it. When no timeline is active, nothing is recorded.

Tip: Count what your units cost before you tune them
    `bytes_sent` and `lines` say what one step moved, unit by unit. The root is gathered once and
    every other unit twice, so what sharding adds to plain data parallelism depends on how much
    of the model lies in the root.

    Proof: tips/order_of_a_step
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch


class _Watched(Protocol):
    @property
    def unsharded_bytes(self) -> int: ...


@dataclass(frozen=True)
class Event:
    """One move or one collective of one unit.

    Attributes:
        unit: The unit's name; the outermost one is called ``root``.
        phase: Where the step was, a value of [Phase][fsdp_ref.states.Phase].
        operation: ``all-gather`` (issued), ``unshard`` (usable now), ``reshard``,
            ``reduce-scatter`` (issued), ``all-reduce`` (copies are averaged, or ranks agree at
            the end of a backward) or ``all-to-all`` (edits are compared).
        bytes_on_wire: Bytes that this rank sends to others; 0 for moves.
        group: Global ranks that took part; empty for moves.
        dtype: What was sent; ``None`` for moves.
        live_unsharded_bytes: Bytes of unsharded parameters in memory just after, over all
            units of the process.
    """

    unit: str
    phase: str
    operation: str
    bytes_on_wire: int
    group: tuple[int, ...]
    dtype: torch.dtype | None
    live_unsharded_bytes: int


@dataclass(eq=False)  # two that recorded the same are still two
class Timeline:
    """The recorded events, in order.

    Attributes:
        events: One entry per move or collective, oldest first.
    """

    events: list[Event] = field(default_factory=list)

    def lines(self, *operations: str) -> list[str]:
        """Return the events as short texts such as ``"all-gather layers.0"``.

        Args:
            *operations: Keep these operations only; all of them when none is given.

        Returns:
            One text per event, in order.
        """
        kept = [e for e in self.events if not operations or e.operation in operations]
        return [f"{event.operation} {event.unit}" for event in kept]

    def bytes_sent(self, operation: str | None = None) -> int:
        """Return the bytes that this rank sent.

        Args:
            operation: Count this operation only; all of them when omitted.

        Returns:
            Bytes, for this rank.
        """
        return sum(e.bytes_on_wire for e in self.events if operation in (None, e.operation))

    @property
    def peak_unsharded_bytes(self) -> int:
        """The most bytes of unsharded parameters that were in memory at once."""
        return max((event.live_unsharded_bytes for event in self.events), default=0)


_active: list[Timeline] = []
_watched: weakref.WeakSet[_Watched] = weakref.WeakSet()


@contextmanager
def timeline() -> Iterator[Timeline]:
    """Record moves and collectives of all units of this process while the context is open.

    Not collective: any rank may record, alone or together with others. Contexts nest.

    Yields:
        The [Timeline][fsdp_ref.recording.Timeline], filled while the context is open.

    Examples:
        >>> with timeline() as recorded:
        ...     pass
        >>> recorded.lines()
        []
    """
    recorded = Timeline()
    _active.append(recorded)
    try:
        yield recorded
    finally:
        _active.remove(recorded)


def watch(unit: _Watched) -> None:
    """Count a unit's unsharded bytes as live memory, as long as the unit exists."""
    _watched.add(unit)


def live_unsharded_bytes() -> int:
    """Return the bytes of unsharded parameters now in memory in this process."""
    return sum(unit.unsharded_bytes for unit in _watched)


def record(
    unit: str,
    phase: str,
    operation: str,
    *,
    bytes_on_wire: int = 0,
    group: tuple[int, ...] = (),
    dtype: torch.dtype | None = None,
) -> None:
    """Append an event to every active timeline; free of cost when there is none."""
    if not _active:
        return
    live = live_unsharded_bytes()
    event = Event(unit or "root", phase, operation, bytes_on_wire, group, dtype, live)
    for recorded in _active:
        recorded.events.append(event)
