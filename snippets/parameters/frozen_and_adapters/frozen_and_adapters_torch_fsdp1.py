"""Train adapters beside frozen weights, in one unit.

Why: an adapter sits inside of the layer that it adapts, so frozen and trainable weights are in
one unit. What is frozen must not move, not even by weight decay. Nor should its gradient take
part in the reduction, or adapters cost what training the whole model costs.

This class refuses the mix in a flat unit. With `use_orig_params=True` it takes it, and reduces
gradients for what is frozen as well. Adapters in units of their own avoid both.

The first two columns are the elements that a rank reduces in a step, and those that AdamW
keeps on both ranks. Then the largest change of a frozen weight, and the largest error of a trained
one against one process, after three steps with weight decay.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 frozen_and_adapters_torch_fsdp1.py

Expected output:

                        reduced  optimizer  base moved error
    everything trained      336       1344      0.0307 0.0000
    base frozen             336        256      0.0000 0.0000
    the same, flat      ValueError: 0 has both parameters with requires_grad=True and False
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(1)
batch = torch.randn(8, 16, device=device)
mine = batch.chunk(world_size)[rank]


class CountReduced(TorchDispatchMode):
    """Count the elements of this rank's shards as they are reduced, on any backend."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "reduce_scatter" in str(func):
            sizes = [x.numel() for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            self.elements += min(sizes)  # the smaller one is what comes out
        return func(*args, **(kwargs or {}))


class Adapted(nn.Module):
    """A frozen layer with a trainable detour of low rank."""

    def __init__(self, frozen):
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(not frozen)
        self.down = nn.Linear(16, 2, bias=False)
        self.up = nn.Linear(2, 16, bias=False)

    def forward(self, batch):
        return torch.tanh(self.base(batch) + self.up(self.down(batch)))


def build(frozen):
    """Build the same two layers on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(Adapted(frozen), Adapted(frozen)).to(device)


def train(model, data):
    """Take three steps; return how many elements the optimizer keeps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    states = [entry["exp_avg"].numel() for entry in optimizer.state.values()]
    return 2 * sum(states)


def report(case, frozen, use_orig_params=True):
    """Train beside one process, and print a row."""
    start, plain = build(frozen).state_dict(), build(frozen)
    train(plain, batch)
    options = {"auto_wrap_policy": ModuleWrapPolicy({Adapted}), "device_id": device}
    try:
        model = FullyShardedDataParallel(build(frozen), use_orig_params=use_orig_params, **options)
    except ValueError as error:
        if rank == 0:
            print(f"{case:19} {type(error).__name__}: {str(error).partition('.')[0]}")
        return
    with CountReduced() as counted:
        model(mine).square().mean().backward()
    reduced = counted.elements
    kept = torch.tensor(train(model, mine), device=device)
    dist.all_reduce(kept)
    weights, truth = model.state_dict(), plain.state_dict()
    moved = max((weights[name] - start[name]).abs().max() for name in weights if "base" in name)
    error = max((weights[name] - truth[name]).abs().max() for name in weights)
    if rank == 0:
        print(f"{case:19} {reduced:7} {kept.item():10} {moved.item():11.4f} {error.item():6.4f}")


if rank == 0:
    print(f"{'':20}reduced  optimizer  base moved error")
report("everything trained", frozen=False)
report("base frozen", frozen=True)
report("the same, flat", frozen=True, use_orig_params=False)

dist.destroy_process_group()
# --8<-- [end:body]
