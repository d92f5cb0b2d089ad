"""Shard within a host and copy across hosts, and count what is sent on each level.

Why: the links between hosts are slower than those inside one. `FULL_SHARD` gathers weights
over all ranks, so most of what a rank sends leaves its host. A hybrid strategy gathers inside
the host only; what crosses over is one sum of the gradients of each shard. It costs memory:
every host holds a whole copy. The copies must stay equal, and they do.

Two agents on this machine stand for two hosts. On two real ones, name the first in place of
`localhost`, and type the command on each.

Run on any machine, no GPU needed; type this in two terminals:

    torchrun --nnodes 2 --nproc-per-node 2 \
        --rdzv-backend c10d --rdzv-endpoint localhost:29400 hybrid_on_two_hosts.py

Expected output:

                                    | elements kept  | bytes sent   | bytes sent   | all copies
                                    | on each rank   | in the host  | to others    | equal
    FULL_SHARD                      |           6144 |        73728 |       147456 | one copy
    HYBRID_SHARD                    |          12288 |       147456 |        49152 | True
    HYBRID_SHARD by two words       |          12288 |       147456 |        49152 | True
    HYBRID_SHARD by a mesh          |          12288 |       147456 |        49152 | True
    _HYBRID_SHARD_ZERO2             |          12288 |        98304 |        49152 | True
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ref import FullyShardedDataParallel, timeline
from fsdp_ref.agreement import check_replicas

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()
per_host = int(os.environ["LOCAL_WORLD_SIZE"])


def build(strategy, **groups):
    """Make six layers, each a unit, and a root."""
    torch.manual_seed(0)
    options = {"sharding_strategy": strategy, **groups}
    layers = [nn.Linear(64, 64, bias=False).to(device) for _ in range(6)]
    units = [FullyShardedDataParallel(layer, **options) for layer in layers]
    return FullyShardedDataParallel(nn.Sequential(*units), **options)


def per_level(recorded):
    """Return the bytes of weights and gradients that this rank sent inside and out of its host."""
    inside = outside = 0
    for ranks, sent in recorded.summary().bytes_by_ranks.items():
        away = sum(peer // per_host != rank // per_host for peer in ranks)
        outside += sent * away // (len(ranks) - 1)  # each of the others gets as much
        inside += sent * (len(ranks) - 1 - away) // (len(ranks) - 1)
    return inside, outside


def measure(name, model):
    """Train two steps, each rank on its own batch, and print what the second one sent."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(2):
        with timeline() as recorded:
            model(torch.randn(8, 64).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    inside, outside = per_level(recorded)
    shard = sum(parameter.numel() for parameter in model.parameters())
    equal = "one copy" if name == "FULL_SHARD" else check_replicas(model).ok  # collective
    if rank == 0:
        print(f"{name:31} | {shard:14} | {inside:12} | {outside:12} | {equal}")


mesh = init_device_mesh(device.type, (world_size // per_host, per_host))
if rank == 0:
    print(f"{'':31} | elements kept  | bytes sent   | bytes sent   | all copies")
    print(f"{'':31} | on each rank   | in the host  | to others    | equal")
measure("FULL_SHARD", build("FULL_SHARD"))
measure("HYBRID_SHARD", build("HYBRID_SHARD"))
pair = ("node", "local_rank_across_nodes")
measure("HYBRID_SHARD by two words", build("HYBRID_SHARD", process_group=pair))
measure("HYBRID_SHARD by a mesh", build("HYBRID_SHARD", device_mesh=mesh))
measure("_HYBRID_SHARD_ZERO2", build("_HYBRID_SHARD_ZERO2"))

dist.destroy_process_group()
# --8<-- [end:body]
