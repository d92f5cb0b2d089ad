"""Accumulate gradients with or without `no_sync`: equal sums, other costs.

Why: `no_sync` saves reduce-scatters. Until the reduction, each rank has to hold the
gradient of the whole model instead of its shard. The sums are equal.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 accumulate_gradients_torch_fsdp1.py

Expected output:

    reduce after every backward    holds [256, 256, 256] elements, reduce-scatters 6, all-gathers 9
    reduce after the last backward holds [512, 512, 256] elements, reduce-scatters 2, all-gathers 9
    largest gradient 0.157, largest difference 0.00000
"""

# --8<-- [start:body]
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(1)
batches = torch.randn(3, 8, 16).to(device).chunk(world_size, dim=1)[rank]  # three micro-batches


def sharded():
    """Build two layers of 256 elements each, and shard them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)).to(device)
    model[0] = FullyShardedDataParallel(model[0], device_id=device)
    return FullyShardedDataParallel(model, device_id=device)


def gradient_elements(model):
    """Count the elements of all gradients that this rank holds, reduced or not."""
    return sum(flat_param.grad.numel() for flat_param in model.parameters())


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
            with model.no_sync() if skip_reductions and not last else nullcontext():
                model(batch).square().mean().backward()
            held.append(gradient_elements(model))
    sent = messages.sent
    if rank == 0:
        print(f"{case:30} holds {held} elements, reduce-scatters {sent[0]}, all-gathers {sent[1]}")
    return [parameter.grad for parameter in model.parameters()]


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
