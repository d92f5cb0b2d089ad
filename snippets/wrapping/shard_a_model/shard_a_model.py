"""Shard a model by wrapping its layers while it is built.

`wrap` wraps only inside `enable_wrap`, so one model definition serves both a laptop and a
cluster. Each rank stores an equal share of every layer and still computes the plain model's
output.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 shard_a_model.py

Expected output:

    the plain model: 2,632 elements on every rank
    sharded: 1,316 elements on rank 0
    sharded: 1,316 elements on rank 1
    sample    plain  sharded
         0   -0.688   -0.688
         1    0.039    0.039
         2    0.081    0.081
         3   -1.010   -1.010
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel, enable_wrap, wrap


class TwoLayers(nn.Module):
    """Two linear layers, each handed to `wrap`, which does nothing outside `enable_wrap`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)  # every rank builds the same model
        self.first = wrap(nn.Linear(32, 64))
        self.second = wrap(nn.Linear(64, 8))

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


dist.init_process_group()  # gloo on CPU, NCCL on GPUs
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

plain = TwoLayers().to(device)  # outside the context nothing is wrapped
with enable_wrap(wrapper_cls=FullyShardedDataParallel, device_id=device):
    sharded = wrap(TwoLayers())  # both layers, then the whole: the root

torch.manual_seed(1)
x = torch.randn(4, 32).to(device)
stored = [None] * dist.get_world_size()
dist.all_gather_object(stored, sum(p.numel() for p in sharded.parameters()))
plain_sums, sharded_sums = (model(x).sum(dim=1).tolist() for model in (plain, sharded))

if dist.get_rank() == 0:
    print(f"the plain model: {sum(p.numel() for p in plain.parameters()):,} elements on every rank")
    for rank, numel in enumerate(stored):
        print(f"sharded: {numel:,} elements on rank {rank}")
    print("sample    plain  sharded")
    for sample, (before, after) in enumerate(zip(plain_sums, sharded_sums, strict=True)):
        print(f"{sample:6}  {before:7.3f}  {after:7.3f}")
dist.destroy_process_group()
# --8<-- [end:body]
