"""Edit weights inside `summon_full_params`, on every rank alike.

Why: outside the context a rank holds a shard and the module's weights are empty. Inside,
every module has its full weights, and edits are kept if `writeback` is on. Each rank
keeps its own part of what it wrote, so an edit on one rank alone is kept by halves, and
nothing is said: make the same edit on all ranks. Each line below fills a weight of 64
elements with 3 and counts how many elements are 3 after the context.

Writing to `model.module.weight` outside the context, while it is sharded, is not shown:
it kills the process without a Python error.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 edit_inside_summon_torch_fsdp1.py

Expected output:

    every rank writes                          kept 64 of 64
    every rank writes, writeback=False         kept 0 of 64
    only rank 0 writes: accepted               kept 32 of 64
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


def new_model():
    """Shard a fresh model, none of whose weights is 3."""
    torch.manual_seed(0)
    return FullyShardedDataParallel(nn.Linear(8, 8, bias=False), device_id=device)


def report(case, model):
    """Print how much of the edit is left in the full weight."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        kept = model.weight.eq(3).sum().item()
    if rank == 0:
        print(f"{case:42} kept {kept} of 64")


model = new_model()
with FullyShardedDataParallel.summon_full_params(model):
    nn.init.constant_(model.weight, 3)
report("every rank writes", model)

model = new_model()
with FullyShardedDataParallel.summon_full_params(model, writeback=False):
    nn.init.constant_(model.weight, 3)
report("every rank writes, writeback=False", model)

model = new_model()
with FullyShardedDataParallel.summon_full_params(model):
    if rank == 0:
        nn.init.constant_(model.weight, 3)
report("only rank 0 writes: accepted", model)

dist.destroy_process_group()
# --8<-- [end:body]
