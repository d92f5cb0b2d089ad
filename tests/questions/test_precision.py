"""Dtypes of parameters, inputs, buffers and gradients, and scalers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

from fsdp_ref import FullyShardedDataParallel as FSDP
from tests.models import Scale
from tests.parity.training import full_weights, gathered
from tests.questions.claims import (
    SGD,
    backward_beside,
    loss,
    on_ranks,
    train,
)
from tests.toy import (
    WIDTH,
    assert_equal_gradients,
    assert_near,
    mean_square,
    my_part,
    nested,
    one_unit,
    seeded,
    whole_batch,
)


# pytorch/pytorch#75478, facebookresearch/fairscale#442
@on_ranks(2)
def test_batch_norm_in_a_unit_of_its_own_keeps_full_precision_statistics():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(WIDTH)
    low = {"param_dtype": torch.bfloat16, "cast_forward_inputs": True}
    full = {"param_dtype": torch.float32, "cast_forward_inputs": True}
    parts = [nn.Linear(WIDTH, WIDTH), FSDP(norm, mixed_precision=full)]
    parts += [FSDP(nn.Linear(WIDTH, 2), mixed_precision=low)]
    model = FSDP(nn.Sequential(*parts), mixed_precision=low)
    seen = []
    norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    loss(model.float()).backward()
    assert norm.running_mean.dtype == torch.float32
    assert norm.num_batches_tracked.dtype == torch.int64
    torch.testing.assert_close(norm.running_mean, 0.1 * seen[0].float().mean(0))


# pytorch/pytorch#115710
@on_ranks(2)
def test_with_torchs_sharded_scaler_all_ranks_skip_a_step_or_none():
    model = one_unit(seeded().float())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    before = full_weights(model)
    scaler.scale(mean_square(model(my_part(whole_batch()).float()))).backward()
    if dist.get_rank() == 0:
        next(model.parameters()).grad[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    after = full_weights(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


class Probe(nn.Module):
    """Notes the dtypes of what it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)
        self.register_buffer("table", torch.ones(2))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, time: Tensor, index: Tensor) -> Tensor:
        weight = self.linear.weight
        seen = {"x": x, "time": time, "index": index, "table": self.table, "weight": weight}
        self.seen = {name: value.dtype for name, value in seen.items()}
        return self.linear(x.to(weight.dtype))


def dtypes_seen(**precision: Any) -> list[torch.dtype]:
    low = {"param_dtype": torch.bfloat16, **precision}
    model = FSDP(Probe(), mixed_precision=low)
    model(whole_batch().float(), torch.ones(1), torch.ones(1, dtype=torch.int64))
    return list(model.seen.values())


LOW, FULL, INT = torch.bfloat16, torch.float32, torch.int64


# pytorch/torchtitan#2881
@on_ranks(2)
def test_floating_inputs_are_cast_also_on_the_side_unless_casting_is_switched_off():
    assert dtypes_seen() == [LOW, LOW, INT, FULL, LOW]
    assert dtypes_seen(buffer_dtype=LOW) == [LOW, LOW, INT, LOW, LOW]
    assert dtypes_seen(cast_root_forward_inputs=False) == [FULL, FULL, INT, FULL, LOW]


# pytorch/pytorch#146114
@on_ranks(2)
def test_buffers_keep_their_dtype_unless_given_another_and_fully_shard_never_casts_them():
    model = FSDP(Probe(), mixed_precision={"param_dtype": LOW, "buffer_dtype": LOW})
    inputs = whole_batch().float(), torch.ones(1), torch.ones(1, dtype=torch.int64)
    model(*inputs)
    assert model.seen["table"] == LOW
    assert model.state_dict()["table"].dtype == FULL
    policy = MixedPrecisionPolicy(param_dtype=LOW)
    other = fully_shard(Probe(), mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    other(*inputs)
    assert (other.seen["table"], other.seen["x"]) == (FULL, LOW)


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).float().softmax(-1)


