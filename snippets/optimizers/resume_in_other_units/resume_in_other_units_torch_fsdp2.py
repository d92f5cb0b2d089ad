"""Go on with an optimizer in a model that is wrapped otherwise.

Why: the state of whole weights, by name, fits any wrapping and any number of ranks. Groups
find their weights by name too, so each keeps its learning rate.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 resume_in_other_units_torch_fsdp2.py

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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
options = StateDictOptions(full_state_dict=True)


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


model = build()
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = optimizer_of(model)
step(model, optimizer)

weights, state = get_state_dict(model, optimizer, options=options)  # collective
if rank == 0:
    for group in state["param_groups"]:
        print(f"lr {group['lr']}: {', '.join(group['params'])}")
    momentum = state["state"]["0.weight"]["momentum_buffer"]
    print(f"momentum of 0.weight: {tuple(momentum.shape)}")

other = build()
fully_shard(other, mesh=mesh)  # one unit instead of two
resumed = optimizer_of(other)
set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=state, options=options)

step(model, optimizer)
step(other, resumed)
trained, resumed_weights = (
    get_state_dict(one, its, options=options)[0]
    for one, its in ((model, optimizer), (other, resumed))
)
pairs = zip(trained.values(), resumed_weights.values(), strict=True)
difference = max((a - b).abs().max().item() for a, b in pairs)
if rank == 0:
    print(f"after one more step the two models differ by {difference:.4f}")

dist.destroy_process_group()
# --8<-- [end:body]
