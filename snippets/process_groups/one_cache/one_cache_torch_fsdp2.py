"""Spell one set of ranks in several ways, and see that they share one group.

Why: each process group holds connections and memory, so one for each unit would be far too
many. Groups are kept by their ranks: whatever means the same ranks is the same group, for
all units and all models, until the default group is destroyed.

torch's FSDP2 takes meshes. Make one mesh and hand it to every call.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 one_cache_torch_fsdp2.py

Expected output:

    a mesh of pairs ranks [0, 1] a new group
    the same again  ranks [0, 1] a new group
    2 meshes, 2 groups
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()

names = ("others", "pair")
meshes = {
    "a mesh of pairs": init_device_mesh(device.type, (2, 2), mesh_dim_names=names)["pair"],
    "the same again": init_device_mesh(device.type, (2, 2), mesh_dim_names=names)["pair"],
}
groups = {}
for name, mesh in meshes.items():
    group = mesh.get_group()
    known = [other for other, made in groups.items() if made is group]
    groups.setdefault(name, group)
    if rank == 0:
        members = str(dist.get_process_group_ranks(group))
        print(f"{name:15} ranks {members}", f"as {known[0]}" if known else "a new group")
if rank == 0:
    print(f"{len(meshes)} meshes, {len(set(map(id, groups.values())))} groups")

dist.destroy_process_group()
# --8<-- [end:body]
