"""Validate when ranks have different numbers of batches: ask before each one.

Why: every forward gathers, and gathering takes all ranks. A rank with one batch more waits
for the others until the time limit. One small all-reduce before each batch lets all of them
stop together.

The second way loses no batch: who has none left takes part with an empty hand, and drops
what comes out.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 uneven_batches_torch_fsdp2.py

Expected output:

    one process:                 0.0953
    stop at the first that ends: 6 of 8 batches, mean 0.0756
    go on until the last:        8 of 8 batches, mean 0.0953
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
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
data = torch.randn(8, 4, device=device)
truth = plain(data).mean().item()
model = fully_shard(plain, mesh=init_device_mesh(device.type, (world_size,)))
batches = data[:3].split(1) if rank == 0 else data[3:].split(1)  # three, and five


def how_many_have(batch):
    """Count the ranks that have a batch. Every rank asks, every time."""
    count = torch.tensor(int(batch is not None), device=device)
    dist.all_reduce(count)
    return count.item()


def validate(needed):
    """Go on while so many ranks have a batch; return how many all ranks used, and the mean."""
    waiting, outputs = iter(batches), []
    batch = next(waiting, None)
    while how_many_have(batch) >= needed:
        with torch.no_grad():
            output = model(data[:1] if batch is None else batch)
        outputs += [output.item()] if batch is not None else []
        batch = next(waiting, None)
    totals = torch.tensor([len(outputs), sum(outputs)], device=device)
    dist.all_reduce(totals)
    return f"{totals[0]:.0f} of 8 batches, mean {(totals[1] / totals[0]).item():.4f}"


together, nothing_lost = validate(needed=world_size), validate(needed=1)
if rank == 0:
    print(f"one process:                 {truth:.4f}")
    print(f"stop at the first that ends: {together}")
    print(f"go on until the last:        {nothing_lost}")

dist.destroy_process_group()
# --8<-- [end:body]
