"""Find the part of memory that does not fit: change one thing, and see which part moves.

Why: three parts add up, and each has a cure of its own. What rests between steps shrinks with
the number of ranks. What is gathered at once depends on the units. Activations depend on this
rank's batch alone, and sharding does nothing for them.

All numbers are elements on rank 0: shards, gradients and the state of AdamW after a step; the
most elements of full parameters at any moment; results of layers that are still in memory after
the forward, because the backward needs them.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 parts_of_memory_torch_fsdp1.py

Expected output:

                                              rests  gathered  activations
    one unit, over two ranks                  17025      8512        10240
    over four ranks: what rests falls          8513      8512        10240
    a unit per block: what is gathered falls   8516      4256        10240
    half the batch: activations fall           8516      4256         5120
    recompute: they fall at the same batch     8516      4256         2048
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
groups = {2: pairs[rank // 2], 4: dist.new_group()}


class Block(nn.Module):
    """Two layers around a wide middle, recomputed in the backward if asked."""

    def __init__(self, recompute):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        self.recompute = recompute

    def forward(self, batch):
        if self.recompute:
            return checkpoint(self.body, batch, use_reentrant=False)
        return self.body(batch)


def wrap(model, per_block, over):
    """Make one unit of the model, or one of each block as well, over so many ranks."""
    options = {"process_group": groups[over], "device_id": device}
    for index in range(len(model)) if per_block else []:
        model[index] = FullyShardedDataParallel(model[index], **options)
    return FullyShardedDataParallel(model, **options)


def gathered_elements(model):
    """Add up the elements of all full flat parameters that hold memory now (private)."""
    flat_params = [p for p in model.parameters() if hasattr(p, "_full_param_padded")]
    full = [flat_param._full_param_padded for flat_param in flat_params]
    return sum(tensor.untyped_storage().nbytes() // 4 for tensor in full)


def measure(case, *, rows=32, over=4, per_block=True, recompute=False):
    """Train one step, and print a row of the table."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block(recompute) for _ in range(4))).to(device)
    results, gathered = {}, []

    def look(layer, args, output):
        results[StorageWeakRef(output.untyped_storage())] = output.numel()

    for layer in plain.modules():
        if isinstance(layer, nn.Linear | nn.Tanh):
            layer.register_forward_hook(look)
            layer.register_full_backward_hook(lambda *_: gathered.append(gathered_elements(model)))
    model = wrap(plain, per_block, over)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss = model(torch.ones(rows, 16, device=device)).square().mean()
    activations = sum(numel for result, numel in results.items() if not result.expired())
    loss.backward()
    optimizer.step()
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    shards = list(model.parameters())
    rests = sum(tensor.numel() for tensor in [*shards, *(p.grad for p in shards), *state])
    if rank == 0:
        print(f"{case:40} {rests:6} {max(gathered):9} {activations:12}")


if rank == 0:
    print(f"{'':41} rests  gathered  activations")
measure("one unit, over two ranks", over=2, per_block=False)
measure("over four ranks: what rests falls", per_block=False)
measure("a unit per block: what is gathered falls")
measure("half the batch: activations fall", rows=16)
measure("recompute: they fall at the same batch", recompute=True)

dist.destroy_process_group()
# --8<-- [end:body]
