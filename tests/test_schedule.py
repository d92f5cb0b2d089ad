"""What happens in which order, and what is in memory meanwhile: read from recorded timelines."""

import copy

import pytest
import torch
from torch import nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ModuleWrapPolicy, Timeline, timeline
from tests.ranks import run_ranks
from tests.toy import WIDTH, Stack, mean_square, my_part, nested, seeded, whole_batch

LAYER_NUMEL = WIDTH * WIDTH + 2 * WIDTH  # 35, padded to 36 on two and three ranks
ROOT_NUMEL = 2 * WIDTH + 2  # 12


def step_of(model: nn.Module) -> Timeline:
    with timeline() as recorded:
        mean_square(model(my_part(whole_batch()))).backward()
    return recorded


def two_steps(depth: int = 3, **arguments) -> list[Timeline]:
    torch.manual_seed(0)
    model = nested(Stack(depth).double(), **arguments)
    return [step_of(model), step_of(model)]


FORWARD = [
    *("all-gather root", "unshard root"),
    *("all-gather layers.0", "unshard layers.0", "reshard layers.0"),
    *("all-gather layers.1", "unshard layers.1", "reshard layers.1"),
    *("all-gather layers.2", "unshard layers.2", "reshard layers.2"),
]
BACKWARD = {  # the next unit is gathered before this one computes, after it, or not ahead
    "BACKWARD_PRE": [
        *("all-gather layers.2", "unshard layers.2", "all-gather layers.1"),
        *("reshard layers.2", "reduce-scatter layers.2"),
        *("unshard layers.1", "all-gather layers.0"),
        *("reshard layers.1", "reduce-scatter layers.1"),
        *("unshard layers.0", "reshard layers.0", "reduce-scatter layers.0"),
    ],
    "BACKWARD_POST": [
        *("all-gather layers.2", "unshard layers.2"),
        *("reshard layers.2", "all-gather layers.1", "reduce-scatter layers.2"),
        *("unshard layers.1", "reshard layers.1"),
        *("all-gather layers.0", "reduce-scatter layers.1"),
        *("unshard layers.0", "reshard layers.0", "reduce-scatter layers.0"),
    ],
    None: [
        *("all-gather layers.2", "unshard layers.2"),
        *("reshard layers.2", "reduce-scatter layers.2"),
        *("all-gather layers.1", "unshard layers.1"),
        *("reshard layers.1", "reduce-scatter layers.1"),
        *("all-gather layers.0", "unshard layers.0"),
        *("reshard layers.0", "reduce-scatter layers.0"),
    ],
}
ROOT_LAST = ["reshard root", "reduce-scatter root"]


def steps_with_prefetch() -> dict[str | None, list[Timeline]]:
    return {moment: two_steps(backward_prefetch=moment) for moment in BACKWARD}


def test_a_step_gathers_in_order_and_reduces_in_reverse_and_ahead_when_asked_to():
    for steps in run_ranks(2, steps_with_prefetch):
        for moment, (first, second) in steps.items():
            lines = first.lines("all-gather", "unshard", "reshard", "reduce-scatter")
            assert lines == [*FORWARD, *BACKWARD[moment], *ROOT_LAST], moment
            assert second.lines() == first.lines()


def forward_prefetch() -> tuple[list[str], list[str], list[str]]:
    model = nested(seeded(), forward_prefetch=True)
    first = step_of(model).lines("all-gather", "unshard", "reshard")
    second = step_of(model)
    assert second.peak_unsharded_bytes == 8 * (ROOT_NUMEL + 2 * 36)
    with timeline() as evaluation, torch.no_grad():
        model(my_part(whole_batch()))
    return first[:11], second.lines("all-gather", "unshard", "reshard")[:11], evaluation.lines()


