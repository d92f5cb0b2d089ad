"""Initialise after sharding with torch's `FullyShardedDataParallel`: the same trap.

The shards are filled with one seed, so all are alike and the weight is one block repeated four
times. Nothing warns. Inside `summon_full_params` the whole matrix is written.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 initialise_after_sharding_torch_fsdp1.py

Expected output:

    initialised after sharding: 1,024 distinct values, matrix rank 16
    initialised inside summon_full_params: 4,096 distinct values, matrix rank 64
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


@torch.no_grad()
def initialise(parameter):
    """The same seed on every rank, drawn on the CPU."""
    torch.manual_seed(5)
    parameter.copy_(torch.rand(parameter.shape) - 0.5)


def show(title, weight):
    """Print how many values are distinct, and the rank of the matrix (64 when it is healthy)."""
    distinct, matrix_rank = weight.unique().numel(), torch.linalg.matrix_rank(weight).item()
    if dist.get_rank() == 0:
        print(f"{title}: {distinct:,} distinct values, matrix rank {matrix_rank}")


dist.init_process_group()  # gloo on CPU, NCCL on GPUs
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)

sharded = FullyShardedDataParallel(nn.Linear(64, 64, bias=False), device_id=device)
initialise(next(sharded.parameters()))  # this rank's shard, with the numbers of every other shard
with FullyShardedDataParallel.summon_full_params(sharded):
    show("initialised after sharding", sharded.module.weight)

with FullyShardedDataParallel.summon_full_params(sharded):
    initialise(sharded.module.weight)  # the whole (64, 64) matrix, the same on every rank
with FullyShardedDataParallel.summon_full_params(sharded):
    show("initialised inside summon_full_params", sharded.module.weight)
dist.destroy_process_group()
# --8<-- [end:body]
