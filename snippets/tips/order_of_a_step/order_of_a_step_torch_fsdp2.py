"""Read a training step in order, and count what it sends.

Why: a step is a fixed series of collectives, so its cost can be read off. Units other
than the root are gathered twice and reduced once, which is half as much again as under
DDP; the root is gathered once and costs as much as under DDP.

The units have different sizes, so that a collective tells by its size whose it is.
Moves without communication cannot be seen from outside.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 order_of_a_step_torch_fsdp2.py

Expected output:

    all-gather root
    all-gather 1
    all-gather 2
    all-gather 2
    all-gather 1
    reduce-scatter 2
    reduce-scatter 1
    reduce-scatter root
    DDP sends 864 bytes, FSDP 1184, ratio 1.3704
    1 + 0.5 (1 - root share) = 1.3704
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(device.type, (world_size,))


def build():
    """Build layers of different sizes; 1 and 2 will be units, 0 and 3 stay in the root."""
    torch.manual_seed(0)
    sizes = [(4, 8), (8, 8), (8, 12), (12, 2)]
    return nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes)).to(device)


class Watch(TorchDispatchMode):
    """List collectives as they are issued, and the bytes that each rank sends in a ring."""

    def __init__(self):
        super().__init__()
        self.lines, self.bytes_sent = [], 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith("c10d."):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            touched = sum(tensor.numel() for tensor in tensors)
            gather = "allgather" in name
            if gather or "reduce_scatter" in name:
                full = touched * world_size // (world_size + 1)  # a full tensor and a shard
                operation = "all-gather" if gather else "reduce-scatter"
                self.lines.append(f"{operation} {UNITS[full]}")
                self.bytes_sent += (world_size - 1) / world_size * full * 4
            elif "allreduce" in name:
                self.bytes_sent += 2 * (world_size - 1) / world_size * touched * 4
        return func(*args, **(kwargs or {}))


def watch_a_step(model):
    """Watch one forward and one backward."""
    with Watch() as watched:
        model(torch.ones(2, 4, device=device)).square().sum().backward()
    return watched


elements = sum(weight.numel() for weight in build().parameters())
root_elements = build()[0].weight.numel() + build()[3].weight.numel()
UNITS = {root_elements: "root", build()[1].weight.numel(): "1", build()[2].weight.numel(): "2"}

model = build()
for layer in (model[1], model[2], model):
    fully_shard(layer, mesh=mesh)

ddp_bytes = watch_a_step(DistributedDataParallel(build())).bytes_sent
fsdp = watch_a_step(model)
fsdp_bytes = fsdp.bytes_sent

if rank == 0:
    print("\n".join(fsdp.lines))
    ratio = fsdp_bytes / ddp_bytes
    print(f"DDP sends {ddp_bytes:.0f} bytes, FSDP {fsdp_bytes:.0f}, ratio {ratio:.4f}")
    print(f"1 + 0.5 (1 - root share) = {1 + 0.5 * (1 - root_elements / elements):.4f}")

dist.destroy_process_group()
# --8<-- [end:body]
