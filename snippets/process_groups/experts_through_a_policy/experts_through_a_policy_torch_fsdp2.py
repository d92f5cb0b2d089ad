"""Keep one expert per rank: each gets a mesh of its own.

Why: experts of a mixture differ from rank to rank, so they must neither be sharded over
the ranks nor averaged with the others. `fully_shard` knows no policy: a loop shards each
expert over a mesh of one rank; all other layers use the whole mesh and stay equal.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 experts_through_a_policy_torch_fsdp2.py

Expected output:

    unit | ranks in its group | elements on each rank | versions of a weight after training
    dense | 4 | 32 | 1
    expert | 1 | 64 | 4
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
rank, world_size = dist.get_rank(), dist.get_world_size()


class Expert(nn.Linear):
    """The layer of which every rank trains its own version."""


class Mixture(nn.Module):
    """Dense layers around one expert."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(8, 8, bias=False)
        self.expert = Expert(8, 8, bias=False)
        self.after = nn.Linear(8, 8, bias=False)

    def forward(self, batch):
        return self.after(self.expert(self.before(batch)).relu())


def versions(weight):
    """Count the different values of one full weight over the ranks."""
    copies = [None] * world_size
    dist.all_gather_object(copies, weight.flatten().tolist())
    return len(set(map(tuple, copies)))


def show(name, group, elements, weight):
    """Print who shares a unit, how much of it one rank holds, and how many versions exist."""
    count = versions(weight)
    if rank == 0:
        print(f"{name} | {group.size()} | {elements} | {count}")


if rank == 0:
    print("unit | ranks in its group | elements on each rank | versions of a weight after training")

everyone = init_device_mesh(device.type, (world_size,))
alone = init_device_mesh(device.type, (world_size, 1), mesh_dim_names=("others", "self"))["self"]

torch.manual_seed(0)
model = Mixture().to(device)
for module in model.modules():
    if isinstance(module, Expert):
        fully_shard(module, mesh=alone)
fully_shard(model, mesh=everyone)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

torch.manual_seed(rank)  # every rank has its own data
for _ in range(3):
    model(torch.randn(16, 8).to(device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

dense = [model.before.weight, model.after.weight]
dense_elements = sum(weight.to_local().numel() for weight in dense)
expert = model.expert.weight
show("dense", everyone, dense_elements, dense[0].full_tensor())  # full_tensor is collective
show("expert", alone, expert.to_local().numel(), expert.full_tensor())

dist.destroy_process_group()
# --8<-- [end:body]
