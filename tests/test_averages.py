"""Averages of weights over time, made from shards, are those of the plain model's weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import swa_utils

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import checkpoint, timeline
from tests.parity.product import HYBRID_LISTS
from tests.parity.training import mean_over_ranks
from tests.ranks import run_ranks
from tests.toy import Layer, assert_near, mean_square, my_part, whole_batch

STEPS = 4


class Counting(nn.Module):
    """Residual layers, a tied and a frozen weight, and a buffer that the forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.inner, self.outer = nn.Linear(5, 5), nn.Linear(5, 5)
        self.outer.weight = self.inner.weight
        self.inner.bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("whole_calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.whole_calls += 1
        for layer in self.layers:
            x = layer(x)
        return self.outer(torch.tanh(self.inner(x)))


def plain(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Counting().double()


def sharded(strategy: str, orig: bool, seed: int = 0) -> FSDP:
    groups = HYBRID_LISTS[dist.get_world_size()] if "HYBRID" in strategy else None
    model = plain(seed)
    shared = {"sharding_strategy": strategy, "process_group": groups, "use_orig_params": orig}
    for index, layer in enumerate(model.layers):
        model.layers[index] = FSDP(layer, **shared)
    return FSDP(model, **shared)


def train(model: nn.Module, after_step: Callable[[nn.Module], None], batch: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        mean_square(model(batch * (1 + step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step(model)


class ByHand:
    """A moving average made from what the optimizer sees: shards, or whole weights."""

    def __init__(self, model: nn.Module) -> None:
        self.module = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.25)


def averaged(**arguments: Any) -> Callable[[nn.Module], Any]:
    return lambda model: swa_utils.AveragedModel(model, **arguments)


EMA = {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)}
WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "mean": averaged(),
    "mean, with buffers": averaged(use_buffers=True),
    "moving": averaged(**EMA),
    "moving, with buffers": averaged(**EMA, use_buffers=True),
    "moving, one by one": averaged(avg_fn=swa_utils.get_ema_avg_fn(0.8)),
    "torch's other mean": averaged(multi_avg_fn=swa_utils.get_swa_multi_avg_fn()),
    "by hand": ByHand,
}


def every_average(strategy: str, orig: bool) -> None:
    batch, mine = whole_batch(), my_part(whole_batch())
    expected_model, model = plain(), sharded(strategy, orig)
    expected = {name: way(expected_model) for name, way in WAYS.items()}
    found = {name: way(model) for name, way in WAYS.items()}

    def update_expected(trained: nn.Module) -> None:
        for average in expected.values():
            average.update_parameters(trained)

    def update_found(trained: nn.Module) -> None:
        with timeline() as recorded:
            for average in found.values():
                average.update_parameters(trained)
        assert recorded.events == []  # nothing is sent
        for average in found.values():  # used in between, and never stale afterwards
            with torch.no_grad():
                average.module.eval()(mine)

    train(expected_model, update_expected, batch)
    train(model, update_found, mine)
    for name, average in found.items():
        with torch.no_grad():
            loss = mean_over_ranks(mean_square(average.module(mine)))
            reference = mean_square(expected[name].module.eval()(batch))
        assert_near(torch.tensor(loss, dtype=torch.float64), reference, f"loss of {name}")
        weights = average.module.state_dict()
        truth = expected[name].module.state_dict()
        assert list(weights) == list(truth)
        for key, value in truth.items():
            assert_near(weights[key], value, f"{key} of {name}")
        fresh = plain(seed=7)  # exported: it loads into the plain model
        fresh.load_state_dict(weights)
        assert_near(mean_square(fresh.eval()(batch)).detach(), reference, f"exported {name}")
    moved = found["mean"].module.state_dict()["outer.weight"]
    assert not torch.equal(moved, model.state_dict()["outer.weight"])
    assert len({f["outer.bias"].sum().item() for f in map(weights_of, found.values())}) >= 4


def weights_of(average: Any) -> dict[str, Tensor]:
    return average.module.state_dict()


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_averages_made_from_shards_are_those_of_the_plain_model(world_size, strategy, orig):
    run_ranks(world_size, every_average, strategy, orig)


# ---------------------------------------------------------------- checkpoints


def average_state(average: swa_utils.AveragedModel) -> dict[str, Any]:
    return {"average": checkpoint.get_model_state_dict(average)}


def saves(strategy: str, orig: bool, path: str) -> list[dict[str, Tensor]]:
    """Average, save, and average on."""
    model = sharded(strategy, orig)
    average = swa_utils.AveragedModel(model, **EMA)
    train(model, average.update_parameters, my_part(whole_batch()))
    dcp.save(average_state(average), checkpoint_id=path)
    return [weights_of(average), goes_on(average, strategy, orig)]


def loads(strategy: str, orig: bool, path: str) -> list[dict[str, Tensor]]:
    """Load what was saved, wherever, and average on."""
    average = swa_utils.AveragedModel(sharded(strategy, orig, seed=7), **EMA)
    state = average_state(average)
    dcp.load(state, checkpoint_id=path)
    checkpoint.set_model_state_dict(average, state["average"])
    assert average.n_averaged.item() == STEPS  # otherwise the next update would only copy
    return [weights_of(average), goes_on(average, strategy, orig)]


def goes_on(average: swa_utils.AveragedModel, strategy: str, orig: bool) -> dict[str, Tensor]:
    average.update_parameters(sharded(strategy, orig, seed=3))
    return weights_of(average)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as it says: without ranks
@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
def test_an_average_is_saved_and_goes_on_at_any_number_of_ranks(strategy, orig, tmp_path):
    (saved, expected), *_ = run_ranks(2, saves, strategy, orig, str(tmp_path))
    for world_size in (1, 2, 3):
        for loaded, after in run_ranks(world_size, loads, strategy, orig, str(tmp_path)):
            for name, value in saved.items():
                assert torch.equal(loaded[name], value), name
                assert torch.equal(after[name], expected[name]), name
    # Without ranks, too: the plain model's average reads the same file.
    average = swa_utils.AveragedModel(plain(seed=7), **EMA)
    state = {"average": average.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path), no_dist=True)
    average.load_state_dict(state["average"])
    average.update_parameters(plain(seed=3))
    for name, value in expected.items():
        assert torch.equal(average.module.state_dict()[name], value), name


# ---------------------------------------------------------------- statistics of batch norm


def with_norm(wrap: Callable[[nn.Module], nn.Module] = lambda m: m) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)]
    return wrap(nn.Sequential(*[wrap(layer) for layer in layers])).double()


