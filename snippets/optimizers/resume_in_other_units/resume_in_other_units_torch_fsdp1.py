"""Go on with an optimizer in a model that is wrapped otherwise.

Why: the state of whole weights, by name, fits any wrapping and any number of ranks. Groups
find their weights by name too, so each keeps its learning rate.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 resume_in_other_units_torch_fsdp1.py

Expected output:

    lr 0.1: 0.weight, 0.bias
    lr 0.01: 2.weight, 2.bias
    momentum of 0.weight: (16, 8)
    after one more step the two models differ by 0.0000
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
rank = dist.get_rank()


def build():
    """Build the plain model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).to(device)


def optimizer_of(model):
    """Let the first layer learn faster than the last one."""
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.1},
        {"params": list(model[2].parameters()), "lr": 0.01},
    ]
    return torch.optim.SGD(groups, momentum=0.9)


def step(model, optimizer):
    """Train one step."""
    optimizer.zero_grad()
    model(torch.ones(4, 8, device=device)).square().sum().backward()
    optimizer.step()


plain = build()
settings = {"device_id": device, "use_orig_params": True}
plain[0] = FullyShardedDataParallel(plain[0], **settings)
model = FullyShardedDataParallel(plain, **settings)
optimizer = optimizer_of(model)
step(model, optimizer)

state = FullyShardedDataParallel.optim_state_dict(model, optimizer)  # collective
weights = model.state_dict()
if rank == 0:
    for group in state["param_groups"]:
        print(f"lr {group['lr']}: {', '.join(group['params'])}")
    momentum = state["state"]["0.weight"]["momentum_buffer"]
    print(f"momentum of 0.weight: {tuple(momentum.shape)}")

other = FullyShardedDataParallel(build(), **settings)  # one unit instead of two
other.load_state_dict(weights)
resumed = optimizer_of(other)
to_load = FullyShardedDataParallel.optim_state_dict_to_load(other, resumed, state)
resumed.load_state_dict(to_load)

step(model, optimizer)
step(other, resumed)
pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
difference = max((a - b).abs().max().item() for a, b in pairs)
if rank == 0:
    print(f"after one more step the two models differ by {difference:.4f}")

dist.destroy_process_group()
# --8<-- [end:body]
