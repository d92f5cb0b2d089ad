"""Spell one set of ranks in several ways, and see that they share one group.

Why: each process group holds connections and memory, so one for each unit would be far too
many. Groups are kept by their ranks: whatever means the same ranks is the same group, for
all units and all models, until the default group is destroyed.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 one_cache.py

Expected output:

    None              ranks [0, 1, 2, 3] a new group
    'set4'            ranks [0, 1, 2, 3] as None
    'mod1'            ranks [0, 1, 2, 3] as None
    'node'            ranks [0, 1, 2, 3] as None
    'self'            ranks [0]          a new group
    'set1'            ranks [0]          as 'self'
    'set2'            ranks [0, 1]       a new group
    [0, 1] or [2, 3]  ranks [0, 1]       as 'set2'
    [[0, 1], [2, 3]]  ranks [0, 1]       as 'set2'
    'mod2'            ranks [0, 2]       a new group
    'MOD2'            ranks [0, 2]       as 'mod2'
    11 spellings, 4 groups
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
rank = dist.get_rank()

pair = [0, 1] if rank < 2 else [2, 3]  # a plain list is this rank's own
spellings = {
    "None": None,
    "'set4'": "set4",
    "'mod1'": "mod1",
    "'node'": "node",
    "'self'": "self",
    "'set1'": "set1",
    "'set2'": "set2",
    "[0, 1] or [2, 3]": pair,
    "[[0, 1], [2, 3]]": [[0, 1], [2, 3]],
    "'mod2'": "mod2",
    "'MOD2'": "MOD2",
}
groups = {}
for spelling, asked in spellings.items():
    unit = FullyShardedDataParallel(nn.Linear(4, 4, device=device), process_group=asked)
    group = unit.process_group  # made here, as nothing has used the unit yet
    known = [name for name, other in groups.items() if other is group]
    groups.setdefault(spelling, group)
    if rank == 0:
        ranks = dist.get_process_group_ranks(group)
        print(f"{spelling:17} ranks {ranks!s:12}", f"as {known[0]}" if known else "a new group")
if rank == 0:
    print(f"{len(spellings)} spellings, {len(set(map(id, groups.values())))} groups")

dist.destroy_process_group()
# --8<-- [end:body]
