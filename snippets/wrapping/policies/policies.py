"""Choose the units with a policy: by size, by class, or by a function of your own.

A policy decides which modules become units of their own; the root takes the rest. By size, a
module is wrapped when enough parameters remain in it after its children were wrapped. A custom
policy may return a dictionary: the arguments of that one unit, here a process group of one rank
for the head, so that every rank keeps all of it. A class that the model does not use selects
nothing: everything stays with the root, and a warning says so.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 policies.py

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
import functools
import os

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import (
    CustomPolicy,
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
)


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


def show(title, model):
    """Print each unit and how many elements of its own this rank stores."""
    units = []
    for name, unit in model.named_modules():
        if isinstance(unit, FullyShardedDataParallel):
            name = name.replace("_fsdp_wrapped_module.", "").removesuffix("._fsdp_wrapped_module")
            stored = sum(parameter.numel() for parameter in unit.parameters(recurse=False))
            units.append(f"{stored:9,}  {name or 'root'}")
    if dist.get_rank() == 0:
        print(title, *units, sep="\n")


def blocks_and_lonely_head(module):
    """Blocks become units; the head becomes one that is not shared with other ranks."""
    if isinstance(module, nn.Linear) and module.out_features == 100:
        return {"process_group": "self"}
    return isinstance(module, Block)


dist.init_process_group()  # gloo on CPU, NCCL on GPUs
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
policies = {
    "by size": functools.partial(size_based_auto_wrap_policy, min_num_params=1000),
    "by class": ModuleWrapPolicy({Block}),
    "by function": CustomPolicy(blocks_and_lonely_head),
    "by a class that the model does not use": ModuleWrapPolicy({nn.Conv2d}),
}

if dist.get_rank() == 0:
    print("the units of each policy, and the elements of them that rank 0 stores")
for title, policy in policies.items():
    show(title, FullyShardedDataParallel(Model().to(device), auto_wrap_policy=policy))
dist.destroy_process_group()
# --8<-- [end:body]
