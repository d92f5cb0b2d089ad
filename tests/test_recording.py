"""What is recorded, what it costs when nobody records, and what a timeline adds up and draws."""

import ast
import itertools
import json
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_ref
from fsdp_ref import Event, Timeline, Wait, recording, timeline
from fsdp_ref.recording import live_unsharded_bytes, record, waiting, watch
from tests.ranks import run_ranks
from tests.toy import Stack, mean_square, my_part, nested, whole_batch


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


def test_an_event_has_a_time_that_does_not_make_it_another_event():
    with timeline() as recorded:
        record("layers.0", "forward", "unshard")
        record("layers.0", "forward", "unshard")
    first, second = recorded.events
    assert 0 < first.time_ns < second.time_ns
    assert first == second


def test_a_wait_has_a_beginning_and_an_end_also_after_an_exception():
    with timeline() as recorded:
        with waiting("", "all-gather"):
            record("", "forward", "unshard")
        with pytest.raises(ZeroDivisionError), waiting("layers.0", "reduce-scatter"):
            raise ZeroDivisionError
    first, second = recorded.waits
    assert (first.unit, first.operation) == ("root", "all-gather")
    assert first.start_ns < recorded.events[0].time_ns < first.stop_ns
    assert (second.unit, second.operation) == ("layers.0", "reduce-scatter")


# When nobody records


def step(model):
    mean_square(model(my_part(whole_batch()))).backward()


def refuse(*_, **__):
    raise AssertionError("somebody paid for a recording")


def a_step_and_what_it_may_not_touch():
    """Run a step with everything broken that a recording needs."""
    model = nested(Stack().double())
    broken = ("Event", "Wait", "perf_counter_ns", "live_unsharded_bytes", "_timed")
    kept = {name: getattr(recording, name) for name in broken}
    for name in broken:
        setattr(recording, name, refuse)
    step(model)
    with timeline(), pytest.raises(AssertionError, match="somebody paid"):
        record("", "forward", "unshard")
    with timeline(), pytest.raises(AssertionError, match="somebody paid"), waiting("", "x"):
        pass
    for name, value in kept.items():
        setattr(recording, name, value)


def test_nothing_is_recorded_when_nobody_listens():
    run_ranks(2, a_step_and_what_it_may_not_touch)


class Operations(TorchDispatchMode):
    """List every operation on tensors."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def operations_of_two_steps():
    model = nested(Stack().double())
    step(model)  # the first one sets up
    with Operations() as unrecorded:
        step(model)
    with Operations() as recorded, timeline() as seen:
        step(model)
    assert seen.events
    return unrecorded.names, recorded.names


def test_recording_adds_no_operation_on_tensors():
    for unrecorded, recorded in run_ranks(2, operations_of_two_steps):
        assert len(unrecorded) > 100
        assert recorded == unrecorded


CHEAP_CALLS = {"bytes_per_gather", "bytes_per_all_reduce", "numel"}  # arithmetic on a few numbers


def expensive_arguments(source: str) -> list[str]:
    """Return what is computed for a report beyond names, attributes and `CHEAP_CALLS`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        named = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2]
        if named not in ("record", "record_collective", "waiting"):
            continue
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            for part in ast.walk(argument):
                name = ast.unparse(part.func).rpartition(".")[2] if hasattr(part, "func") else ""
                loop = isinstance(part, ast.comprehension | ast.Lambda | ast.JoinedStr)
                if loop or (name and name not in CHEAP_CALLS):
                    found.append(f"{named}: {ast.unparse(argument)}")
    return found


def test_what_is_reported_is_at_hand_or_simple_arithmetic():
    sources = [path.read_text() for path in Path(fsdp_ref.__file__).parent.glob("*.py")]
    assert sum(source.count("record(") for source in sources) > 5
    assert list(itertools.chain(*map(expensive_arguments, sources))) == []
    assert expensive_arguments("record(a, b.c, d=x.sum())") == ["record: x.sum()"]
    assert expensive_arguments("x.record(f'{a}')") == ["record: f'{a}'"]
    assert expensive_arguments("record(a, sum(x for x in y))")


def whole_model_calls():
    model = nested(Stack().double())
    step(model)
    with timeline() as clipping:
        model.clip_grad_norm_(1.0)
    with timeline() as editing, model.summon_full_params():
        pass
    return clipping.events, editing.lines("all-reduce")


