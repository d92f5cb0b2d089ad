"""Save a layer that differs from group to group, without losing a version.

Why: a full state dict has one place for a name. A layer in a small group exists in several
versions under one name, so the file that the first rank writes has one of them, and nobody
misses the others before the training is resumed. Here that is refused, and the message says
what else there is.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 versions_in_a_state_dict.py

Expected output:

    [rank 0] FSDP406 unit 'root', state_dict: expected one version of each weight, found 2
      versions of '1.weight', of which ranks 0, 1 and ranks 2, 3 have one each. Ask for them
      all with state_dict_type("full", replicas="all"), for this rank's with
      replicas="mine", or for the sharded form.
    replicas='all' on rank 0: ['0.weight', '1.weight@rank0', '1.weight@rank2']
    replicas='mine' on rank 0: ['0.weight', '1.weight']
"""

# --8<-- [start:body]
import os
import textwrap

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel
from fsdp_ref.errors import ReplicasDifferError

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()


def trained(groups):
    """Train one step with the second layer in groups of two; each rank has its own data."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, bias=False).to(device) for _ in range(2)]
    layers[1] = FullyShardedDataParallel(layers[1], process_group=groups)
    model = FullyShardedDataParallel(nn.Sequential(*layers))
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 4).to(device)).square().mean().backward()
    optimizer.step()
    return model


model = trained("set2")
try:
    model.state_dict()
except ReplicasDifferError as error:
    if rank == 0:
        print(textwrap.fill(str(error), 88, subsequent_indent="  "))
for replicas in ("all", "mine"):
    with FullyShardedDataParallel.state_dict_type(model, "full", replicas=replicas):
        saved = model.state_dict()
    if rank == 0:
        print(f"replicas={replicas!r} on rank 0: {list(saved)}")

dist.destroy_process_group()
# --8<-- [end:body]
