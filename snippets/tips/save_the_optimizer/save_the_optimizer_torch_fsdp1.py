"""Save an optimizer's state through the model, which brings the pieces together.

Why: `optimizer.state_dict()` has what this rank's optimizer remembers, the state of shards.
Nothing says so. `optim_state_dict` gathers the state of whole weights under the plain
model's names. In it, the weights of one unit share one tensor that counts the steps. A plain
optimizer that takes it over advances that tensor once for each of them, and its steps differ.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 save_the_optimizer_torch_fsdp1.py

Expected output:

    optimizer.state_dict() on rank 0 remembers 89 of 178 elements
    optim_state_dict on rank 0 remembers 178 of 178 elements
    a plain optimizer that goes on with it differs by 0.0014
"""

# --8<-- [start:body]
import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()
# The two methods below announce that others will take their place.
warnings.simplefilter("ignore", FutureWarning)


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
    return sum(values["exp_avg"].numel() for values in state_dict["state"].values())


plain = build().to(device)
numel = sum(weight.numel() for weight in plain.parameters())
plain[0] = FullyShardedDataParallel(plain[0], device_id=device)
model = FullyShardedDataParallel(plain, device_id=device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
step(model, optimizer)

own = optimizer.state_dict()
whole = FullyShardedDataParallel.optim_state_dict(model, optimizer)  # collective
weights = model.state_dict()
step(model, optimizer)
trained = model.state_dict()

if rank == 0:
    print(f"optimizer.state_dict() on rank 0 remembers {remembered(own)} of {numel} elements")
    print(f"optim_state_dict on rank 0 remembers {remembered(whole)} of {numel} elements")
    alone = build()
    alone.load_state_dict(weights)
    goes_on = torch.optim.Adam(alone.parameters(), lr=0.01)
    rekey = FullyShardedDataParallel.rekey_optim_state_dict
    goes_on.load_state_dict(rekey(whole, OptimStateKeyType.PARAM_ID, alone, optim=goes_on))
    step(alone, goes_on)
    pairs = [(value, trained[name].cpu()) for name, value in alone.state_dict().items()]
    difference = max((a - b).abs().max().item() for a, b in pairs)
    print(f"a plain optimizer that goes on with it differs by {difference:.4f}")

dist.destroy_process_group()
# --8<-- [end:body]
