"""Save an optimizer's state through torch's helper, which brings the pieces together.

Why: `optimizer.state_dict()` has a `DTensor` for each weight, of which this rank holds its
rows only. The helper gathers the state of whole weights under the plain model's names, and
brings it into a plain optimizer, too.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 save_the_optimizer_torch_fsdp2.py

Expected output:

    optimizer.state_dict() on rank 0 remembers 89 of 178 elements
    get_optimizer_state_dict on rank 0 remembers 178 of 178 elements
    a plain optimizer that goes on with it differs by 0.0000
"""

# --8<-- [start:body]
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()
mesh = init_device_mesh(device.type, (dist.get_world_size(),))


def build():
    """Build the plain model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def step(model, optimizer):
    """Train one step."""
    optimizer.zero_grad()
    model(torch.ones(4, 8, device=next(model.parameters()).device)).square().sum().backward()
    optimizer.step()


def remembered(state_dict):
    """Count the elements of the first moments."""
    moments = [values["exp_avg"] for values in state_dict["state"].values()]
    here = [one.to_local() if isinstance(one, DTensor) else one for one in moments]
    return sum(one.numel() for one in here)


model = build().to(device)
numel = sum(weight.numel() for weight in model.parameters())
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
step(model, optimizer)

own = optimizer.state_dict()
options = StateDictOptions(full_state_dict=True)
whole = get_optimizer_state_dict(model, optimizer, options=options)  # collective
weights = get_model_state_dict(model, options=options)
whole = copy.deepcopy(whole)  # or it counts further steps, too
step(model, optimizer)
trained = get_model_state_dict(model, options=options)

if rank == 0:
    print(f"optimizer.state_dict() on rank 0 remembers {remembered(own)} of {numel} elements")
    print(f"get_optimizer_state_dict on rank 0 remembers {remembered(whole)} of {numel} elements")
    alone = build()
    alone.load_state_dict(weights)
    goes_on = torch.optim.Adam(alone.parameters(), lr=0.01)
    set_optimizer_state_dict(alone, goes_on, whole)
    step(alone, goes_on)
    pairs = [(value, trained[name].cpu()) for name, value in alone.state_dict().items()]
    difference = max((a - b).abs().max().item() for a, b in pairs)
    print(f"a plain optimizer that goes on with it differs by {difference:.4f}")

dist.destroy_process_group()
# --8<-- [end:body]
