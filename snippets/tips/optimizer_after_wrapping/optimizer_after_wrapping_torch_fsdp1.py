"""Build the optimizer after wrapping, from the wrapped model's parameters.

Why: wrapping moves the weights into flat parameters. An optimizer from before wrapping
holds the old parameters, so its steps would change nothing. Nothing
is said. With `use_orig_params=True` the old parameters stay, and training works.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 optimizer_after_wrapping_torch_fsdp1.py

Expected output:

    optimizer after wrapping: the weight moved by 0.0691
    optimizer before wrapping: the weight moved by 0.0000
    optimizer before wrapping, use_orig_params=True: the weight moved by 0.0691
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

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
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return model.weight.detach().clone()


def moved_by_a_step(model, optimizer):
    """Take one step; return how far the weight moved, at most, in any element."""
    before = full_weight(model)
    model(torch.ones(4, 8, device=device)).square().sum().backward()
    optimizer.step()
    return (full_weight(model) - before).abs().max().item()


model = FullyShardedDataParallel(build(), device_id=device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
moved = moved_by_a_step(model, optimizer)
if rank == 0:
    print(f"optimizer after wrapping: the weight moved by {moved:.4f}")

plain = build()
optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
model = FullyShardedDataParallel(plain, device_id=device)
moved = moved_by_a_step(model, optimizer)
if rank == 0:
    print(f"optimizer before wrapping: the weight moved by {moved:.4f}")

plain = build()
optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
model = FullyShardedDataParallel(plain, device_id=device, use_orig_params=True)
moved = moved_by_a_step(model, optimizer)
if rank == 0:
    print(f"optimizer before wrapping, use_orig_params=True: the weight moved by {moved:.4f}")

dist.destroy_process_group()
# --8<-- [end:body]
