"""Build the optimizer after wrapping, from the wrapped model's parameters.

Why: wrapping moves the weights into flat parameters. An optimizer from before wrapping
holds the old parameters, so its steps would change nothing. Here the step
raises; torch says nothing.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 optimizer_after_wrapping.py

Expected output:

    optimizer after wrapping: the weight moved by 0.0691
    optimizer before wrapping: refused with FSDP106
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel
from fsdp_ref.errors import OptimizerBeforeWrappingError

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()


def build():
    """Build the plain model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Linear(8, 8).to(device)


def full_weight(model):
    """Return a copy of the full weight. Collective."""
    return model.state_dict()["weight"]


def moved_by_a_step(model, optimizer):
    """Take one step; return how far the weight moved, at most, in any element."""
    before = full_weight(model)
    model(torch.ones(4, 8, device=device)).square().sum().backward()
    optimizer.step()
    return (full_weight(model) - before).abs().max().item()


model = FullyShardedDataParallel(build())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
moved = moved_by_a_step(model, optimizer)
if rank == 0:
    print(f"optimizer after wrapping: the weight moved by {moved:.4f}")

plain = build()
optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
model = FullyShardedDataParallel(plain)
try:
    moved_by_a_step(model, optimizer)
except OptimizerBeforeWrappingError as error:
    if rank == 0:
        print(f"optimizer before wrapping: refused with {error.code}")

dist.destroy_process_group()
# --8<-- [end:body]
