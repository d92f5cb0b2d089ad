"""Let small units share messages: FSDP2 makes one unit of several modules.

Why: a message costs the same below some size, however short it is. A model of many small
units spends its time on messages.

`fully_shard` takes a list of modules. They are gathered and reduced together, as one unit,
and dropped together, after the last of them.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 small_units_torch_fsdp2.py

Expected output:

    units               all-gathers  reduce-scatters
    every layer         49           25
    two layers          25           13
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()


class Layer(nn.Module):
    """A small residual layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Count(TorchDispatchMode):
    """Count collectives by their names."""

    def __init__(self):
        super().__init__()
        self.gathers = self.reductions = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.gathers += "allgather" in str(func)
        self.reductions += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


mesh = init_device_mesh(device.type, (dist.get_world_size(),))


def count(together):
    """Count the messages of the third training step."""
    torch.manual_seed(0)
    layers = [Layer() for _ in range(24)]
    model = nn.Sequential(*layers, nn.Linear(8, 4)).to(device)
    for index in range(0, 24, together):
        fully_shard(layers[index : index + together], mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(3):
        with Count() as counted:
            model(torch.ones(4, 8, device=device)).square().mean().backward()
    return counted


if rank == 0:
    print("units               all-gathers  reduce-scatters")
for title, together in {"every layer": 1, "two layers": 2}.items():
    counted = count(together)
    if rank == 0:
        print(f"{title:18}  {counted.gathers:<11}  {counted.reductions}")

dist.destroy_process_group()
# --8<-- [end:body]
