"""Initialise after `fully_shard`: wrong on a CPU mesh, and the way round it.

A `DTensor` knows its whole shape, so initialising it after sharding looks safe. On a CPU mesh it
is not: each rank draws its own shard, one seed gives four equal blocks, and only a general
warning about random operations appears. Initialise before sharding instead.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 initialise_after_sharding_torch_fsdp2.py

Expected output:

    initialised after sharding: 1,024 distinct values, matrix rank 16
    initialised before sharding: 4,096 distinct values, matrix rank 64
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def show(title, weight):
    """Print how many values are distinct, and the rank of the matrix (64 when it is healthy)."""
    distinct, matrix_rank = weight.unique().numel(), torch.linalg.matrix_rank(weight).item()
    if dist.get_rank() == 0:
        print(f"{title}: {distinct:,} distinct values, matrix rank {matrix_rank}")


dist.init_process_group()  # gloo on CPU, NCCL on GPUs
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
cpu_mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # the trap is one of CPU meshes

after = fully_shard(nn.Linear(64, 64, bias=False), mesh=cpu_mesh)
torch.manual_seed(5)
after.reset_parameters()
show("initialised after sharding", after.weight.full_tensor())

before = nn.Linear(64, 64, bias=False)
torch.manual_seed(5)
before.reset_parameters()
fully_shard(before, mesh=cpu_mesh)
show("initialised before sharding", before.weight.full_tensor())
dist.destroy_process_group()
# --8<-- [end:body]
