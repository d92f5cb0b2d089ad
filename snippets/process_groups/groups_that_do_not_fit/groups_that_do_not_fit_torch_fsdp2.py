"""Ask for groups that do not fit together, and read what each rank is told.

Why: making a group is a collective, so ranks that ask for different ones wait for each other.
Here the requests are compared first: all ranks get an error that names the unit and both
requests, and none hangs. A word that makes no groups of this world is refused at once. The
last case is two words that are easily mixed up: on four ranks their groups are equally large.

torch's FSDP2 takes meshes, which say at once what all ranks are to do. One that leaves out a
rank is no error until that rank uses it.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 groups_that_do_not_fit_torch_fsdp2.py

Expected output:

    two blocks of three ranks
    rank 0: RuntimeError: Mesh should not be bigger than default world size 4, but found 6
        ranks!
    rank 1: RuntimeError: Mesh should not be bigger than default world size 4, but found 6
        ranks!
    rank 2: RuntimeError: Mesh should not be bigger than default world size 4, but found 6
        ranks!
    rank 3: RuntimeError: Mesh should not be bigger than default world size 4, but found 6
        ranks!
    ranks 0 to 2 only
    rank 0: works
    rank 1: works
    rank 2: works
    rank 3: IndexError: list index out of range
"""

# --8<-- [start:body]
import os
import textwrap

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()


def attempt(title, make_mesh):
    """Make a mesh and use it; print what each rank is told."""
    try:
        model = fully_shard(nn.Linear(4, 4).to(device), mesh=make_mesh())
        model(torch.ones(2, 4, device=device))
        told = "works"
    except Exception as error:
        told = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    everyone = [None] * 4
    dist.all_gather_object(everyone, told)
    if rank == 0:
        print(title)
        for number, text in enumerate(everyone):
            print(textwrap.fill(f"rank {number}: {text}", 88, subsequent_indent="    "))


attempt("two blocks of three ranks", lambda: init_device_mesh(device.type, (2, 3)))
attempt("ranks 0 to 2 only", lambda: DeviceMesh(device.type, [0, 1, 2]))

dist.destroy_process_group()
# --8<-- [end:body]
