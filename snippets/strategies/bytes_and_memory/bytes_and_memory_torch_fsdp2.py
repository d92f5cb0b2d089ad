"""Compare the strategies: what a step sends, and what memory holds.

Why: strategies trade memory for messages. Each row is one training step of the same model of
six layers, each a unit of its own. Gathered is the most elements of full parameters in memory
at once; kept is what a rank stores between steps; sent counts elements that one rank sends in
a step, in a ring.

`fully_shard` takes a mesh and `reshard_after_forward` in place of a strategy. Copies without
any cutting are the business of `DistributedDataParallel`.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 bytes_and_memory_torch_fsdp2.py

Expected output:

                        gathered kept all-gather reduce-scatter all-reduce sent
    FULL_SHARD               512  384       2304           1152          0 3456
    SHARD_GRAD_OP           1536  384       1152           1152          0 2304
    HYBRID_SHARD             512  768       1536            768        768 3072
    _HYBRID_SHARD_ZERO2     1536  768        768            768        768 2304
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()
TITLES = ["gathered", "kept", "all-gather", "reduce-scatter", "all-reduce", "sent"]


def build():
    """Build six layers of 256 elements each."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6))).to(device)


class Watch(TorchDispatchMode):
    """Count the elements that each rank sends in a ring, by operation."""

    def __init__(self):
        super().__init__()
        self.sent = {"all-gather": 0, "reduce-scatter": 0, "all-reduce": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith("c10d."):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            touched = sum(tensor.numel() for tensor in tensors)
            ranks = dist.get_world_size(group_of(args))
            full = touched * ranks // (ranks + 1)  # a full tensor and a shard
            if "allgather" in name:
                self.sent["all-gather"] += full * (ranks - 1) // ranks
            elif "reduce_scatter" in name:
                self.sent["reduce-scatter"] += full * (ranks - 1) // ranks
            elif "allreduce" in name:
                self.sent["all-reduce"] += 2 * touched * (ranks - 1) // ranks
        return func(*args, **(kwargs or {}))


def group_of(args):
    """Find the process group among the arguments of a collective."""
    boxed = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.ScriptObject))
    return dist.ProcessGroup.unbox(boxed)


def gathered_elements(model):
    """Add up the elements of all unsharded parameters, and of gathers under way (private)."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
    full = []
    for group in filter(None, groups):
        full += [getattr(param, "_unsharded_param", None) for param in group.fsdp_params]
        full += [group._all_gather_result and group._all_gather_result.all_gather_output]
    return sum(tensor.untyped_storage().nbytes() // 4 for tensor in full if tensor is not None)


def measure(title, mesh, *, reshard):
    """Train one step in one of the settings and print a row."""
    model, peak = build(), 0

    def look(*unused):
        nonlocal peak
        peak = max(peak, gathered_elements(model))

    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        layer.register_forward_pre_hook(look)
        layer.register_full_backward_hook(look)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    with Watch() as watched:
        model(torch.ones(4, 16, device=device, requires_grad=True)).sum().backward()
    kept = sum(p.to_local().numel() for p in model.parameters())
    if rank == 0:
        numbers = [peak, kept, *watched.sent.values(), sum(watched.sent.values())]
        cells = (f"{number:{len(name)}}" for name, number in zip(TITLES, numbers, strict=True))
        print(f"{title:19}", *cells)


if rank == 0:
    print(f"{'':19}", *TITLES)
everyone = init_device_mesh(device.type, (4,))
pairs = init_device_mesh(device.type, (2, 2), mesh_dim_names=("copies", "shards"))
measure("FULL_SHARD", everyone, reshard=True)
measure("SHARD_GRAD_OP", everyone, reshard=False)
measure("HYBRID_SHARD", pairs, reshard=True)
measure("_HYBRID_SHARD_ZERO2", pairs, reshard=False)

dist.destroy_process_group()
# --8<-- [end:body]
