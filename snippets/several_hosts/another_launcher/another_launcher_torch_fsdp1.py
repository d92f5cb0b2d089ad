"""Say how many ranks a host has, when the launcher does not.

Why: `'node'` and `'local_rank_across_nodes'` read LOCAL_WORLD_SIZE, and so does a hybrid strategy
without groups of its own. `torchrun` sets it. `mpirun`, `srun` or your own `spawn` may not, and a
guess would be a wrong group on every rank. Set the variable, or name groups with a number.

torch's FSDP1 counts the devices that this process sees. Where that is one, because each process was
given its own GPU or because it is on the CPU, a hybrid strategy under a policy takes every rank for
a host: nothing is cut, and in torch 2.13 nothing is averaged either.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 another_launcher_torch_fsdp1.py

Expected output:

    cut among ranks [0]
    after a step, weights equal rank 0's: True False False False
"""

# --8<-- [start:body]
import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

os.environ.pop("LOCAL_WORLD_SIZE")  # as if something else had started this process
warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()
cpu = torch.device("cpu")  # in place of `device`: what it counts on the CPU is one device

torch.manual_seed(0)
model = FullyShardedDataParallel(
    nn.Sequential(nn.Linear(4, 4)),
    auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    device_id=cpu,
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.full((2, 4), rank + 1.0)).sum().backward()
optimizer.step()

weights = [None] * world_size
with FullyShardedDataParallel.summon_full_params(model):
    dist.all_gather_object(weights, next(model.parameters()).detach().clone())
if rank == 0:
    layer = model.module[0]
    print("cut among ranks", dist.get_process_group_ranks(layer.process_group))
    equal = [torch.equal(weights[0], other) for other in weights]
    print("after a step, weights equal rank 0's:", *equal)

dist.destroy_process_group()
# --8<-- [end:body]
