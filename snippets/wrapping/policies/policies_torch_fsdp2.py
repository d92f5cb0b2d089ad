"""Choose the units of `fully_shard` with plain loops: it has no policies.

Call `fully_shard` on inner modules before outer ones; what a loop calls it on becomes a unit.
Going through the modules backwards does that, and whatever is a `DTensor` already belongs to a
unit.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 policies_torch_fsdp2.py

Expected output:

    the units of each policy, and the elements of them that rank 0 stores
    by size
            0  root
          800  embed
          544  blocks.0.up
          520  blocks.0.down
          544  blocks.1.up
          520  blocks.1.down
          850  head
    by class
        1,650  root
        1,064  blocks.0
        1,064  blocks.1
    by function
          800  root
        1,064  blocks.0
        1,064  blocks.1
        1,700  head
    by a class that the model does not use
        3,778  root
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor


class Block(nn.Module):
    """A residual block of two linear layers: 1,088 and 1,040 parameters."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """An embedding of 1,600 parameters, two blocks, a head of 1,700."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(16, 100)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)))


def by_size(model):
    """Shard what still holds enough parameters after its children were sharded."""
    for module in reversed(list(model.modules())):
        left = [p for p in module.parameters() if not isinstance(p, DTensor)]
        if sum(p.numel() for p in left) >= 1000:
            fully_shard(module, mesh=mesh)


def by_class(model):
    """Shard every block."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)


def by_function(model):
    """Shard every block, and the head over a mesh of one rank."""
    by_class(model)
    fully_shard(model.head, mesh=this_rank_alone)


def by_a_class_that_the_model_does_not_use(model):
    """Shard every convolution: there is none."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fully_shard(module, mesh=mesh)


def show(title, model):
    """Print each unit and how many elements of its own this rank stores."""
    names = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    stored = dict.fromkeys(names, 0)
    for path, parameter in model.named_parameters():
        owner = max((name for name in names if path.startswith(name)), key=len)
        stored[owner] += parameter.to_local().numel()
    units = [f"{numel:9,}  {name or 'root'}" for name, numel in stored.items()]
    if dist.get_rank() == 0:
        print(title, *units, sep="\n")


dist.init_process_group()  # gloo on CPU, NCCL on GPUs
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
both = init_device_mesh(device.type, (dist.get_world_size(), 1), mesh_dim_names=("all", "alone"))
this_rank_alone = both["alone"]

if dist.get_rank() == 0:
    print("the units of each policy, and the elements of them that rank 0 stores")
for choose in (by_size, by_class, by_function, by_a_class_that_the_model_does_not_use):
    model = Model().to(device)
    choose(model)
    if not isinstance(model, FSDPModule):
        fully_shard(model, mesh=mesh)  # the root takes what is left
    show(choose.__name__.replace("_", " "), model)
dist.destroy_process_group()
# --8<-- [end:body]
