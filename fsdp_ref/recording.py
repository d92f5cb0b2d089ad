"""What units report while somebody records: moves, collectives and waits.

A timeline is a list that is open for a while. Everything that happens in between is put into
all open ones, with the moment at which it happened. When none is open, a report costs one look
at an empty list. What can be read out of a timeline stands in `timelines.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Protocol

import torch


class _Watched(Protocol):
    @property
    def unsharded_bytes(self) -> int: ...


@dataclass(frozen=True)
class Event:
    """One move or one collective of one unit.

    Attributes:
        unit: The unit's name; the outermost one is called ``root``. Where ranks agree on
            something about the whole model, the call, such as ``clip_grad_norm_()``.
        phase: Where the step was, a value of [Phase][fsdp_ref.states.Phase].
        operation: ``all-gather`` (issued), ``unshard`` (usable now), ``reshard``,
            ``reduce-scatter`` (issued), ``all-reduce`` (copies are averaged, or ranks agree at
            the end of a backward), ``all-to-all`` (edits are compared), ``broadcast``
            (initial values are sent), or ``gather`` and ``scatter`` (one rank sees and edits
            full parameters).
        bytes_on_wire: Bytes that this rank sends to others; 0 for moves.
        group: Global ranks that took part; empty for moves.
        dtype: What was sent; ``None`` for moves.
        live_unsharded_bytes: Bytes of unsharded parameters in memory just after, over all
            units of the process.
        time_ns: When it happened, on the clock of `time.perf_counter_ns`, which the processes of
            one host share. Two events that differ in nothing else are equal.
        together_with: The unit in whose message this went along; empty if it was its own.
    """

    unit: str
    phase: str
    operation: str
    bytes_on_wire: int
    group: tuple[int, ...]
    dtype: torch.dtype | None
    live_unsharded_bytes: int
    time_ns: int = field(default=0, compare=False)
    together_with: str = ""


@dataclass(frozen=True)
class Wait:
    """How long the program stood still for a collective that was issued earlier.

    On a GPU the program goes on at once and the device waits instead; the device's own profiler
    shows that.

    Attributes:
        unit: The unit's name.
        operation: What it waited for, as in [Event][fsdp_ref.Event].
        start_ns: When the wait began, on the clock of the events.
        stop_ns: When it was over.
    """

    unit: str
    operation: str
    start_ns: int
    stop_ns: int


@dataclass(eq=False)  # two that recorded the same are still two
class Recording:
    """What was reported while it was open.

    Attributes:
        events: Moves and collectives, oldest first.
        waits: Waits for collectives, in the order in which they ended.
    """

    events: list[Event] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)


_active: list[Recording] = []
_watched: weakref.WeakSet[_Watched] = weakref.WeakSet()
_NOT_WAITING: AbstractContextManager[None] = nullcontext()


@contextmanager
def reporting_to(recording: Recording) -> Iterator[None]:
    """Fill ``recording`` while the context is open; contexts nest, and all that are open fill.

    Args:
        recording: Where to put what is reported.

    Yields:
        Nothing.
    """
    _active.append(recording)
    try:
        yield
    finally:
        _active.remove(recording)


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
    together_with: str = "",
) -> None:
    """Append an event to every open recording; free of cost when there is none."""
    if not _active:
        return
    now, live = perf_counter_ns(), live_unsharded_bytes()
    event = Event(
        unit or "root", phase, operation, bytes_on_wire, group, dtype, live, now, together_with
    )
    for recording in _active:
        recording.events.append(event)


def waiting(unit: str, operation: str) -> AbstractContextManager[None]:
    """Note how long the program waits inside the context; free of cost when nobody records.

    Args:
        unit: The unit's name; empty for the outermost one.
        operation: What it waits for.

    Returns:
        The context.
    """
    return _timed(unit, operation) if _active else _NOT_WAITING


@contextmanager
def _timed(unit: str, operation: str) -> Iterator[None]:
    start = perf_counter_ns()
    try:
        yield
    finally:
        wait = Wait(unit or "root", operation, start, perf_counter_ns())
        for recording in _active:
            recording.waits.append(wait)
