"""Shard within a host and copy across hosts, and count what is sent on each level.

Why: the links between hosts are slower than those inside one. `FULL_SHARD` gathers weights
over all ranks, so most of what a rank sends leaves its host. A hybrid strategy gathers inside
the host only; what crosses over is one sum of the gradients of each shard. It costs memory:
every host holds a whole copy. The copies must stay equal, and they do.

Two agents on this machine stand for two hosts. On two real ones, name the first in place of
`localhost`, and type the command on each.

torch's FSDP1 takes a pair of groups made by hand, or a mesh. Left out, each unit that is
wrapped by hand makes groups of its own, by the number of GPUs. It counts nothing by itself.

Run on any machine, no GPU needed; type this in two terminals:

    torchrun --nnodes 2 --nproc-per-node 2 \
        --rdzv-backend c10d --rdzv-endpoint localhost:29400 hybrid_on_two_hosts_torch_fsdp1.py

Expected output:

                                    | elements kept  | bytes sent   | bytes sent   | all copies
                                    | on each rank   | in the host  | to others    | equal
    FULL_SHARD                      |           6144 |        73728 |       147456 | one copy
    HYBRID_SHARD by two groups      |          12288 |       147456 |        49152 | True
    HYBRID_SHARD by a mesh          |          12288 |       147456 |        49152 | True
    _HYBRID_SHARD_ZERO2             |          12288 |        98304 |        49152 | True
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()
per_host = int(os.environ["LOCAL_WORLD_SIZE"])


def build(strategy, **groups):
    """Make six layers, each a unit, and a root."""
    torch.manual_seed(0)
    options = {"sharding_strategy": ShardingStrategy[strategy], "device_id": device, **groups}
    layers = [nn.Linear(64, 64, bias=False).to(device) for _ in range(6)]
    units = [FullyShardedDataParallel(layer, **options) for layer in layers]
    return FullyShardedDataParallel(nn.Sequential(*units), **options)


class Watch(TorchDispatchMode):
    """Count the bytes that this rank sends inside its host and out of it, each peer as much."""

    def __init__(self):
        super().__init__()
        self.inside = self.outside = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith("c10d."):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            touched = sum(tensor.nbytes for tensor in tensors)
            boxed = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.ScriptObject))
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed))
            full = touched * len(ranks) // (len(ranks) + 1)  # a full tensor and a shard
            sent = 2 * touched if "allreduce" in name else full
            away = sum(peer // per_host != rank // per_host for peer in ranks)
            self.outside += sent * away // len(ranks)
            self.inside += sent * (len(ranks) - 1 - away) // len(ranks)
        return func(*args, **(kwargs or {}))


def copies_equal(model):
    """Compare this rank's shards with those of the rank that holds the same ones; collective."""
    values = [None] * world_size
    dist.all_gather_object(values, [p.detach().tolist() for p in model.parameters()])
    return values[rank] == values[(rank + per_host) % world_size]


def measure(name, model):
    """Train two steps, each rank on its own batch, and print what the second one sent."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(2):
        with Watch() as watched:
            model(torch.randn(8, 64).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    shard = sum(parameter.numel() for parameter in model.parameters())
    equal = "one copy" if name == "FULL_SHARD" else copies_equal(model)  # collective
    if rank == 0:
        print(f"{name:31} | {shard:14} | {watched.inside:12} | {watched.outside:12} | {equal}")


mesh = init_device_mesh(device.type, (world_size // per_host, per_host))
if rank == 0:
    print(f"{'':31} | elements kept  | bytes sent   | bytes sent   | all copies")
    print(f"{'':31} | on each rank   | in the host  | to others    | equal")
measure("FULL_SHARD", build("FULL_SHARD"))
# Every rank creates every group, also those that it is not in, in the same order.
inside, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
across, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
pair = (inside, across)
measure("HYBRID_SHARD by two groups", build("HYBRID_SHARD", process_group=pair))
measure("HYBRID_SHARD by a mesh", build("HYBRID_SHARD", device_mesh=mesh))
measure("_HYBRID_SHARD_ZERO2", build("_HYBRID_SHARD_ZERO2", device_mesh=mesh))

dist.destroy_process_group()
# --8<-- [end:body]
