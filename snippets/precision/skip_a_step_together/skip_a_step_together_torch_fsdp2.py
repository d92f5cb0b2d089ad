"""Skip a step on all ranks or on none, when a scaled gradient overflows.

Why: a gradient scaler skips a step whose gradients are not finite, and scales less from then
on. After the reduction the infinity lies in one rank's shard. A scaler that looks at its own
shards only skips there and steps elsewhere, and the scales part ways. Here gradients are
DTensors, and the check for infinities asks all ranks, so the plain scaler is right.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 skip_a_step_together_torch_fsdp2.py

Expected output:

    GradScaler         skipped, scale 2.0; skipped, scale 2.0
    ShardedGradScaler  skipped, scale 2.0; skipped, scale 2.0
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(device.type, (world_size,))
torch.manual_seed(0)


def train(scaler):
    """Take a step whose first gradient is infinite; tell if this rank stepped, and the scale."""
    model = fully_shard(nn.Linear(1, 4, bias=False).to(device), mesh=mesh)
    shard = next(model.parameters()).to_local()
    before = shard.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output = model(torch.ones(1, 1, device=device))[0]
    loss = (output * torch.tensor([3e38, 1.0, 1.0, 1.0], device=device)).sum()
    scaler.scale(loss).backward()  # times the scale the first gradient, on rank 0, is infinite
    scaler.step(optimizer)
    scaler.update()
    return not torch.equal(shard, before), scaler.get_scale()


def report(case, scaler):
    """Print what every rank has done."""
    seen = [None] * world_size
    dist.all_gather_object(seen, train(scaler))
    if rank == 0:
        told = [f"{'stepped' if stepped else 'skipped'}, scale {scale}" for stepped, scale in seen]
        print(f"{case:18} " + "; ".join(told))


report("GradScaler", torch.amp.GradScaler(device.type, init_scale=4.0))
report("ShardedGradScaler", ShardedGradScaler(device.type, init_scale=4.0))

dist.destroy_process_group()
# --8<-- [end:body]
