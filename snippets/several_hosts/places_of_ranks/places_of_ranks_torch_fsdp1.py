"""See which rank is where, and which ranks share a unit inside a host and across hosts.

Why: `torchrun` gives each host one agent, and each agent starts the processes of its host. A
process learns its place from the environment. `'node'` and `'local_rank_across_nodes'` read
from there how many ranks a host has, so the same program makes the right groups on any cluster.

Two agents on this machine stand for two hosts. On two real ones, name the first in place of
`localhost`, and type the command on each.

torch's FSDP1 takes groups made by hand.

Run on any machine, no GPU needed; type this in two terminals:

    torchrun --nnodes 2 --nproc-per-node 2 \
        --rdzv-backend c10d --rdzv-endpoint localhost:29400 places_of_ranks_torch_fsdp1.py

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
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()


per_host = int(os.environ["LOCAL_WORLD_SIZE"])
# Every rank creates every group, also those that it is not in.
in_hosts = [list(range(at, at + per_host)) for at in range(0, world_size, per_host)]
across_hosts = [list(range(at, world_size, per_host)) for at in range(per_host)]
groups = {
    "node": dist.new_subgroups_by_enumeration(in_hosts)[0],
    "local_rank_across_nodes": dist.new_subgroups_by_enumeration(across_hosts)[0],
}


def ranks_of(word):
    """Give a unit one of the groups, and return the ranks of it."""
    layer = nn.Linear(4, 4)
    unit = FullyShardedDataParallel(layer, process_group=groups[word], device_id=device)
    return dist.get_process_group_ranks(unit.process_group)


place = [os.environ[name] for name in ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
places = [None] * world_size
dist.all_gather_object(places, [*place, ranks_of("node"), ranks_of("local_rank_across_nodes")])

if rank == 0:
    print("rank | host | local rank | of | 'node' | 'local_rank_across_nodes'")
    for number, (host, local, size, inside, across) in enumerate(places):
        print(f"{number:4} | {host:>4} | {local:>10} | {size:>2} | {inside} | {across}")

dist.destroy_process_group()
# --8<-- [end:body]
