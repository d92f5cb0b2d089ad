"""Nest units, one per layer: gather a little at a time.

Why: a unit's parameters are gathered together. One unit for the whole model therefore
needs the whole model in memory; one unit per layer needs a few layers, and pays with
more all-gathers, because inner units are gathered again for the backward.
Two layers are in memory during the backward: the next one is gathered early.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 nest_for_memory.py

Expected output:

    one unit          gathered at once 1536 of 1536 elements, all-gathers 1
    a unit per layer  gathered at once 512 of 1536 elements, all-gathers 12
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel, timeline

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()


def build():
    """Build six layers of 256 elements each."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6))).to(device)


def measure(case, model):
    """Run one forward and backward; print its peak of gathered elements and its all-gathers."""
    with timeline() as recorded:
        model(torch.ones(4, 16, device=device)).square().sum().backward()
    peak = recorded.peak_unsharded_bytes // 4  # four bytes in each float32 element
    gathers = len(recorded.lines("all-gather"))
    if rank == 0:
        print(f"{case:17} gathered at once {peak} of 1536 elements, all-gathers {gathers}")


model = build()
model = FullyShardedDataParallel(model)
measure("one unit", model)

model = build()
for index in range(len(model)):
    model[index] = FullyShardedDataParallel(model[index])
model = FullyShardedDataParallel(model)
measure("a unit per layer", model)

dist.destroy_process_group()
# --8<-- [end:body]