def test_what_ranks_agree_on_about_the_whole_model_is_recorded_under_the_call():
    for (norm,), editing in run_ranks(2, whole_model_calls):
        assert (norm.unit, norm.operation, norm.group) == (
            "clip_grad_norm_()",
            "all-reduce",
            (0, 1),
        )
        assert (norm.bytes_on_wire, norm.dtype) == (8, torch.float64)
        assert editing == ["all-reduce summon_full_params()"]


# Drawn


def at(moment: int, unit: str, operation: str, live: int = 0) -> Event:
    group = () if operation in ("unshard", "reshard") else (0, 1)
    return Event(unit, "forward", operation, 0, group, torch.float32, live, moment * 1000)


def spans(recorded: Timeline) -> list[tuple[str, str, float, float]]:
    """Return name, lane, beginning and duration of what took time."""
    drawn = recorded.chrome_trace()["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in drawn if e["name"] == "thread_name"}
    return [(e["name"], lanes[e["tid"]], e["ts"], e["dur"]) for e in drawn if e["ph"] == "X"]


def moments(recorded: Timeline) -> list[tuple[str, float]]:
    drawn = recorded.chrome_trace()["traceEvents"]
    return [(e["name"], e["ts"]) for e in drawn if e["ph"] == "i"]


def test_a_gather_lasts_until_the_unit_is_whole_and_that_until_it_is_resharded():
    recorded = Timeline(
        [
            at(1, "root", "all-gather"),
            at(2, "a", "all-gather"),
            at(3, "a", "all-gather"),  # of the unit's second flat parameter
            at(4, "root", "unshard"),
            at(5, "a", "unshard"),
            at(9, "a", "reshard"),
        ],
        [Wait("a", "all-gather", 4200, 4700)],
    )
    assert spans(recorded) == [
        ("all-gather", "root: parameters", 1.0, 3.0),
        ("all-gather", "a: parameters", 2.0, 3.0),
        ("all-gather", "a: parameters", 3.0, 2.0),
        ("unsharded", "root: parameters", 4.0, 5.0),  # still whole when the recording ends
        ("wait for all-gather", "a: parameters", 4.2, 0.5),
        ("unsharded", "a: parameters", 5.0, 4.0),
    ]
    assert moments(recorded) == []


def test_a_gather_that_nobody_needed_lasts_until_the_unit_is_resharded():
    assert spans(Timeline([at(1, "a", "all-gather"), at(3, "a", "reshard")])) == [
        ("all-gather", "a: parameters", 1.0, 2.0)
    ]


def test_of_a_collective_whose_end_is_unknown_the_moment_of_issue_is_drawn():
    recorded = Timeline(
        [
            at(1, "a", "unshard"),
            at(2, "a", "all-gather"),  # summon_full_params wants another dtype
            at(3, "a", "reduce-scatter"),
            at(4, "a", "all-reduce"),
            at(5, "a", "reshard"),
        ]
    )
    assert spans(recorded) == [("unsharded", "a: parameters", 1.0, 4.0)]
    assert moments(recorded) == [
        ("all-gather issued", 2.0),
        ("reduce-scatter issued", 3.0),
        ("all-reduce issued", 4.0),
    ]


def test_a_reduction_lasts_until_its_wait_is_over_and_overlapping_ones_get_lanes_of_their_own():
    recorded = Timeline(
        [at(1, "a", "reduce-scatter"), at(2, "a", "reduce-scatter"), at(3, "a", "reduce-scatter")],
        [
            Wait("a", "reduce-scatter", 500, 1500),  # issued before the recording began
            Wait("a", "reduce-scatter", 4000, 5000),
            Wait("a", "reduce-scatter", 5000, 6000),
        ],
    )
    assert spans(recorded) == [
        ("wait for reduce-scatter", "a: gradients", 0.5, 1.0),
        ("reduce-scatter", "a: gradients (2)", 1.0, 4.0),
        ("reduce-scatter", "a: gradients", 2.0, 4.0),
        ("wait for reduce-scatter", "a: gradients", 4.0, 1.0),
        ("wait for reduce-scatter", "a: gradients", 5.0, 1.0),
    ]
    assert moments(recorded) == [("reduce-scatter issued", 3.0)]  # not waited for yet


def test_the_counter_follows_the_bytes_in_memory():
    recorded = Timeline([at(1, "a", "unshard", 40), at(2, "a", "reshard", 8)])
    drawn = recorded.chrome_trace()["traceEvents"]
    counted = [(e["ts"], e["args"]["bytes"]) for e in drawn if e["ph"] == "C"]
    assert counted == [(1.0, 40), (2.0, 8)]


KEYS = {"ph": str, "name": str, "pid": int, "tid": int, "ts": int | float}
ALSO = {"X": {"dur", "args"}, "i": {"s"}, "C": {"args"}, "M": {"args"}}


def assert_a_valid_trace(written: str) -> list[dict]:
    """Check what the trace event format demands; return the events."""
    drawn = json.loads(written)["traceEvents"]
    for one in drawn:
        for key, kind in KEYS.items():
            assert isinstance(one[key], kind), one
        assert ALSO[one["ph"]] <= set(one), one
    lanes = {one["tid"] for one in drawn if one["name"] == "thread_name"}
    for lane in lanes:  # within a lane spans may only lie inside each other or side by side
        inside = []
        for one in [e for e in drawn if e["ph"] == "X" and e["tid"] == lane]:
            start, stop = one["ts"], one["ts"] + one["dur"]
            assert one["dur"] >= 0
            inside = [end for end in inside if end > start + 1e-3]
            assert all(stop <= end + 1e-3 for end in inside), one
            inside.append(stop)
    assert lanes >= {one["tid"] for one in drawn if one["ph"] in "Xi"}
    return drawn


def a_recorded_step(folder):
    model = nested(Stack().double())
    with timeline() as recorded:
        step(model)
    path = Path(folder) / f"{torch.distributed.get_rank()}.json"
    recorded.save_chrome_trace(path)
    drawn = assert_a_valid_trace(path.read_text())
    return [(e["name"], e["ts"], e["pid"]) for e in drawn if e["ph"] == "X"], recorded


def test_a_step_is_drawn_as_a_valid_trace(tmp_path):
    for rank, (drawn, recorded) in enumerate(run_ranks(2, a_recorded_step, tmp_path)):
        names = [name for name, _, _ in drawn]
        assert names.count("all-gather") == names.count("unsharded") == 7
        assert {pid for _, _, pid in drawn} == {rank}
        times = [event.time_ns for event in recorded.events]
        assert times == sorted(times)
        assert min(start for _, start, _ in drawn) == times[0] / 1000
        waits = [(wait.operation, wait.unit) for wait in recorded.waits]
        assert waits.count(("all-gather", "layers.1")) == 2


class Branching(torch.nn.Module):
    """Runs its layers in whatever order it is told."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x, order):
        for index in order:
            x = self.layers[index](x)
        return x


def a_forward_that_takes_another_way():
    policy = fsdp_ref.ModuleWrapPolicy({torch.nn.Linear})
    model = fsdp_ref.FullyShardedDataParallel(
        Branching(), auto_wrap_policy=policy, forward_prefetch=True
    )
    with torch.no_grad():
        model(torch.ones(1, 4), (0, 1, 2))
        with timeline() as recorded:
            model(torch.ones(1, 4), (0, 2))  # gathers 1 ahead, and 2 because it is needed
    assert_a_valid_trace(json.dumps(recorded.chrome_trace()))
    return recorded


def test_waiting_for_a_gather_in_vain_is_recorded_too():
    recorded = run_ranks(2, a_forward_that_takes_another_way)[0]
    about_1 = [event.operation for event in recorded.events if event.unit == "layers.1"]
    assert about_1 == ["all-gather", "reshard"]
    assert [wait.unit for wait in recorded.waits].count("layers.1") == 1
    assert ("all-gather", "layers.1: parameters") in [span[:2] for span in spans(recorded)]


def test_crossing_spans_in_one_lane_would_be_found():
    drawn = Timeline([at(1, "a", "all-gather"), at(5, "a", "unshard")]).chrome_trace()
    drawn["traceEvents"].append({**drawn["traceEvents"][-3], "ts": 2.0, "dur": 99.0})
    with pytest.raises(AssertionError):
        assert_a_valid_trace(json.dumps(drawn))
