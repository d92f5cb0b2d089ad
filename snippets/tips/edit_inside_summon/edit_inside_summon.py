"""Edit weights inside `summon_full_params`, on every rank alike.

Why: outside the context a rank holds a shard and the module's weights are empty. Inside,
every module has its full weights, and edits are kept: if `writeback` is on, and if all
ranks made the same edit. Each line below fills a weight of 64 elements with 3 and counts
how many elements are 3 after the context.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 edit_inside_summon.py

Expected output:

    every rank writes                          kept 64 of 64
    every rank writes, writeback=False         kept 0 of 64
    only rank 0 writes: refused with FSDP401   kept 0 of 64
    outside the context: refused with FSDP305  kept 0 of 64
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel
from fsdp_ref.errors import NotGatheredError, SummonDisagreementError

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()


def new_model():
    """Shard a fresh model, none of whose weights is 3."""
    torch.manual_seed(0)
    return FullyShardedDataParallel(nn.Linear(8, 8, bias=False).to(device))


def report(case, model):
    """Print how much of the edit is left in the full weight."""
    kept = model.state_dict()["weight"].eq(3).sum().item()
    if rank == 0:
        print(f"{case:42} kept {kept} of 64")


model = new_model()
with model.summon_full_params():
    nn.init.constant_(model.weight, 3)
report("every rank writes", model)

model = new_model()
with model.summon_full_params(writeback=False):
    nn.init.constant_(model.weight, 3)
report("every rank writes, writeback=False", model)

model = new_model()
try:
    with model.summon_full_params():
        if rank == 0:
            nn.init.constant_(model.weight, 3)
    refused = "accepted"
except SummonDisagreementError as error:
    refused = f"refused with {error.code}"
report(f"only rank 0 writes: {refused}", model)

model = new_model()
try:
    with torch.no_grad():
        model.module.weight.fill_(3)
    outside = "accepted"
except NotGatheredError as error:
    outside = f"refused with {error.code}"
report(f"outside the context: {outside}", model)

dist.destroy_process_group()
# --8<-- [end:body]
