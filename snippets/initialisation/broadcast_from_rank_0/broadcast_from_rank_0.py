"""Read the weights on one rank, and let the others wait on the meta device.

One rank builds the model and reads a checkpoint. The others build it on meta, where it takes no
memory. With `sync_module_states=True` each unit is sent when it is wrapped, and cut at once;
parameters and buffers, also on the CPU.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 3 broadcast_from_rank_0.py

Expected output:

    bytes before wrapping, rank by rank: 1488, 0, 0
    all ranks have the weights of the checkpoint: True
    all ranks have its running mean: True
"""

# --8<-- [start:body]
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel, ModuleWrapPolicy


def build():
    """Build the plain model."""
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))


def read_checkpoint():
    """Stand in for a file that one rank has read."""
    torch.manual_seed(7)
    values = build().state_dict()
    return {name: torch.rand_like(value.float()).to(value.dtype) for name, value in values.items()}


def everywhere(value):
    """What each rank says."""
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, value)
    return said


dist.init_process_group()  # gloo on CPU, NCCL on GPUs
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

first = dist.get_rank() == 0
with nullcontext() if first else torch.device("meta"):
    model = build()
if first:
    model.load_state_dict(read_checkpoint())
in_memory = everywhere(sum(value.nbytes for value in model.state_dict().values() if first))

model = FullyShardedDataParallel(
    model,
    auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    sync_module_states=True,
    device_id=device,
)

checkpoint, found = read_checkpoint(), model.state_dict()
weights = all(torch.equal(found[name].cpu(), checkpoint[name]) for name in ("0.weight", "2.bias"))
mean = torch.equal(found["1.running_mean"].cpu(), checkpoint["1.running_mean"])
weights, mean = everywhere(weights), everywhere(mean)
if first:
    print(f"bytes before wrapping, rank by rank: {', '.join(map(str, in_memory))}")
    print(f"all ranks have the weights of the checkpoint: {all(weights)}")
    print(f"all ranks have its running mean: {all(mean)}")
dist.destroy_process_group()
# --8<-- [end:body]
