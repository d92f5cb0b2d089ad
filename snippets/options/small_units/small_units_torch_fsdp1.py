"""Let small units share messages: FSDP1 cannot, a unit sends for itself.

Why: a message costs the same below some size, however short it is. A model of many small
units spends its time on messages.

What is left is to wrap less finely: one class further out, or by size.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 small_units_torch_fsdp1.py

Expected output:

    units               all-gathers  reduce-scatters
    every layer         49           25
    200 parameters up   17           9
"""

# --8<-- [start:body]
import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
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


def count(policy):
    """Count the messages of the third training step."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(*(Layer() for _ in range(3))) for _ in range(8)]
    layers = nn.Sequential(*blocks, nn.Linear(8, 4)).to(device)
    model = FullyShardedDataParallel(layers, auto_wrap_policy=policy, device_id=device)
    for _ in range(3):
        with Count() as counted:
            model(torch.ones(4, 8, device=device)).square().mean().backward()
    return counted


by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=200)
rows = {"every layer": ModuleWrapPolicy({Layer}), "200 parameters up": by_size}
if rank == 0:
    print("units               all-gathers  reduce-scatters")
for title, policy in rows.items():
    counted = count(policy)
    if rank == 0:
        print(f"{title:18}  {counted.gathers:<11}  {counted.reductions}")

dist.destroy_process_group()
# --8<-- [end:body]
