"""What a step sends is what arithmetic over the units says, and both add up."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import Event, ModuleWrapPolicy, Timeline, timeline
from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref.ledger import Summary
from tests.ranks import run_ranks
from tests.toy import Layer, Stack, mean_square, my_part, whole_batch

ITEM = 8  # bytes of an element
ROOT, LAYER = 12, 35  # elements of the toy model's head and of each of its three layers
PRECISION = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
PAIRS = ([0, 1], [2, 3])


def my_pair():
    """The pairs (0, 1) and (2, 3) share; their members of equal position copy."""
    rank = dist.get_rank()
    return PAIRS[rank // 2], [rank % 2, rank % 2 + 2]


def frozen_middle():
    """The middle layer is frozen, and between trainable ones."""
    model = Stack().double()
    model.layers[1].requires_grad_(False)
    return model


def frozen_biases():
    """Frozen and trainable parameters in the same units: two flat parameters in each."""
    model = Stack().double()
    for layer in model.layers:
        layer.linear.bias.requires_grad_(False)
    return model


def one_layer_kept(module):
    """Wrap layers; the last one, whose head is next, is kept whole."""
    if isinstance(module, Layer):
        return {"sharding_strategy": "SHARD_GRAD_OP"} if module.kept else True
    return False


def mixed_strategies():
    model = Stack().double()
    for index, layer in enumerate(model.layers):
        layer.kept = index == 2
    return model


def experts(module):
    return {"process_group": "self"} if isinstance(module, Layer) and module.kept else False


CASES = {
    "full shard": {},
    "shard grad op": {"sharding_strategy": "SHARD_GRAD_OP"},
    "no shard": {"sharding_strategy": "NO_SHARD"},
    "no prefetch": {"backward_prefetch": None},
    "mixed precision": {"mixed_precision": PRECISION},
    "one unit": {"auto_wrap_policy": None},
    "original parameters": {"use_orig_params": True},
    "offload": {"cpu_offload": True},
    "frozen middle": {"build": frozen_middle},
    "frozen biases": {"build": frozen_biases},
    "mixed strategies": {"build": mixed_strategies, "auto_wrap_policy": one_layer_kept},
    "experts": {"build": mixed_strategies, "auto_wrap_policy": experts},
}
HYBRID = {
    "hybrid": {"sharding_strategy": "HYBRID_SHARD", "process_group": my_pair},
    "hybrid, kept": {"sharding_strategy": "_HYBRID_SHARD_ZERO2", "process_group": my_pair},
}


def build(arguments) -> FSDP:
    arguments = {"auto_wrap_policy": ModuleWrapPolicy({Layer}), **arguments}
    model = arguments.pop("build", lambda: Stack().double())()
    if callable(group := arguments.get("process_group")):
        arguments["process_group"] = group()
    return FSDP(model, **arguments)


def step(model):
    mean_square(model(my_part(whole_batch()))).backward()


def summaries(cases) -> dict[str, tuple[Summary, Summary]]:
    """Run one step, and then three of which two are inside no_sync, for each case."""
    found = {}
    for name, arguments in cases.items():
        torch.manual_seed(0)
        model = build(arguments)
        with timeline() as one:
            step(model)
        with timeline() as three:
            with model.no_sync():
                step(model)
                step(model)
            step(model)
        found[name] = one.summary(model), three.summary(model, no_sync_steps=2)
    return found


@functools.cache
def all_summaries(world_size: int) -> list[dict[str, tuple[Summary, Summary]]]:
    return run_ranks(world_size, summaries, CASES | HYBRID if world_size == 4 else CASES)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_unit_sends_what_is_predicted_no_more_and_no_less(world_size):
    for found in all_summaries(world_size):
        for name, (one, three) in found.items():
            assert one.differences == (), f"{name}\n{one}"
            assert three.differences == (), f"{name}, three steps\n{three}"
            assert all(entry.expected_count for entry in one.entries), name
            assert (one.bytes_sent > 0) == (world_size > 1)


def shard(numel, world_size):
    return -(-numel // world_size)


def by_hand(one: Summary) -> tuple[dict[str, int], int]:
    """Return bytes by operation, and those of the agreement."""
    return one.bytes_by_operation, sum(e.bytes_sent for e in one.entries if e.is_agreement)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_prediction_agrees_with_a_calculation_by_hand(world_size):
    found = all_summaries(world_size)[0]
    others = world_size - 1
    root, layer = shard(ROOT, world_size), shard(LAYER, world_size)
    agreement = 2 * others * (2 + 4) * 8 // world_size  # two numbers, and one of each unit

    full = {
        "all-gather": others * (root + 3 * 2 * layer) * ITEM,
        "reduce-scatter": others * (root + 3 * layer) * ITEM,
    }
    assert by_hand(found["full shard"][0]) == (full, agreement)
    assert by_hand(found["offload"][0]) == (full, agreement)
    kept = {"all-gather": others * (root + 3 * layer) * ITEM}
    assert found["shard grad op"][0].bytes_by_operation == full | kept
    again = {"all-gather": others * (root + (2 + 2 + 1) * layer) * ITEM}
    assert found["mixed strategies"][0].bytes_by_operation == full | again
    narrow = {
        "all-gather": others * (root + 3 * 2 * layer) * 2,
        "reduce-scatter": others * (root + 3 * layer) * 4,
    }
    assert found["mixed precision"][0].bytes_by_operation == narrow
    frozen = {"reduce-scatter": others * (root + 2 * layer) * ITEM}
    assert found["frozen middle"][0].bytes_by_operation == full | frozen
    copied = [2 * others * numel * ITEM // world_size for numel in (ROOT, LAYER, LAYER, LAYER)]
    assert found["no shard"][0].bytes_by_operation == {
        "all-gather": 0,
        "reduce-scatter": 0,
        "all-reduce": sum(copied),
    }
    for name in ("full shard", "no shard"):
        one, three = (summary.bytes_by_operation for summary in found[name])
        reductions = {name: sent for name, sent in one.items() if name != "all-gather"}
        assert three == {"all-gather": 3 * one["all-gather"]} | reductions


def test_hybrid_strategies_are_predicted_level_by_level():
    (one, _), (kept, _) = (all_summaries(4)[0][name] for name in HYBRID)
    root, layer = shard(ROOT, 2), shard(LAYER, 2)  # within a pair
    levels = {(entry.operation, entry.ranks) for entry in one.entries if not entry.is_agreement}
    assert levels == {("all-gather", (0, 1)), ("reduce-scatter", (0, 1)), ("all-reduce", (0, 2))}
    assert one.bytes_by_operation == {
        "all-gather": (root + 3 * 2 * layer) * ITEM,
        "reduce-scatter": (root + 3 * layer) * ITEM,
        "all-reduce": (root + 3 * layer) * ITEM,  # a ring of two sends all of it once
    }
    assert kept.bytes_by_operation == one.bytes_by_operation | {
        "all-gather": (root + 3 * layer) * ITEM
    }


def ratios(units: int, root_numel: int, strategy: str) -> tuple[float, int]:
    """Train a model that needs no padding; return what it sends against DDP, and DDP's bytes."""
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(units)))
    model.append(nn.Linear(6, root_numel // 6, bias=False))
    for index in range(units):
        model[index] = FSDP(model[index], sharding_strategy=strategy)
    model = FSDP(model, sharding_strategy=strategy)
    with timeline() as recorded:
        model(torch.ones(1, 6)).sum().backward()
    summary = recorded.summary(model)
    return summary.ratio_to_ddp, summary.ddp_bytes


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("units", "root_numel"), [(1, 12), (4, 36), (2, 72)])
def test_full_sharding_sends_half_as_much_again_for_all_but_the_root(world_size, units, root_numel):
    ratio, ddp = run_ranks(world_size, ratios, units, root_numel, "FULL_SHARD")[0]
    numel = units * 36 + root_numel
    assert ddp == 2 * (world_size - 1) * numel * 4 // world_size
    assert ratio == pytest.approx(1 + 0.5 * (1 - root_numel / numel), rel=1e-12)


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_what_is_gathered_once_or_never_sends_as_much_as_ddp(strategy):
    assert run_ranks(3, ratios, 2, 36, strategy)[0][0] == 1.0


def surprises() -> list[tuple[str, int, int]]:
    model = build({})
    with timeline() as recorded:
        step(model)
        with torch.no_grad():
            model(my_part(whole_batch()))  # an evaluation that was not asked about
    summary = recorded.summary(model)
    assert "differs" in str(summary)
    return [(e.unit, e.count, e.expected_count) for e in summary.differences]


def test_what_was_not_part_of_the_steps_shows_as_a_difference():
    assert run_ranks(2, surprises)[0] == [
        ("root", 2, 1),
        ("layers.0", 3, 2),
        ("layers.1", 3, 2),
        ("layers.2", 3, 2),
    ]


def a_step_with_clipping() -> tuple[Summary, Summary]:
    model = build({"sharding_strategy": "NO_SHARD"})
    with timeline() as recorded:
        step(model)
    without = recorded.summary(model)
    with timeline() as recorded:
        step(model)
        model.clip_grad_norm_(1.0)
    return without, recorded.summary(model)


def test_clipping_is_listed_apart_and_was_not_to_be_expected():
    without, clipped = run_ranks(2, a_step_with_clipping)[0]
    assert clipped.differences == ()
    assert clipped.bytes_by_unit == without.bytes_by_unit
    assert [entry.unit for entry in clipped.entries if entry.expected_bytes is None] == (
        ["clip_grad_norm_()"] * 2  # over the shard group of one rank, and over the copies
    )


def never_ran() -> list[tuple[int, int]]:
    model = build({})
    return [(e.count, e.expected_count) for e in Timeline().summary(model).entries]


def test_what_was_expected_and_never_came_is_listed_too():
    expected = [1, 1, 1, *(3 * [2, 1])]  # agreement, gather and reduction of the root; the layers
    assert run_ranks(2, never_ran)[0] == [(0, count) for count in expected]


RECORDED = Timeline(
    [
        Event("root", "forward", "all-gather", 1000, (0, 1), torch.float32, 4000),
        Event("root", "forward", "unshard", 0, (), None, 5000),
        Event("a", "forward", "all-gather", 20, (0, 1), torch.float32, 0),
        Event("root", "idle", "all-gather", 1000, (0, 1), torch.float32, 0),
        Event("root", "idle", "reduce-scatter", 300, (0, 1), torch.float32, 0),
        Event("root", "idle", "all-reduce", 16, (0, 1), torch.int64, 0),
        Event("clip_grad_norm_()", "idle", "all-reduce", 4, (0, 1), torch.float32, 0),
    ]
)


def test_without_a_model_it_adds_up_and_expects_nothing():
    summary = RECORDED.summary()
    assert str(summary) == "\n".join(
        [
            "unit               operation       ranks  dtype    count  bytes sent  expected",
            "root               all-gather      0-1    float32      2       2,000         -",
            "root               reduce-scatter  0-1    float32      1         300         -",
            "a                  all-gather      0-1    float32      1          20         -",
            "all units          all-gather                          3       2,020         -",
            "all units          reduce-scatter                      1         300         -",
            "all units          all of these                        4       2,320         -",
            "end of backward    all-reduce      0-1    int64        1          16         -",
            "clip_grad_norm_()  all-reduce      0-1    float32      1           4         -",
            "full parameters in memory: at most 5,000 bytes",
        ]
    )
    assert summary.bytes_sent == 2320
    assert summary.bytes_by_unit == {"root": 2300, "a": 20}
    assert summary.bytes_by_operation == {"all-gather": 2020, "reduce-scatter": 300}
    assert summary.peak_unsharded_bytes == RECORDED.peak_unsharded_bytes == 5000
    assert (summary.ddp_bytes, summary.ratio_to_ddp, summary.differences) == (None, None, ())


def test_an_empty_timeline_is_an_empty_summary():
    summary = Timeline().summary()
    assert summary.entries == ()
    assert summary.bytes_sent == 0
    assert "all of these" in str(summary)
