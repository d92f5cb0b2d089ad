"""Read the weights on one rank, with torch's `FullyShardedDataParallel`: not on a CPU.

Torch sends with the backend's broadcast, and takes it for granted that this needs a GPU. On one it
works, if the ranks on meta say in `param_init_fn` that they want memory and no values.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 3 broadcast_from_rank_0_torch_fsdp1.py

Expected output:

    bytes before wrapping, rank by rank: 1488, 0, 0
    ValueError: The module has CPU parameters or buffers when `sync_module_states=True`
"""

# --8<-- [start:body]
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


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

cpu = torch.device("cpu")  # the refusal is one of CPUs; on `device` it works if that is a GPU
try:
    FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        sync_module_states=True,
        param_init_fn=lambda module: module.to_empty(device=cpu, recurse=False),
        device_id=cpu,
    )
except ValueError as error:
    said = str(error)
if first:
    print(f"bytes before wrapping, rank by rank: {', '.join(map(str, in_memory))}")
    print(f"ValueError: {said.split(',')[0]}")
dist.destroy_process_group()
# --8<-- [end:body]
