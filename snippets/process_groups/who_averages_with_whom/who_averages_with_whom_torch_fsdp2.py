"""Choose a process group, and see which ranks average their gradients.

Why: a unit averages its gradient over the ranks of its own group, and over no others.
Each rank feeds its own number (rank 0 a 1, rank 1 a 2, ...), so that its own gradient is
that number, and the gradient after the backward tells who averaged with whom.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 who_averages_with_whom_torch_fsdp2.py

Expected output:

    gradient of the                            ranks 0, 1, 2, 3
    root on the default group                  [2.5, 2.5, 2.5, 2.5]
    root on 'self'                             [1.0, 2.0, 3.0, 4.0]
    root on [0, 1] and [2, 3]                  [1.5, 1.5, 3.5, 3.5]
    unit on the default group                  [2.5, 2.5, 2.5, 2.5]
        its root, on the default group         [2.5, 2.5, 2.5, 2.5]
    unit on 'self'                             [1.0, 2.0, 3.0, 4.0]
        its root, on the default group         [2.5, 2.5, 2.5, 2.5]
    unit on [0, 1] and [2, 3]                  [1.5, 1.5, 3.5, 3.5]
        its root, on the default group         [2.5, 2.5, 2.5, 2.5]
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
torch.manual_seed(0)  # the same weights on every rank


class Sum(nn.Module):
    """Layers side by side: the gradient of every weight is the input."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, batch):
        return sum(layer(batch) for layer in self.layers)


def layer():
    """Make a layer of four weights, which four ranks can share."""
    return nn.Linear(1, 4, bias=False, device=device)


def backward(model):
    """Run one backward on this rank's own number."""
    model(torch.full((1, 1), rank + 1.0, device=device)).sum().backward()


def show(case, parameter):
    """Print the gradient of a parameter as each rank holds it."""
    gradients = [None] * world_size
    dist.all_gather_object(gradients, parameter.grad.to_local().max().item())
    if rank == 0:
        print(f"{case:42}", gradients)


# Each rank sees the row of the mesh that it stands in.
everyone = init_device_mesh(device.type, (4,))
alone = init_device_mesh(device.type, (4, 1), mesh_dim_names=("others", "self"))["self"]
pair = init_device_mesh(device.type, (2, 2), mesh_dim_names=("others", "pair"))["pair"]
choices = {"the default group": everyone, "'self'": alone, "[0, 1] and [2, 3]": pair}

if rank == 0:
    print(f"{'gradient of the':42} ranks 0, 1, 2, 3")

for name, mesh in choices.items():
    model = fully_shard(layer(), mesh=mesh)
    backward(model)
    show(f"root on {name}", model.weight)

for name, mesh in choices.items():
    unit = fully_shard(layer(), mesh=mesh)
    model = fully_shard(Sum(layer(), unit), mesh=everyone)
    backward(model)
    show(f"unit on {name}", unit.weight)
    show("    its root, on the default group", model.layers[0].weight)

dist.destroy_process_group()
# --8<-- [end:body]
