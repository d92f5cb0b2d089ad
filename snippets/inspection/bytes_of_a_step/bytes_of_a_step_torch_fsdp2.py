"""Add up what a step sends, beside what it has to send.

Why: what a step sends follows from the units alone, so it can be predicted, and a difference
means something: a unit that is called twice, a frozen one that is reduced, an evaluation in
between.

Torch counts collectives with `CommDebugMode`. It does not tell whose they are, nor how large.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 bytes_of_a_step_torch_fsdp2.py

Expected output:

    all-gather 6
    reduce-scatter 3
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(device.type, (world_size,))

torch.manual_seed(0)  # the same weights on every rank
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).to(device)
model[1].requires_grad_(False)
for index in range(3):
    fully_shard(model[index], mesh=mesh, reshard_after_forward=index != 2)
fully_shard(model, mesh=mesh)

with CommDebugMode() as counted:
    model(torch.ones(2, 8, device=device, requires_grad=True)).sum().backward()

if rank == 0:
    for operation, count in counted.get_comm_counts().items():
        # its name depends on the backend
        print("all-gather" if "allgather" in str(operation) else "reduce-scatter", count)

dist.destroy_process_group()
# --8<-- [end:body]
