"""A timeline adds up, filters and prints what was recorded."""

import torch

from fsdp_ref import Event, Timeline, timeline
from fsdp_ref.recording import live_unsharded_bytes, record, watch


def event(unit: str, operation: str, sent: int, live: int) -> Event:
    return Event(unit, "forward", operation, sent, (0, 1), torch.float32, live)


RECORDED = Timeline(
    [
        event("root", "all-gather", 10, 0),
        event("root", "unshard", 0, 5),
        event("layers.0", "all-gather", 20, 5),
        event("layers.0", "unshard", 0, 17),
        event("layers.0", "reduce-scatter", 40, 9),
        event("root", "reshard", 0, 3),
    ]
)


def test_lines_keep_the_order_and_can_be_filtered():
    assert RECORDED.lines("all-gather", "reshard") == [
        "all-gather root",
        "all-gather layers.0",
        "reshard root",
    ]
    assert len(RECORDED.lines()) == 6


def test_bytes_add_up_per_operation_and_in_all():
    assert RECORDED.bytes_sent() == 70
    assert RECORDED.bytes_sent("all-gather") == 30
    assert RECORDED.bytes_sent("all-reduce") == 0


def test_the_peak_is_the_most_that_was_in_memory_at_any_event():
    assert RECORDED.peak_unsharded_bytes == 17
    for start in range(len(RECORDED.events)):
        later = Timeline(RECORDED.events[start:])
        assert later.peak_unsharded_bytes == max(e.live_unsharded_bytes for e in later.events)
    assert Timeline().peak_unsharded_bytes == 0


class Watched:
    unsharded_bytes = 123


def test_live_bytes_are_counted_as_long_as_a_unit_exists():
    before = live_unsharded_bytes()
    unit = Watched()
    watch(unit)
    assert live_unsharded_bytes() == before + 123
    del unit
    assert live_unsharded_bytes() == before


def test_an_event_goes_to_every_open_timeline_and_the_outermost_unit_is_called_root():
    record("", "forward", "unshard")  # nobody listens
    with timeline() as outer:
        record("", "forward", "unshard")
        with timeline() as inner:
            record("layers.0", "forward", "all-gather", bytes_on_wire=8, group=(0, 1))
    record("", "forward", "reshard")
    assert outer.lines() == ["unshard root", "all-gather layers.0"]
    assert inner.lines() == ["all-gather layers.0"]
    assert inner.bytes_sent() == 8


def test_an_exception_closes_the_timeline():
    try:
        with timeline() as recorded:
            raise ZeroDivisionError
    except ZeroDivisionError:
        record("", "forward", "unshard")
    assert recorded.events == []
