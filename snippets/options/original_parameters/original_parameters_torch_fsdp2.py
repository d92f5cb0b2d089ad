"""Keep the original parameters: by name, one by one.

Why: training recipes speak of single weights. Weight decay is left out for biases, some
weights are frozen, and a weight that no rank used should stay as it is. A flat parameter
is one tensor with one name, so none of this can be said about a part of it.

`fully_shard` has no flat parameter: it shards each one by itself, along its first dimension, so
there is nothing to switch on.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 original_parameters_torch_fsdp2.py

Expected output:

    used.weight    3 and 3 elements, gradient a tensor
    used.bias      1 and 1 elements, gradient a tensor
    unused.weight  3 and 3 elements, gradient None on both
    unused.bias    1 and 1 elements, gradient None on both
    parameters with weight decay of their own: 2
    unused.weight moved: False
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
rank = dist.get_rank()
mesh = init_device_mesh(device.type, (dist.get_world_size(),))


class Model(nn.Module):
    """Two layers, of which a forward uses one."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(3, 2)
        self.unused = nn.Linear(3, 2)

    def forward(self, batch):
        return self.used(batch)


def step():
    """Train one step, with weight decay for weights and none for biases."""
    torch.manual_seed(0)
    model = Model().to(device)
    fully_shard(model, mesh=mesh)
    named = dict(model.named_parameters())
    weights = [p for name, p in named.items() if name.endswith("weight")]
    others = [p for name, p in named.items() if not name.endswith("weight")]
    groups = [{"params": weights, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    before = model.unused.weight.full_tensor().clone()
    model(torch.ones(2, 3, device=device)).sum().backward()
    optimizer.step()
    moved = (model.unused.weight.full_tensor() - before).abs().max()
    mine = [(name, p.to_local().numel(), p.grad is not None) for name, p in named.items()]
    dist.all_gather_object(everyones := [None] * dist.get_world_size(), mine)
    if rank == 0:
        for (name, first, has), (_, second, has_too) in zip(*everyones, strict=True):
            gradient = "a tensor" if has or has_too else "None on both"
            print(f"{name:14} {first} and {second} elements, gradient {gradient}")
        print(f"parameters with weight decay of their own: {len(weights)}")
        print(f"unused.weight moved: {bool(moved > 0)}")


step()

dist.destroy_process_group()
# --8<-- [end:body]
