"""Read the weights on one rank, and send them after `fully_shard`.

`fully_shard` has no argument for it. All ranks shard on meta and ask for memory; then one rank's
full state dict is sent and cut, parameters and buffers, also on the CPU.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 3 broadcast_from_rank_0_torch_fsdp2.py

Expected output:

    bytes before wrapping, rank by rank: 1488, 0, 0
    all ranks have the weights of the checkpoint: True
    all ranks have its running mean: True
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


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

mesh = init_device_mesh(device.type, (dist.get_world_size(),))

first = dist.get_rank() == 0
with torch.device("meta"):
    model = build()
checkpoint = read_checkpoint() if first else {}
in_memory = everywhere(sum(value.nbytes for value in checkpoint.values()))

for module in (model[0], model[2], model):
    fully_shard(module, mesh=mesh)
model.to_empty(device=device)
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(model, checkpoint, options=options)

checkpoint, found = read_checkpoint(), model.state_dict()
for name, value in found.items():
    found[name] = value.full_tensor().cpu() if isinstance(value, DTensor) else value.cpu()
weights = all(torch.equal(found[name], checkpoint[name]) for name in ("0.weight", "2.bias"))
mean = torch.equal(found["1.running_mean"], checkpoint["1.running_mean"])
weights, mean = everywhere(weights), everywhere(mean)
if first:
    print(f"bytes before wrapping, rank by rank: {', '.join(map(str, in_memory))}")
    print(f"all ranks have the weights of the checkpoint: {all(weights)}")
    print(f"all ranks have its running mean: {all(mean)}")
dist.destroy_process_group()
# --8<-- [end:body]
