"""Put a checkpoint outside or inside of a unit: how often each order gathers.

Why: a recomputed forward needs its weights again. If they are dropped between the second
forward and its backward, or the unit's hooks run once more for it, that is one more
all-gather for every block, in every step.

The older form of checkpointing runs a backward of its own inside the backward: it is called
re-entrant. The form without is `use_reentrant=False`. Three blocks are units, and the root
holds the first and the last layer. With a checkpoint and without, gradients are equal.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 order_of_checkpoint.py

Expected output:

    torch 2.13.0: all-gathers in the     forward  backward
    block                                      4         3
    unit(checkpoint(block))                    4         3
    checkpoint(unit(block))                    4         3
    unit(checkpoint(block)) re-entrant         4         3
    checkpoint(unit(block)) re-entrant         4         6
    gradients equal those without a checkpoint: [True, True, True, True]
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_ref import FullyShardedDataParallel, timeline

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()
version = torch.__version__.partition("+")[0]


class Recomputed(nn.Module):
    """Keep a module's input only, and run it again in the backward."""

    def __init__(self, module, reentrant):
        super().__init__()
        self.module = module
        self.reentrant = reentrant

    def forward(self, batch):
        return checkpoint(self.module, batch, use_reentrant=self.reentrant)


def unit(module):
    """Shard a module."""
    return FullyShardedDataParallel(module)


def block(order, reentrant):
    """Build one block in the order asked for."""
    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(device)
    if order == "unit(checkpoint(block))":
        return unit(Recomputed(layer, reentrant))
    if order == "checkpoint(unit(block))":
        return Recomputed(unit(layer), reentrant)
    return unit(layer)


def measure(order, reentrant=False):
    """Train one step; print a row, and return the gradient shards."""
    torch.manual_seed(0)
    first, last = nn.Linear(8, 8).to(device), nn.Linear(8, 1).to(device)
    model = unit(nn.Sequential(first, *(block(order, reentrant) for _ in range(3)), last))
    with timeline() as recorded:
        loss = model(torch.ones(4, 8, device=device)).square().mean()
        in_forward = len(recorded.lines("all-gather"))
        loss.backward()
    in_backward = len(recorded.lines("all-gather")) - in_forward
    if rank == 0:
        form = "re-entrant" if reentrant else ""
        print(f"{order:24}{form:10} {in_forward:9} {in_backward:9}")
    return [parameter.grad for parameter in model.parameters()]


if rank == 0:
    print(f"{f'torch {version}: all-gathers in the':34}   forward  backward")
plain = measure("block")
others = [
    measure("unit(checkpoint(block))"),
    measure("checkpoint(unit(block))"),
    measure("unit(checkpoint(block))", reentrant=True),
    measure("checkpoint(unit(block))", reentrant=True),
]
equal = [all(torch.equal(p, g) for p, g in zip(plain, other, strict=True)) for other in others]
if rank == 0:
    print(f"gradients equal those without a checkpoint: {equal}")

dist.destroy_process_group()
# --8<-- [end:body]
