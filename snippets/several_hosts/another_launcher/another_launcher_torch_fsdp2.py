"""Say how many ranks a host has, when the launcher does not.

Why: `'node'` and `'local_rank_across_nodes'` read LOCAL_WORLD_SIZE, and so does a hybrid strategy
without groups of its own. `torchrun` sets it. `mpirun`, `srun` or your own `spawn` may not, and a
guess would be a wrong group on every rank. Set the variable, or name groups with a number.

torch's FSDP2 takes a mesh, and a mesh takes numbers.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 another_launcher_torch_fsdp2.py

Expected output:

    cut among ranks [0, 1]
    copied across ranks [0, 2]
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

os.environ.pop("LOCAL_WORLD_SIZE")  # as if something else had started this process
dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

per_host = 2  # no default: say it
shape = (dist.get_world_size() // per_host, per_host)
mesh = init_device_mesh(device.type, shape, mesh_dim_names=("across", "within"))
model = fully_shard(nn.Linear(4, 4, device=device), mesh=mesh)
if dist.get_rank() == 0:
    print("cut among ranks", mesh["within"].mesh.tolist())
    print("copied across ranks", mesh["across"].mesh.tolist())

dist.destroy_process_group()
# --8<-- [end:body]
