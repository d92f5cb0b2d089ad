"""Save a layer that differs from group to group, without losing a version.

Why: a full state dict has one place for a name. A layer in a small group exists in several
versions under one name, so the file that the first rank writes has one of them, and nobody
misses the others before the training is resumed. Here that is refused, and the message says
what else there is.

torch's FSDP1 gives each rank the version of its own group, and says nothing.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 versions_in_a_state_dict_torch_fsdp1.py

Expected output:

    0.weight: 1 version on four ranks, one in rank 0's dict
    1.weight: 2 versions on four ranks, one in rank 0's dict
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()


def trained(groups):
    """Train one step with the second layer in groups of two; each rank has its own data."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, bias=False).to(device) for _ in range(2)]
    layers[1] = FullyShardedDataParallel(layers[1], process_group=groups, device_id=device)
    model = FullyShardedDataParallel(nn.Sequential(*layers), device_id=device)
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 4).to(device)).square().mean().backward()
    optimizer.step()
    return model


pairs, _ = dist.new_subgroups(group_size=2)
model = trained(pairs)
with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
    saved = model.state_dict()  # collective
states = [None] * 4
dist.all_gather_object(states, {name: value.flatten().tolist() for name, value in saved.items()})
if rank == 0:
    for name in states[0]:
        count = len({tuple(state[name]) for state in states})
        print(
            f"{name}: {count} version{'s' if count > 1 else ''} on four ranks, one in rank 0's dict"
        )

dist.destroy_process_group()
# --8<-- [end:body]
