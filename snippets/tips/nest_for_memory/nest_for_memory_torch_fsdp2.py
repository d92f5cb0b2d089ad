"""Nest units, one per layer: gather a little at a time.

Why: a unit's parameters are gathered together. One unit for the whole model therefore
needs the whole model in memory; one unit per layer needs a few layers, and pays with
more all-gathers, because inner units are gathered again for the backward.
Two layers are in memory during the backward: torch gathers the next one early.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 nest_for_memory_torch_fsdp2.py

Expected output:

    one unit          gathered at once 1536 of 1536 elements, all-gathers 1
    a unit per layer  gathered at once 512 of 1536 elements, all-gathers 12
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()
mesh = init_device_mesh(device.type, (dist.get_world_size(),))


def build():
    """Build six layers of 256 elements each."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6))).to(device)


class CountGathers(TorchDispatchMode):
    """Count all-gathers as they are issued, on any backend."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "allgather" in str(func)
        return func(*args, **(kwargs or {}))


def gathered_elements(model):
    """Add up the elements of all unsharded parameters, and of gathers under way (private)."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
    full = []
    for group in filter(None, groups):
        full += [getattr(param, "_unsharded_param", None) for param in group.fsdp_params]
        full += [group._all_gather_result and group._all_gather_result.all_gather_output]
    return sum(tensor.untyped_storage().nbytes() // 4 for tensor in full if tensor is not None)


def measure(case, model):
    """Run one forward and backward; print its peak of gathered elements and its all-gathers."""
    peak = 0

    def look(*unused):
        nonlocal peak
        peak = max(peak, gathered_elements(model))

    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(look)
            layer.register_full_backward_hook(look)
    with CountGathers() as gathers:
        model(torch.ones(4, 16, device=device)).square().sum().backward()
    if rank == 0:
        print(f"{case:17} gathered at once {peak} of 1536 elements, all-gathers {gathers.count}")


model = build()
fully_shard(model, mesh=mesh)
measure("one unit", model)

model = build()
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
measure("a unit per layer", model)

dist.destroy_process_group()
# --8<-- [end:body]
