"""Take an optimizer step on shards: an all-reduce, split in two.

Why: data parallelism averages gradients with an all-reduce, and then every rank makes the same
update of the whole model. An all-reduce can be done in two halves. A reduce-scatter leaves each
rank the mean of one piece; an all-gather hands the pieces around. Between the two there is
room for the update, of one piece on each rank. That is sharded data parallelism: the same bytes,
the same result, and each rank needs optimizer state for its own piece only.

torch's FSDP2 does the same; it does not say what it sends.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 two_collectives_for_one_torch_fsdp2.py

Expected output:

    the gradient has 256 bytes, a piece of it 64
    an optimizer with two moments keeps, on each rank:
      with an all-reduce:     512 bytes
      between the two halves: 128 bytes
    the new weight is the same, up to rounding:
      by hand:   True
      the class: True
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
layer = nn.Linear(8, 8, bias=False, device=device)
whole = layer.weight.detach().clone()
batch = torch.randn(4, world_size, 8, device=device)[:, rank]  # each rank has data of its own

# One rank's gradient, computed on the whole weight.
layer(batch).square().mean().backward()
gradient = layer.weight.grad.flatten()

# Data parallelism: an all-reduce, then the same update everywhere.
mean = gradient.clone()
dist.all_reduce(mean)
replicated = whole.flatten() - 0.1 * mean / world_size

# Sharded: a reduce-scatter, an update of one piece, an all-gather.
piece = torch.empty_like(gradient.chunk(world_size)[rank])
dist.reduce_scatter_single(piece, gradient)
updated = whole.flatten().chunk(world_size)[rank] - 0.1 * piece / world_size
sharded = torch.empty_like(gradient)
dist.all_gather_single(sharded, updated)

# fully_shard does that.
layer.weight.grad = None
fully_shard(layer)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
layer(batch).square().mean().backward()
optimizer.step()
after = layer.weight.full_tensor()

if rank == 0:
    share = gradient.nbytes // world_size
    print(f"the gradient has {gradient.nbytes} bytes, a piece of it {share}")
    print("an optimizer with two moments keeps, on each rank:")
    print(f"  with an all-reduce:     {2 * gradient.nbytes} bytes")
    print(f"  between the two halves: {2 * updated.nbytes} bytes")
    print("the new weight is the same, up to rounding:")
    print(f"  by hand:   {torch.allclose(sharded, replicated)}")
    print(f"  the class: {torch.allclose(after, replicated.view(8, 8))}")

dist.destroy_process_group()
# --8<-- [end:body]
