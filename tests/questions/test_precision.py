"""Dtypes of parameters, inputs, buffers and gradients, and scalers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from fsdp_ref import FullyShardedDataParallel as FSDP
from tests.parity.training import full_weights
from tests.questions.claims import (
    loss,
    on_ranks,
)
from tests.toy import (
    WIDTH,
    mean_square,
    my_part,
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
