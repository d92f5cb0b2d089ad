"""Choose a process group, and see which ranks average their gradients.

Why: a unit averages its gradient over the ranks of its own group, and over no others.
Each rank feeds its own number (rank 0 a 1, rank 1 a 2, ...), so that its own gradient is
that number, and the gradient after the backward tells who averaged with whom.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 who_averages_with_whom.py

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

from fsdp_ref import FullyShardedDataParallel

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
    dist.all_gather_object(gradients, parameter.grad.max().item())
    if rank == 0:
        print(f"{case:42}", gradients)


def with_a_unit_on(group):
    """Make a model of two layers; a policy gives the second a unit and a group of its own."""
    special = layer()

    def policy(module):
        return {"process_group": group} if module is special else False

    return FullyShardedDataParallel(Sum(layer(), special), auto_wrap_policy=policy)


pair = [0, 1] if rank < 2 else [2, 3]  # each rank names the list that it is in
# a live group, a word, and a list of ranks
choices = {"the default group": dist.group.WORLD, "'self'": "self", "[0, 1] and [2, 3]": pair}

if rank == 0:
    print(f"{'gradient of the':42} ranks 0, 1, 2, 3")

for name, group in choices.items():
    model = FullyShardedDataParallel(layer(), process_group=group)
    backward(model)
    show(f"root on {name}", model._flat_param)

for name, group in choices.items():
    model = with_a_unit_on(group)
    backward(model)
    show(f"unit on {name}", model.layers[1]._flat_param)
    show("    its root, on the default group", model._flat_param)

dist.destroy_process_group()
# --8<-- [end:body]
