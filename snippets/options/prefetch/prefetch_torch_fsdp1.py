"""Gather the next unit ahead: when, and what it costs in memory.

Why: a layer cannot compute before its weights have arrived. Gathered ahead, they travel
while the layer before computes. `BACKWARD_PRE` asks for them before the gradients of that
layer are computed, `BACKWARD_POST` after, and `None` not before they are needed.
What is sent is the same, and so is the result.

The upper table is a backward. The lower one is a forward, which gathers ahead on request only.
The layers have different sizes, so that a collective tells by its size whose it is.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 prefetch_torch_fsdp1.py

Expected output:

    BACKWARD_PRE      BACKWARD_POST     None
    all-gather 2      all-gather 2      all-gather 2
    all-gather 1      compute 2         compute 2
    compute 2         all-gather 1      reduce-scatter 2
    reduce-scatter 2  reduce-scatter 2  all-gather 1
    all-gather 0      compute 1         compute 1
    compute 1         all-gather 0      reduce-scatter 1
    reduce-scatter 1  reduce-scatter 1  all-gather 0
    compute 0         compute 0         compute 0
    reduce-scatter 0  reduce-scatter 0  reduce-scatter 0
    forward           forward_prefetch
    all-gather 0      all-gather 0
    compute 0         all-gather 1
    all-gather 1      compute 0
    compute 1         all-gather 2
    all-gather 2      compute 1
    compute 2         compute 2
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()
UNITS = {32: 0, 96: 1, 72: 2}  # elements of each unit


def build():
    """Build four layers; the first three will be units, the last one stays in the root."""
    torch.manual_seed(0)
    sizes = [(4, 8), (8, 12), (12, 6), (6, 2)]
    return nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes)).to(device)


class Watch(TorchDispatchMode):
    """List the collectives of inner units as they are issued; their sizes tell whose they are."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if "allgather" in name or "reduce_scatter" in name:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            touched = sum(tensor.numel() for tensor in tensors)
            full = touched * world_size // (world_size + 1)  # a full tensor and a shard
            operation = "all-gather" if "allgather" in name else "reduce-scatter"
            if full in UNITS:
                self.lines.append(f"{operation} {UNITS[full]}")
        return func(*args, **(kwargs or {}))


def watch(title, *, forward=False, **options):
    """Train two steps; return what happened in half of the second one."""
    model = build()
    linears = list(model)
    for index in range(3):
        model[index] = FullyShardedDataParallel(model[index], device_id=device, **options)
    model = FullyShardedDataParallel(model, device_id=device, **options)
    batch = torch.ones(2, 4, device=device, requires_grad=True)
    model(batch).sum().backward()
    with Watch() as watched:
        for index in range(3):
            begins = linears[index].register_full_backward_pre_hook
            if forward:
                begins = linears[index].register_forward_pre_hook
            begins(lambda *_, i=index: watched.lines.append(f"compute {i}"))
        loss = model(batch).sum()
        if not forward:
            watched.lines.clear()
            loss.backward()
    return [title, *watched.lines]


columns = [
    watch("BACKWARD_PRE", backward_prefetch=BackwardPrefetch.BACKWARD_PRE),
    watch("BACKWARD_POST", backward_prefetch=BackwardPrefetch.BACKWARD_POST),
    watch("None", backward_prefetch=None),
]
forwards = [
    watch("forward", forward=True),
    watch("forward_prefetch", forward=True, forward_prefetch=True),
]
if rank == 0:
    for table in columns, forwards:
        for row in zip(*table, strict=True):
            print("".join(cell.ljust(18) for cell in row).rstrip())

dist.destroy_process_group()
# --8<-- [end:body]
