"""Let two ranks take different branches: an error that names them, or wrong numbers.

Why: each rank gathers the unit that it needs, and a gather takes whatever the other rank
sends. If the other rank is in another unit of the same size, its weights fit. Half of what
a rank then computes with belongs to another layer, and nothing looks wrong.

Here messages carry the number of their unit, so they do not meet. After the time limit of the
process group both ranks hear which unit waited; the run makes it short.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 another_order.py

Expected output:

    both ranks go left
        rank 0: error 0.000
        rank 1: error 0.000
    rank 0 goes left, rank 1 goes right
        rank 0: FSDP204 unit 'left', all-gather: expected ranks [0, 1] to take part,
          found no answer from some of them
        rank 1: FSDP204 unit 'right', all-gather: expected ranks [0, 1] to take part,
          found no answer from some of them
"""

# --8<-- [start:body]
import os
import textwrap
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()
cpu = torch.device("cpu")  # the model, and a group of its own with a short time limit
group = dist.new_group(backend="gloo", timeout=timedelta(seconds=5))


class Branches(nn.Module):
    """Two layers of one shape; each call takes one of them."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)

    def forward(self, batch, choice):
        return getattr(self, choice)(batch)


def build():
    """Build the same model on every rank."""
    torch.manual_seed(0)
    return Branches()


plain, model = build(), build()
options = {"process_group": group, "device_id": cpu}
model.left = FullyShardedDataParallel(model.left, **options)
model.right = FullyShardedDataParallel(model.right, **options)
model = FullyShardedDataParallel(model, **options)
batch = torch.ones(2, 8)


def largest_error(choice):
    """Compare with one process; return the message's first half if the call is refused."""
    try:
        with torch.no_grad():
            error = (model(batch, choice) - plain(batch, choice)).abs().max()
    except RuntimeError as refused:
        return str(refused).partition(" (")[0]
    return f"error {error.item():.3f}"


def report(case, choice):
    """Print what each rank saw."""
    seen = [None] * world_size
    dist.all_gather_object(seen, largest_error(choice))
    if rank == 0:
        print(case)
        for index, text in enumerate(seen):
            line = f"rank {index}: {text.removeprefix(f'[rank {index}] ')}"
            print(textwrap.fill(line, 84, initial_indent="    ", subsequent_indent="      "))


report("both ranks go left", "left")
report("rank 0 goes left, rank 1 goes right", ["left", "right"][rank])

dist.destroy_process_group()
# --8<-- [end:body]