def test_forward_prefetch_gathers_the_unit_that_followed_in_the_forward_before():
    ahead = [
        *("all-gather root", "unshard root", "all-gather layers.0"),
        *("unshard layers.0", "all-gather layers.1", "reshard layers.0"),
        *("unshard layers.1", "all-gather layers.2", "reshard layers.1"),
        *("unshard layers.2", "reshard layers.2"),
    ]
    for first, second, evaluation in run_ranks(2, forward_prefetch):
        assert first == FORWARD
        assert second == ahead
        assert evaluation == [*ahead, "reshard root"]


class Branching(nn.Module):
    """Runs its layers in whatever order it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x, order):
        for index in order:
            x = self.layers[index](x)
        return x


def orders_that_change() -> list[float]:
    torch.manual_seed(0)
    plain = Branching().double()
    model = FSDP(
        copy.deepcopy(plain), forward_prefetch=True, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
    )
    x = torch.randn(2, 4, dtype=torch.float64)
    errors = []
    for order in [(0, 1, 2), (2, 0), (1,), (0, 1, 2), ()]:
        with timeline() as recorded, torch.no_grad():
            errors.append((model(x, order) - plain(x, order)).abs().max().item())
        assert recorded.events[-1].live_unsharded_bytes == 0
    return errors


def test_a_forward_that_takes_another_way_drops_what_was_gathered_in_vain():
    for errors in run_ranks(2, orders_that_change):
        assert max(errors) == 0


def test_a_timeline_says_phase_bytes_group_and_dtype_of_each_event():
    for first, _ in run_ranks(2, two_steps):
        for event in first.events:
            collective = event.operation in ("all-gather", "reduce-scatter", "all-reduce")
            assert (event.bytes_on_wire > 0) == collective
            assert event.group == ((0, 1) if collective else ())
            assert (event.dtype is not None) == collective
        gathers = [e.phase for e in first.events if e.operation == "all-gather"]
        assert gathers == ["forward"] * 4 + ["idle"] * 3  # ahead, for units at rest
        assert {e.dtype for e in first.events if e.operation == "all-gather"} == {torch.float64}
        reductions = [e.phase for e in first.events if e.operation == "reduce-scatter"]
        assert reductions == ["post_backward"] * 4


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_never_more_than_the_root_and_two_units_are_in_memory(depth):
    for recorded in run_ranks(2, two_steps, depth):
        for one in recorded:
            assert one.peak_unsharded_bytes == 8 * (ROOT_NUMEL + min(2, depth) * 36)
            assert one.events[-1].live_unsharded_bytes == 0


def without_prefetch(depth: int) -> list[Timeline]:
    return two_steps(depth, backward_prefetch=None)


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_without_prefetch_it_is_the_root_and_one_unit(depth):
    for recorded in run_ranks(2, without_prefetch, depth):
        for one in recorded:
            assert one.peak_unsharded_bytes == 8 * (ROOT_NUMEL + 36)
            assert one.events[-1].live_unsharded_bytes == 0


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_bytes_follow_the_formula(depth, world_size):
    """Against DDP's ring: a half more for all but the root, which is gathered once only."""
    padded = 36 * depth
    each_way = (world_size - 1) / world_size * 8
    for recorded in run_ranks(world_size, two_steps, depth):
        for one in recorded:
            assert one.bytes_sent("all-gather") == each_way * (2 * padded + ROOT_NUMEL)
            assert one.bytes_sent("reduce-scatter") == each_way * (padded + ROOT_NUMEL)
            weights = one.bytes_sent("all-gather") + one.bytes_sent("reduce-scatter")
            ddp = 2 * each_way * (padded + ROOT_NUMEL)
            root_share = ROOT_NUMEL / (padded + ROOT_NUMEL)
            assert weights / ddp == pytest.approx(1 + 0.5 * (1 - root_share))


def evaluation() -> list[str]:
    model = nested(seeded())
    with timeline() as recorded, torch.no_grad():
        model(my_part(whole_batch()))
    assert recorded.events[-1].live_unsharded_bytes == 0
    return recorded.lines("all-gather", "reshard", "reduce-scatter", "all-reduce")


