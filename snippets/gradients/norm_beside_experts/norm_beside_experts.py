"""Clip a model whose experts differ from rank to rank: one norm for all, or one each.

Why: every rank has an expert of its own, beside a dense layer that all ranks share. The norm
of the whole model counts the dense layer once and every expert. A rank that counts its own
expert alone clips the shared layer by another factor than its neighbour.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 norm_beside_experts.py

Expected output:

    true norm            12.691
    told to ranks 0 to 3 12.691, 12.691, 12.691, 12.691
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
dense = nn.Linear(6, 6)
torch.manual_seed(1 + rank)
expert = nn.Linear(6, 6)
batch = torch.randn(4, 6, device=device)

model = nn.Sequential(dense, nn.Tanh(), expert).to(device)
model[2] = FullyShardedDataParallel(model[2], process_group="self")
model = FullyShardedDataParallel(model)
model(batch).square().sum().backward()


def on_each_rank(number):
    """Collect one number from every rank, as text."""
    numbers = [None] * world_size
    dist.all_gather_object(numbers, f"{number:.3f}")
    return ", ".join(numbers)


squares = [parameter.grad.square().sum() for parameter in model.parameters()]
true_norm = torch.stack(squares).sum()  # no two ranks hold the same element
dist.all_reduce(true_norm)
told = on_each_rank(model.clip_grad_norm_(max_norm=1.0).item())

if rank == 0:
    print(f"true norm            {true_norm.sqrt().item():.3f}")
    print(f"told to ranks 0 to 3 {told}")

dist.destroy_process_group()
# --8<-- [end:body]
