"""Train adapters beside frozen weights, in one unit.

Why: an adapter sits inside of the layer that it adapts, so frozen and trainable weights are in
one unit. What is frozen must not move, not even by weight decay. Nor should its gradient take
part in the reduction, or adapters cost what training the whole model costs.

The first two columns are the elements that a rank reduces in a step, and those that AdamW
keeps on both ranks. Then the largest change of a frozen weight, and the largest error of a trained
one against one process, after three steps with weight decay.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 frozen_and_adapters_torch_fsdp2.py

Expected output:

                        reduced  optimizer  base moved error
    everything trained      336       1344      0.0307 0.0000
    base frozen              64        256      0.0000 0.0000
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(device.type, (world_size,))

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
    states = [entry["exp_avg"] for entry in optimizer.state.values()]
    return 2 * sum(s.to_local().numel() if isinstance(s, DTensor) else s.numel() for s in states)


def report(case, frozen):
    """Train beside one process, and print a row."""
    start, plain = build(frozen).state_dict(), build(frozen)
    train(plain, batch)
    model = build(frozen)
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    with CountReduced() as counted:
        model(mine).square().mean().backward()
    reduced = counted.elements
    kept = torch.tensor(train(model, mine), device=device)
    dist.all_reduce(kept)
    weights = {name: weight.full_tensor() for name, weight in model.state_dict().items()}
    truth = plain.state_dict()
    moved = max((weights[name] - start[name]).abs().max() for name in weights if "base" in name)
    error = max((weights[name] - truth[name]).abs().max() for name in weights)
    if rank == 0:
        print(f"{case:19} {reduced:7} {kept.item():10} {moved.item():11.4f} {error.item():6.4f}")


if rank == 0:
    print(f"{'':20}reduced  optimizer  base moved error")
report("everything trained", frozen=False)
report("base frozen", frozen=True)

dist.destroy_process_group()
# --8<-- [end:body]
