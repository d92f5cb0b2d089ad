"""Accumulate gradients with or without `no_sync`: equal sums, other costs.

Why: `set_requires_gradient_sync(False)` saves reduce-scatters. Until the reduction, each rank
holds the gradient of the whole model instead of its shard, where `.grad` does not show
it. The sums are equal.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 accumulate_gradients_torch_fsdp2.py

Expected output:

    reduce after every backward    holds [256, 256, 256] elements, reduce-scatters 6, all-gathers 9
    reduce after the last backward holds [512, 512, 256] elements, reduce-scatters 2, all-gathers 9
    largest gradient 0.157, largest difference 0.00000
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
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(device.type, (world_size,))

torch.manual_seed(1)
batches = torch.randn(3, 8, 16).to(device).chunk(world_size, dim=1)[rank]  # three micro-batches


def sharded():
    """Build two layers of 256 elements each, and shard them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)).to(device)
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gradient_elements(model):
    """Count the elements of all gradients that this rank holds, reduced or not (private)."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    params = [p for unit in units for p in unit._get_fsdp_state()._fsdp_param_group.fsdp_params]
    sharded = [
        param.sharded_param.grad.to_local()
        for param in params
        if param.sharded_param.grad is not None
    ]
    unreduced = [param._unsharded_param.grad for param in params]
    accumulated = [param.unsharded_accumulated_grad for param in params]
    held = [*sharded, *unreduced, *accumulated]
    return sum(gradient.numel() for gradient in held if gradient is not None)


class CountMessages(TorchDispatchMode):
    """Count reduce-scatters and all-gathers as they are issued, on any backend."""

    def __init__(self):
        super().__init__()
        self.sent = [0, 0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.sent[0] += "reduce_scatter" in str(func)
        self.sent[1] += "allgather" in str(func)
        return func(*args, **(kwargs or {}))


def accumulate(case, skip_reductions):
    """Run three backwards, the first two without reduction if asked; return the gradient shards."""
    model = sharded()
    held = []
    with CountMessages() as messages:
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            model.set_requires_gradient_sync(last or not skip_reductions)
            model(batch).square().mean().backward()
            held.append(gradient_elements(model))
    sent = messages.sent
    if rank == 0:
        print(f"{case:30} holds {held} elements, reduce-scatters {sent[0]}, all-gathers {sent[1]}")
    return [parameter.grad.to_local() for parameter in model.parameters()]


always = accumulate("reduce after every backward", skip_reductions=False)
once = accumulate("reduce after the last backward", skip_reductions=True)
largest = max(gradient.abs().max() for gradient in always)
difference = max((one - two).abs().max() for one, two in zip(always, once, strict=True))
dist.all_reduce(largest, dist.ReduceOp.MAX)
dist.all_reduce(difference, dist.ReduceOp.MAX)
if rank == 0:
    print(f"largest gradient {largest.item():.3f}, largest difference {difference.item():.5f}")

dist.destroy_process_group()
# --8<-- [end:body]
