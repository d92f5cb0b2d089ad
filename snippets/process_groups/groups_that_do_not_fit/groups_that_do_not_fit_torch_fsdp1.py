"""Ask for groups that do not fit together, and read what each rank is told.

Why: making a group is a collective, so ranks that ask for different ones wait for each other.
Here the requests are compared first: all ranks get an error that names the unit and both
requests, and none hangs. A word that makes no groups of this world is refused at once. The
last case is two words that are easily mixed up: on four ranks their groups are equally large.

torch's FSDP1 takes groups made by hand. Ranks whose requests fit get theirs; one that waits for
a rank that asked for something else is told at the end of the time limit, which is set low here.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 groups_that_do_not_fit_torch_fsdp1.py

Expected output:

    [0, 1] on ranks 0 and 1, [2, 3] on the others:
      rank 0: works
      rank 1: works
      rank 2: works
      rank 3: works
    [0, 1, 2] on ranks 0 to 2, [2, 3] on rank 3:
      rank 0: works
      rank 1: works
      rank 2: works
      rank 3: DistStoreError
"""

# --8<-- [start:body]
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()


def attempt(title, ranks):
    """Make a group of different ranks on different ranks, and use it; print who is told what."""
    told = "works"
    try:
        group = dist.new_group(ranks, timeout=timedelta(seconds=4), use_local_synchronization=True)
        model = FullyShardedDataParallel(nn.Linear(4, 4), process_group=group, device_id=device)
        model(torch.ones(2, 4, device=device))
    except Exception as error:
        told = type(error).__name__
    everyone = [None] * world_size
    dist.all_gather_object(everyone, told)
    if rank == 0:
        print(f"{title}:")
        for number, text in enumerate(everyone):
            print(f"  rank {number}: {text}")


attempt("[0, 1] on ranks 0 and 1, [2, 3] on the others", [0, 1] if rank < 2 else [2, 3])
attempt("[0, 1, 2] on ranks 0 to 2, [2, 3] on rank 3", [0, 1, 2] if rank < 3 else [2, 3])

dist.destroy_process_group()
# --8<-- [end:body]