def statistics(orig: bool) -> None:
    """A rank's loader has its own samples, so its statistics are those of its samples."""
    mine = my_part(whole_batch())
    plain_model = with_norm()
    model = with_norm(lambda m: FSDP(m, use_orig_params=orig) if list(m.parameters()) else m)
    expected, found = swa_utils.AveragedModel(plain_model), swa_utils.AveragedModel(model)
    for step in range(3):  # the same weights for both: batch norm makes training differ
        with torch.no_grad(), model.summon_full_params(model):
            for one in (model, plain_model):
                for number, parameter in enumerate(one.parameters()):
                    parameter.add_(0.1 * number + step)
        expected.update_parameters(plain_model)
        found.update_parameters(model)
    loader = [mine * scale for scale in (1.0, 2.0, 3.0)]
    swa_utils.update_bn(loader, expected)
    swa_utils.update_bn(loader, found)
    assert not torch.equal(found.module.module[1].running_mean, model.module[1].running_mean)
    truth = expected.module.state_dict()
    for name, value in found.module.state_dict().items():
        assert_near(value, truth[name], name)
    assert_near(found.eval()(mine).detach(), expected.eval()(mine).detach(), "output")


@pytest.mark.parametrize("orig", [False, True])
def test_update_bn_computes_the_statistics_of_the_average(orig):
    run_ranks(2, statistics, orig)


# ---------------------------------------------------------------- memory


def bytes_of_an_average() -> None:
    """An average costs each rank as much as its shards, and it is a model of its own."""
    model = sharded("FULL_SHARD", orig=False)
    average = swa_utils.AveragedModel(model)
    ours = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in average.parameters()) == ours
    assert ours < sum(p.numel() for p in plain().parameters())
    before = model.state_dict()
    train(average.module, lambda _: None, my_part(whole_batch()))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_an_average_holds_shards_only_and_leaves_the_model_alone():
    run_ranks(2, bytes_of_an_average)
