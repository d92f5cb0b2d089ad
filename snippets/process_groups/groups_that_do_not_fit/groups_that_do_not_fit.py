"""Ask for groups that do not fit together, and read what each rank is told.

Why: making a group is a collective, so ranks that ask for different ones wait for each other.
Here the requests are compared first: all ranks get an error that names the unit and both
requests, and none hangs. A word that makes no groups of this world is refused at once. The
last case is two words that are easily mixed up: on four ranks their groups are equally large.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 groups_that_do_not_fit.py

Expected output:

    'set3', which does not divide 4: 4 of 4 ranks get an error
      [rank 0] FSDP201 unit 'Linear', process_group='set3': expected a number that divides
      the world size 4, found 3. Divisors are 1, 2, 4.
      [rank 3] FSDP201 unit 'Linear', process_group='set3': expected a number that divides
      the world size 4, found 3. Divisors are 1, 2, 4.
    [0, 1] on ranks 0 and 1, 'self' on the others, which fits: 0 of 4 ranks get an error
      nothing
      nothing
    [0, 1, 2] on ranks 0 to 2, [2, 3] on rank 3: 4 of 4 ranks get an error
      [rank 0] FSDP203 process groups: unit '0': expected all of ranks 2-3 to ask for this
      group, found rank 3 asking for ranks 2-3 (unit '0', process_group=[2, 3]); rank 2
      asking for ranks 0-2 (unit '0', process_group=[0, 1, 2]). Give the same word on every
      rank, or lists that do not overlap.
      [rank 3] FSDP203 process groups: unit '0': expected all of ranks 2-3 to ask for this
      group, found rank 3 asking for ranks 2-3 (unit '0', process_group=[2, 3]); rank 2
      asking for ranks 0-2 (unit '0', process_group=[0, 1, 2]). Give the same word on every
      rank, or lists that do not overlap.
    'set2' on ranks 0 to 2, 'mod2' on rank 3: 4 of 4 ranks get an error
      [rank 0] FSDP203 process groups: unit '0': expected all of ranks 2-3 to ask for this
      group, found rank 2 asking for ranks 2-3 (unit '0', process_group='set2'); rank 3
      asking for ranks 1,3 (unit '0', process_group='mod2'). Give the same word on every
      rank, or lists that do not overlap.
      [rank 3] FSDP203 process groups: unit '0': expected all of ranks 2-3 to ask for this
      group, found rank 2 asking for ranks 2-3 (unit '0', process_group='set2'); rank 3
      asking for ranks 1,3 (unit '0', process_group='mod2'). Give the same word on every
      rank, or lists that do not overlap.

    set2 on 4 ranks: 2 groups of 2
      0 1
      2 3
    mod2 on 4 ranks: 2 groups of 2
      0 2
      1 3

    set2 on 8 ranks: 4 groups of 2
      0 1
      2 3
      4 5
      6 7
    mod2 on 8 ranks: 2 groups of 4
      0 2 4 6
      1 3 5 7
"""

# --8<-- [start:body]
import os
import textwrap

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel
from fsdp_ref.errors import FSDPError
from fsdp_ref.process_groups import table

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()


def attempt(title, group):
    """Use a model with an inner unit in a group; print what ranks 0 and 3 are told."""
    torch.manual_seed(0)
    told = "nothing"
    try:
        layer = FullyShardedDataParallel(nn.Linear(4, 4, device=device), process_group=group)
        model = FullyShardedDataParallel(nn.Sequential(layer))
        model(torch.ones(2, 4, device=device))
    except FSDPError as error:
        told = str(error)
    everyone = [None] * world_size
    dist.all_gather_object(everyone, told)
    if rank == 0:
        print(f"{title}: {sum(text != 'nothing' for text in everyone)} of 4 ranks get an error")
        indent = {"initial_indent": "  ", "subsequent_indent": "  "}
        for text in (everyone[0], everyone[3]):
            print(textwrap.fill(text, 88, **indent))


attempt("'set3', which does not divide 4", "set3")
attempt("[0, 1] on ranks 0 and 1, 'self' on the others, which fits", [0, 1] if rank < 2 else "self")
attempt("[0, 1, 2] on ranks 0 to 2, [2, 3] on rank 3", [0, 1, 2] if rank < 3 else [2, 3])
attempt("'set2' on ranks 0 to 2, 'mod2' on rank 3", "set2" if rank < 3 else "mod2")
if rank == 0:
    for ranks in (4, 8):
        print("", table("set2", world_size=ranks), table("mod2", world_size=ranks), sep="\n")

dist.destroy_process_group()
# --8<-- [end:body]