# pytorch/pytorch#105348
@on_ranks(2)
def test_a_step_in_full_precision_inside_a_low_precision_unit_stays_so_and_autocast_composes():
    plain, x = seeded(Scores).float(), whole_batch().float()
    weight, bias = plain.linear.weight.to(LOW), plain.linear.bias.to(LOW)
    by_hand = nn.functional.linear(x.to(LOW), weight, bias).float().softmax(-1)
    model = FSDP(seeded(Scores).float(), mixed_precision={"param_dtype": LOW})
    assert torch.equal(model(x), by_hand)
    with torch.autocast("cpu", LOW):
        assert torch.equal(model(x), by_hand)
        assert torch.equal(FSDP(seeded(Scores).float())(x), plain(x))
        assert torch.equal(plain(x), by_hand)


# pytorch/pytorch#99174
@on_ranks(4)
def test_a_scaler_works_on_ranks_that_own_no_element():
    plain, model = Scale(), FSDP(Scale())
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = whole_batch().float()
    scaler.scale(mean_square(model(my_part(x)))).backward()
    scaler.step(optimizer)
    scaler.update()
    mean_square(plain(x)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(full_weights(model)["factor"], plain.factor.detach())


def losses_of_five_steps(model: nn.Module, autocast: bool) -> Tensor:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", LOW, enabled=autocast):
            value = mean_square(model(my_part(whole_batch().float())))
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return torch.stack(losses)


# pytorch/pytorch#102731
@on_ranks(2)
def test_autocast_trains_a_sharded_model_like_a_replicated_one():
    for autocast, tolerance in ((False, 1e-6), (True, 1e-2)):
        replicated = DistributedDataParallel(seeded().float())
        expected = losses_of_five_steps(replicated, autocast)
        found = losses_of_five_steps(nested(seeded().float()), autocast)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)


# huggingface/trl#1723
@on_ranks(2)
def test_a_unit_may_hold_parameters_of_several_dtypes():
    plain, model = seeded(), seeded()
    for part in (plain, model):
        part.head.to(FULL)
        part.head.register_forward_pre_hook(lambda module, inputs: inputs[0].to(FULL))
    model = FSDP(model)
    assert {p.dtype for p in model.parameters()} == {torch.float64, FULL}
    train(SGD, plain, model)
    weights = full_weights(model)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-6, atol=1e-6)


# pytorch/pytorch#112746
@on_ranks(2)
def test_low_precision_gradients_are_shown_exactly_and_stay_what_they_are():
    keep = MixedPrecision(param_dtype=LOW, keep_low_precision_grads=True)
    model = FSDP(seeded().float(), mixed_precision=keep)
    mean_square(model(my_part(whole_batch().float()))).backward()
    (flat_param,) = model.parameters()
    joined = gathered(flat_param, flat_param.grad)
    with model.summon_full_params(with_grads=True):
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.equal(found, joined[: found.numel()].float())
    assert (found.dtype, flat_param.grad.dtype) == (FULL, LOW)


# ---------------------------------------------------------------- batch norm over all ranks


class SumOverRanks(torch.autograd.Function):
    """An all-reduce whose backward is one, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return SumOverRanks.apply(gradient)


class GlobalBatchNorm(nn.BatchNorm1d):
    """Batch norm with the statistics of all ranks' batches, for equal numbers of rows."""

    def forward(self, x: Tensor) -> Tensor:
        mean = SumOverRanks.apply(x.mean(0)) / dist.get_world_size()
        var = SumOverRanks.apply((x - mean).square().mean(0)) / dist.get_world_size()
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


# facebookresearch/fairscale#527
@on_ranks(2)
def test_statistics_of_the_whole_batch_can_be_computed_by_hand_inside_a_unit():
    def build(norm: type[nn.Module]) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.Linear(WIDTH, 2))

    plain = seeded(lambda: build(nn.BatchNorm1d))
    model = FSDP(seeded(lambda: build(GlobalBatchNorm)))
    assert_near(model(my_part(whole_batch())), my_part(plain(whole_batch())), "output")
    backward_beside(plain, model)
    assert_equal_gradients(model, plain)
