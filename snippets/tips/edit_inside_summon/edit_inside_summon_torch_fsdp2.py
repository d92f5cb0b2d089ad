"""Edit the sharded DTensors, on every rank alike.

Why: `fully_shard` has no `summon_full_params`. Its parameters are DTensors: an operation
on one edits this rank's shard. An edit of the full weight between `unshard()` and
`reshard()` is lost. Each line below fills a weight of 64 elements with 3 and counts how
many elements are 3 afterwards.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 edit_inside_summon_torch_fsdp2.py

Expected output:

    every rank writes                          kept 64 of 64
    every rank writes to the unsharded one     kept 0 of 64
    only rank 0 writes: accepted               kept 32 of 64
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


def new_model():
    """Shard a fresh model, none of whose weights is 3."""
    torch.manual_seed(0)
    return fully_shard(nn.Linear(8, 8, bias=False).to(device), mesh=mesh)


def report(case, model):
    """Print how much of the edit is left in the full weight."""
    kept = model.weight.full_tensor().eq(3).sum().item()
    if rank == 0:
        print(f"{case:42} kept {kept} of 64")


model = new_model()
nn.init.constant_(model.weight, 3)
report("every rank writes", model)

model = new_model()
model.unshard()
nn.init.constant_(model.weight, 3)
model.reshard()
report("every rank writes to the unsharded one", model)

model = new_model()
if rank == 0:
    nn.init.constant_(model.weight, 3)
report("only rank 0 writes: accepted", model)

dist.destroy_process_group()
# --8<-- [end:body]
