"""Spell one set of ranks in several ways, and see that they share one group.

Why: each process group holds connections and memory, so one for each unit would be far too
many. Groups are kept by their ranks: whatever means the same ranks is the same group, for
all units and all models, until the default group is destroyed.

torch's FSDP1 takes group objects, and `new_group` makes a new one each time: keep them.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 one_cache_torch_fsdp1.py

Expected output:

    everyone       ranks [0, 1, 2, 3] a new group
    everyone again ranks [0, 1, 2, 3] a new group
    pairs          ranks [0, 1]       a new group
    pairs again    ranks [0, 1]       a new group
    4 requests, 4 groups
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()

lists = {
    "everyone": [[0, 1, 2, 3]],
    "everyone again": [[0, 1, 2, 3]],
    "pairs": [[0, 1], [2, 3]],
    "pairs again": [[0, 1], [2, 3]],
}
groups = {}
for name, ranks in lists.items():
    group, _ = dist.new_subgroups_by_enumeration(ranks)  # collective over the world
    known = [other for other, made in groups.items() if made is group]
    groups.setdefault(name, group)
    if rank == 0:
        members = str(dist.get_process_group_ranks(group))
        print(f"{name:14} ranks {members:12}", f"as {known[0]}" if known else "a new group")
if rank == 0:
    print(f"{len(lists)} requests, {len(set(map(id, groups.values())))} groups")

dist.destroy_process_group()
# --8<-- [end:body]
