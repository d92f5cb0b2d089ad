"""See which rank is where, and which ranks share a unit inside a host and across hosts.

Why: `torchrun` gives each host one agent, and each agent starts the processes of its host. A
process learns its place from the environment. `'node'` and `'local_rank_across_nodes'` read
from there how many ranks a host has, so the same program makes the right groups on any cluster.

Two agents on this machine stand for two hosts. On two real ones, name the first in place of
`localhost`, and type the command on each.

torch's FSDP2 takes a mesh of two dimensions: hosts, and the ranks inside one.

Run on any machine, no GPU needed; type this in two terminals:

    torchrun --nnodes 2 --nproc-per-node 2 \
        --rdzv-backend c10d --rdzv-endpoint localhost:29400 places_of_ranks_torch_fsdp2.py

Expected output:

    rank | host | local rank | of | 'node' | 'local_rank_across_nodes'
       0 |    0 |          0 |  2 | [0, 1] | [0, 2]
       1 |    0 |          1 |  2 | [0, 1] | [1, 3]
       2 |    1 |          0 |  2 | [2, 3] | [0, 2]
       3 |    1 |          1 |  2 | [2, 3] | [1, 3]
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()


per_host = int(os.environ["LOCAL_WORLD_SIZE"])
names = ("local_rank_across_nodes", "node")
shape = (world_size // per_host, per_host)
mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)


def ranks_of(word):
    """Shard a unit over one dimension of the mesh, and return its ranks."""
    unit = fully_shard(nn.Linear(4, 4, device=device), mesh=mesh[word])
    return unit.weight.device_mesh.mesh.tolist()


place = [os.environ[name] for name in ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
places = [None] * world_size
dist.all_gather_object(places, [*place, ranks_of("node"), ranks_of("local_rank_across_nodes")])

if rank == 0:
    print("rank | host | local rank | of | 'node' | 'local_rank_across_nodes'")
    for number, (host, local, size, inside, across) in enumerate(places):
        print(f"{number:4} | {host:>4} | {local:>10} | {size:>2} | {inside} | {across}")

dist.destroy_process_group()
# --8<-- [end:body]
