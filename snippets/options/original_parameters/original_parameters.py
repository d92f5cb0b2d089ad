"""Keep the original parameters: by name, one by one.

Why: training recipes speak of single weights. Weight decay is left out for biases, some
weights are frozen, and a weight that no rank used should stay as it is. A flat parameter
is one tensor with one name, so none of this can be said about a part of it.

A unit of sixteen elements on two ranks: each owns eight. With `use_orig_params=True` every
parameter shows the piece of it that this rank owns, which may be empty.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 original_parameters.py

Expected output:

    use_orig_params=False
      _flat_param    8 and 8 elements, gradient a tensor
      parameters with weight decay of their own: 0
      unused.weight moved: True
    use_orig_params=True
      used.weight    6 and 0 elements, gradient a tensor
      used.bias      2 and 0 elements, gradient a tensor
      unused.weight  0 and 6 elements, gradient None on both
      unused.bias    0 and 2 elements, gradient None on both
      parameters with weight decay of their own: 2
      unused.weight moved: False
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
rank = dist.get_rank()


class Model(nn.Module):
    """Two layers, of which a forward uses one."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(3, 2)
        self.unused = nn.Linear(3, 2)

    def forward(self, batch):
        return self.used(batch)


def step(use_orig_params):
    """Train one step, with weight decay for weights and none for biases."""
    torch.manual_seed(0)
    options = {"use_orig_params": use_orig_params}
    model = FullyShardedDataParallel(Model().to(device), **options)
    named = dict(model.named_parameters())
    weights = [p for name, p in named.items() if name.endswith("weight")]
    others = [p for name, p in named.items() if not name.endswith("weight")]
    groups = [{"params": weights, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    if not weights:
        groups = [{"params": others, "weight_decay": 0.5}]  # what is left: all or nothing
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    before = model.state_dict()["unused.weight"].clone()
    model(torch.ones(2, 3, device=device)).sum().backward()
    optimizer.step()
    moved = (model.state_dict()["unused.weight"] - before).abs().max()
    mine = [(name, p.numel(), p.grad is not None) for name, p in named.items()]
    dist.all_gather_object(everyones := [None] * dist.get_world_size(), mine)
    if rank == 0:
        print(f"use_orig_params={use_orig_params}")
        for (name, first, has), (_, second, has_too) in zip(*everyones, strict=True):
            gradient = "a tensor" if has or has_too else "None on both"
            print(f"  {name:14} {first} and {second} elements, gradient {gradient}")
        print(f"  parameters with weight decay of their own: {len(weights)}")
        print(f"  unused.weight moved: {bool(moved > 0)}")


step(use_orig_params=False)
step(use_orig_params=True)

dist.destroy_process_group()
# --8<-- [end:body]
