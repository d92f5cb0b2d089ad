"""Choose the units with torch's own policies: by size, by class, by a function.

The names and meanings are the same. A group is passed as an object rather than a word, and every
rank must take part in making it. With a group of one rank the unit is not sharded at all. Nothing
warns when a policy selects no module.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 policies_torch_fsdp1.py

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
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
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
            stored = sum(parameter.numel() for parameter in unit.module.parameters(recurse=False))
            units.append(f"{stored:9,}  {name or 'root'}")
    if dist.get_rank() == 0:
        print(title, *units, sep="\n")


def blocks_and_lonely_head(module):
    """Blocks become units; the head becomes one that is not shared with other ranks."""
    if isinstance(module, nn.Linear) and module.out_features == 100:
        return {"process_group": this_rank_alone}
    return isinstance(module, Block)


dist.init_process_group()  # gloo on CPU, NCCL on GPUs
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
this_rank_alone, _ = dist.new_subgroups(group_size=1)  # every rank makes all the groups
policies = {
    "by size": functools.partial(size_based_auto_wrap_policy, min_num_params=1000),
    "by class": ModuleWrapPolicy({Block}),
    "by function": CustomPolicy(blocks_and_lonely_head),
    "by a class that the model does not use": ModuleWrapPolicy({nn.Conv2d}),
}

if dist.get_rank() == 0:
    print("the units of each policy, and the elements of them that rank 0 stores")
for title, policy in policies.items():
    model = FullyShardedDataParallel(Model(), auto_wrap_policy=policy, device_id=device)
    show(title, model)
dist.destroy_process_group()
# --8<-- [end:body]
