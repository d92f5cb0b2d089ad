"""Initialise after sharding: the trap, and the way out of it.

Random numbers drawn with one seed are the same on every rank. Before sharding that is what you
want; after it, every rank fills its own shard with the same numbers, and the matrix is one block
repeated four times. The first forward notices. Inside `summon_full_params` every rank writes the
whole matrix, so nothing repeats.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 initialise_after_sharding.py

Expected output:

    initialised after sharding: 1,024 distinct values, matrix rank 16
    the first forward raises FSDP207 IdenticalShardsError
    initialised inside summon_full_params: 4,096 distinct values, matrix rank 64
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel
from fsdp_ref.errors import IdenticalShardsError


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

sharded = FullyShardedDataParallel(nn.Linear(64, 64, bias=False).to(device))
initialise(next(sharded.parameters()))  # this rank's shard, with the numbers of every other shard
with sharded.summon_full_params():
    show("initialised after sharding", sharded.module.weight)
try:
    sharded(torch.ones(1, 64, device=device))
except IdenticalShardsError as error:
    if dist.get_rank() == 0:
        print(f"the first forward raises {error.code} {type(error).__name__}")

with sharded.summon_full_params():
    initialise(sharded.module.weight)  # the whole (64, 64) matrix, the same on every rank
with sharded.summon_full_params():
    show("initialised inside summon_full_params", sharded.module.weight)
dist.destroy_process_group()
# --8<-- [end:body]