def test_evaluation_gathers_each_unit_once_and_keeps_none():
    for lines in run_ranks(2, evaluation):
        assert lines == [
            "all-gather root",
            *("all-gather layers.0", "reshard layers.0"),
            *("all-gather layers.1", "reshard layers.1"),
            *("all-gather layers.2", "reshard layers.2"),
            "reshard root",
        ]


def frozen_layers() -> tuple[list[str], list[str]]:
    model = seeded()
    model.layers[0].requires_grad_(False)
    model.layers[1].linear.bias.requires_grad_(False)
    recorded = step_of(nested(model))
    reduced = [e for e in recorded.events if e.operation == "reduce-scatter"]
    sizes = {event.unit: event.bytes_on_wire for event in reduced}
    assert sizes["layers.1"] == 8 * 15  # 30 trainable elements on two ranks
    return recorded.lines("reduce-scatter"), recorded.lines("all-gather")


def test_what_is_frozen_is_gathered_and_never_reduced():
    for reduced, gathered in run_ranks(2, frozen_layers):
        assert reduced == [
            "reduce-scatter layers.2",
            "reduce-scatter layers.1",
            "reduce-scatter root",
        ]
        # The frozen first layer needs no second gather: nothing flows back through it.
        assert gathered.count("all-gather layers.0") == 1
        assert gathered.count("all-gather layers.1") == 4  # two flat parameters, twice


def alone() -> tuple[int, list[str]]:
    recorded = step_of(nested(seeded()))
    return recorded.bytes_sent(), recorded.lines("reduce-scatter")


def test_one_rank_sends_nothing():
    [(sent, lines)] = run_ranks(1, alone)
    assert sent == 0
    assert len(lines) == 4


def nested_timelines() -> tuple[int, int, int]:
    model = nested(seeded())
    with timeline() as outer:
        step_of(model)
        with timeline() as inner:
            mean_square(model(my_part(whole_batch()))).backward()
    before = len(outer.events)
    step_of(model)
    return len(inner.events), before, len(outer.events)


def test_timelines_nest_and_stop_when_closed():
    for inner, outer, later in run_ranks(2, nested_timelines):
        assert outer == 2 * inner
        assert later == outer


def small_groups() -> list[tuple[str, tuple[int, ...]]]:
    model = seeded()
    model.layers[0] = FSDP(model.layers[0], process_group="self")
    model.layers[1] = FSDP(model.layers[1], process_group="set2")
    model.layers[2] = FSDP(model.layers[2], process_group="mod2")
    recorded = step_of(FSDP(model))
    return [(e.unit, e.group) for e in recorded.events if e.operation == "reduce-scatter"]


def test_each_unit_is_reduced_over_its_own_group():
    for rank, groups in enumerate(run_ranks(4, small_groups)):
        assert dict(groups) == {
            "root": (0, 1, 2, 3),
            "layers.0": (rank,),
            "layers.1": (0, 1) if rank < 2 else (2, 3),
            "layers.2": (0, 2) if rank % 2 == 0 else (1, 3),
        }


def changing_shapes() -> list[list[str]]:
    """Other batch sizes, and layers skipped: the order may change from step to step."""

    class Skipping(Stack):
        def forward(self, x, skipped=()):
            for index, layer in enumerate(self.layers):
                if index not in skipped:
                    x = layer(x)
            return self.head(x)

    model, lines = nested(seeded(Skipping)), []
    for skipped in ((), (1,), (0, 2), ()):
        with timeline() as recorded:
            mean_square(model(my_part(whole_batch())[: 3 + len(skipped)], skipped)).backward()
        lines.append(recorded.lines("reduce-scatter"))
    return lines


def test_the_set_of_units_may_change_from_step_to_step():
    for lines in run_ranks(2, changing_shapes):
        assert lines[1] == [f"reduce-scatter {u}" for u in ("layers.2", "layers.0", "root")]
        assert lines[2] == [f"reduce-scatter {u}" for u in ("layers.1", "root")]
        assert lines[3] == lines[0]
