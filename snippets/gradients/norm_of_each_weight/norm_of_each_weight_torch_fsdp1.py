"""Log the gradient norm of every weight, without gathering a gradient.

Why: a norm per layer shows where a gradient vanishes or explodes. The full gradient is on no
rank, and it is not needed: squares add up over shards, so one small all-reduce gives the
norms of all weights.

With `use_orig_params=True` each weight has its piece of the gradient under its own name. A
piece may be empty on a rank; its gradient is `None` there, which counts as zero.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 norm_of_each_weight_torch_fsdp1.py

Expected output:

    weight    one process  sharded
    0.weight  0.10295      0.10295
    0.bias    0.06741      0.06741
    2.weight  0.25417      0.25417
    2.bias    0.18056      0.18056
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

torch.manual_seed(1)
batch = torch.randn(8, 6).to(device)
mine = batch.chunk(world_size)[rank]


def build():
    """Build the same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)


plain = build()
plain(batch).square().mean().backward()
truth = {name: parameter.grad.norm().item() for name, parameter in plain.named_parameters()}

model = FullyShardedDataParallel(build(), use_orig_params=True, device_id=device)
model(mine).square().mean().backward()
named = dict(model.named_parameters())
squares = []
for name in truth:
    gradient = named[f"_fsdp_wrapped_module.{name}"].grad
    squares.append(torch.zeros((), device=device) if gradient is None else gradient.square().sum())
norms = torch.stack(squares)
dist.all_reduce(norms)
norms = norms.sqrt()

if rank == 0:
    print("weight    one process  sharded")
    for (name, true_norm), norm in zip(truth.items(), norms.tolist(), strict=True):
        print(f"{name:9} {true_norm:.5f}      {norm:.5f}")

dist.destroy_process_group()
# --8<-- [end:body]
