"""Build the optimizer after wrapping, from the wrapped model's parameters.

Why: `fully_shard` replaces the weights by DTensors. An optimizer from before holds the old
weights, so its steps change nothing, and nothing is said.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 optimizer_after_wrapping_torch_fsdp2.py

Expected output:

    optimizer after wrapping: the weight moved by 0.0691
    optimizer before wrapping: the weight moved by 0.0000
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()
mesh = init_device_mesh(device.type, (dist.get_world_size(),))


def build():
    """Build the plain model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Linear(8, 8).to(device)


def full_weight(model):
    """Return a copy of the full weight. Collective."""
    return model.weight.full_tensor().detach().clone()


def moved_by_a_step(model, optimizer):
    """Take one step; return how far the weight moved, at most, in any element."""
    before = full_weight(model)
    model(torch.ones(4, 8, device=device)).square().sum().backward()
    optimizer.step()
    return (full_weight(model) - before).abs().max().item()


model = fully_shard(build(), mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
moved = moved_by_a_step(model, optimizer)
if rank == 0:
    print(f"optimizer after wrapping: the weight moved by {moved:.4f}")

model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
fully_shard(model, mesh=mesh)
moved = moved_by_a_step(model, optimizer)
if rank == 0:
    print(f"optimizer before wrapping: the weight moved by {moved:.4f}")

dist.destroy_process_group()
# --8<-- [end:body]
