"""Clip gradients with the model's own method: only it knows the true norm.

Why: each rank holds a part of every gradient. `torch.nn.utils.clip_grad_norm_` sees that
part alone, so each rank finds another norm, too small, and scales by another factor.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 clip_by_the_true_norm.py

Expected output:

    one process: norm 5.3630, to be clipped to 2.6815
    the utility finds 1.6181, 5.1131, leaves 3.1319
    the method  finds 5.3630, 5.3630, leaves 2.6815
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel

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


def sharded_model():
    """Build, shard and run one backward on this rank's part of the batch."""
    model = FullyShardedDataParallel(build())
    model(mine).square().sum().backward()
    return model


def on_each_rank(norm):
    """Collect one number from every rank, as text."""
    norms = [None] * world_size
    dist.all_gather_object(norms, f"{norm.item():.4f}")
    return ", ".join(norms)


def norm_of_all_shards(model):
    """Measure the gradient that the optimizer will see, over all ranks together."""
    squares = [parameter.grad.square().sum() for parameter in model.parameters()]
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    return total.sqrt()


plain = build()
(plain(batch).square().sum() / world_size).backward()
true_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), float("inf"))
max_norm = true_norm.item() / 2

model = sharded_model()
by_utility = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
utility = (on_each_rank(by_utility), norm_of_all_shards(model).item())

model = sharded_model()
by_method = model.clip_grad_norm_(max_norm)
method = (on_each_rank(by_method), norm_of_all_shards(model).item())

if rank == 0:
    print(f"one process: norm {true_norm.item():.4f}, to be clipped to {max_norm:.4f}")
    print("the utility finds {}, leaves {:.4f}".format(*utility))
    print("the method  finds {}, leaves {:.4f}".format(*method))

dist.destroy_process_group()
# --8<-- [end:body]
