"""A recording drawn: the trace event format that Perfetto and `chrome://tracing` open.

Each unit has a lane for its parameters: when they were gathered, how long the program waited
for them, how long they stayed whole. A second lane shows the collectives for its gradients. A
counter on top shows how many bytes of full parameters were in memory.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_ref.recording import Event, Recording, Wait

_PARAMETERS, _GRADIENTS = "parameters", "gradients"


@dataclass(frozen=True)
class _Span:
    """Something that took time, or of which only the beginning is known: both times are equal."""

    name: str
    unit: str
    kind: str  # parameters or gradients
    start_ns: int
    stop_ns: int
    event: Event | None = None  # what says more about it


def trace(recording: Recording, rank: int) -> dict[str, Any]:
    """Draw a recording.

    Args:
        recording: What to draw.
        rank: This process's global rank, which becomes the process's number in the drawing.

    Returns:
        A dict to be written as JSON. Times are in microseconds, as the format wants them, on the
        clock of the events.
    """
    spans = [*_parameter_spans(recording.events), *_gradient_spans(recording)]
    shown = {id(span.event) for span in spans}
    spans += [_moment(event) for event in recording.events
              if event.group and id(event) not in shown]  # fmt: skip
    spans += [_wait_span(wait) for wait in recording.waits]
    units = [event.unit for event in recording.events] + [span.unit for span in spans]
    lanes = _Lanes(dict.fromkeys(units), rank)
    drawn = [lanes.draw(span) for span in _outer_first(spans)]
    drawn += [_counter(event, rank) for event in recording.events]
    return {"traceEvents": [*lanes.names(), *drawn], "displayTimeUnit": "ms"}


# What took time


def _parameter_spans(events: Sequence[Event]) -> Iterator[_Span]:
    """Yield what went on with each unit's parameters; what is open ends with the recording.

    A gather lasts until its unit is unsharded, or resharded, when nobody needed it. Of a gather
    while the unit is unsharded, for `summon_full_params`, the end is not known.
    """
    gathers: dict[str, list[Event]] = defaultdict(list)
    whole: dict[str, Event] = {}
    for event in events:
        if event.operation == "all-gather" and event.unit not in whole:
            gathers[event.unit].append(event)
        if event.operation in ("unshard", "reshard"):
            yield from (_until(first, event) for first in gathers.pop(event.unit, []))
            if event.unit in whole:
                yield _until(whole.pop(event.unit), event)
        if event.operation == "unshard":
            whole[event.unit] = event
    for first in itertools.chain(*gathers.values(), whole.values()):
        yield _until(first, events[-1])


def _until(first: Event, last: Event) -> _Span:
    name = "unsharded" if first.operation == "unshard" else first.operation
    return _Span(name, first.unit, _PARAMETERS, first.time_ns, last.time_ns, first)


def _gradient_spans(recording: Recording) -> Iterator[_Span]:
    """Yield the reduce-scatters, each from its issue to the end of the wait for it."""
    waits: dict[str, deque[Wait]] = defaultdict(deque)
    for wait in recording.waits:
        if wait.operation == "reduce-scatter":
            waits[wait.unit].append(wait)
    for event in recording.events:
        if event.operation == "reduce-scatter":
            mine = waits[event.unit]
            while mine and mine[0].start_ns < event.time_ns:
                mine.popleft()  # for one that was issued before the recording began
            if mine:
                yield _Span(event.operation, event.unit, _GRADIENTS,
                            event.time_ns, mine.popleft().stop_ns, event)  # fmt: skip


def _wait_span(wait: Wait) -> _Span:
    kind = _PARAMETERS if wait.operation == "all-gather" else _GRADIENTS
    return _Span(f"wait for {wait.operation}", wait.unit, kind, wait.start_ns, wait.stop_ns)


def _moment(event: Event) -> _Span:
    kind = _GRADIENTS if event.operation in ("reduce-scatter", "all-reduce") else _PARAMETERS
    return _Span(f"{event.operation} issued", event.unit, kind,
                 event.time_ns, event.time_ns, event)  # fmt: skip


def _outer_first(spans: Iterable[_Span]) -> list[_Span]:
    """Sort by beginning; where two begin together, the one that contains the other is first."""
    return sorted(spans, key=lambda span: (span.start_ns, -span.stop_ns))


# In the words of the format


class _Lanes:
    """Finds each span a lane in which it overlaps others only by lying inside them."""

    def __init__(self, units: Iterable[str], rank: int) -> None:
        self._rank = rank
        wanted = itertools.product(units, (_PARAMETERS, _GRADIENTS))
        self._numbers = {lane: number for number, lane in enumerate(wanted, start=1)}
        self._names = {number: f"{unit}: {kind}" for (unit, kind), number in self._numbers.items()}
        self._open: dict[int, list[int]] = defaultdict(list)  # when the spans in it will stop

    def draw(self, span: _Span) -> dict[str, Any]:
        """Return the span as the format wants it."""
        about = {"name": span.name, "cat": span.kind, "pid": self._rank, "tid": self._lane(span),
                 "ts": span.start_ns / 1000, "args": _details(span.event)}  # fmt: skip
        if span.event is not None and span.name.endswith("issued"):
            return {"ph": "i", "s": "t", **about}
        return {"ph": "X", "dur": (span.stop_ns - span.start_ns) / 1000, **about}

    def _lane(self, span: _Span) -> int:
        first = number = self._numbers[span.unit, span.kind]
        while not self._fits(span, self._open[number]):
            number += len(self._numbers)
            again = (number - 1) // len(self._numbers) + 1
            self._names.setdefault(number, f"{self._names[first]} ({again})")
        self._open[number].append(span.stop_ns)
        return number

    @staticmethod
    def _fits(span: _Span, stops: list[int]) -> bool:
        while stops and stops[-1] <= span.start_ns:
            stops.pop()
        return not stops or span.stop_ns <= stops[-1]

    def names(self) -> Iterator[dict[str, Any]]:
        """Yield what the process and the lanes are called, and in which order they stand."""
        yield {"ph": "M", "name": "process_name", "pid": self._rank, "tid": 0, "ts": 0,
               "args": {"name": f"rank {self._rank}"}}  # fmt: skip
        for number, name in sorted(self._names.items()):
            about = {"ph": "M", "pid": self._rank, "tid": number, "ts": 0}
            yield {**about, "name": "thread_name", "args": {"name": name}}
            place = (number - 1) % len(self._numbers)
            yield {**about, "name": "thread_sort_index", "args": {"sort_index": place}}


def _counter(event: Event, rank: int) -> dict[str, Any]:
    return {"ph": "C", "name": "unsharded bytes", "pid": rank, "tid": 0,
            "ts": event.time_ns / 1000,
            "args": {"bytes": event.live_unsharded_bytes}}  # fmt: skip


def _details(event: Event | None) -> dict[str, Any]:
    if event is None:
        return {}
    if not event.group:
        return {"phase": event.phase}
    return {"phase": event.phase, "bytes sent": event.bytes_on_wire,
            "ranks": list(event.group), "dtype": str(event.dtype)}  # fmt: skip
