"""Evaluate after the step: an evaluation before it leaves old weights in memory.

Why: gathered weights may be kept after a forward, to save the next all-gather. FSDP1 keeps
the root's, and with SHARD_GRAD_OP all of them. If a step follows, the next forward
computes with the old ones, and nothing is said. Backward frees them.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 evaluate_then_step_torch_fsdp1.py

Expected output:

    no step at all                                 error 0.0563
    FULL_SHARD: train, step                        error 0.0000
    FULL_SHARD: train, evaluate, step              error 0.0409
    SHARD_GRAD_OP: train, step                     error 0.0000
    SHARD_GRAD_OP: train, evaluate, step           error 0.0563
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(1)
batch = torch.randn(8, 6).to(device)
mine = batch.chunk(world_size)[rank]


def build():
    """Build the same three layers on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)).to(device)


def sharded(strategy):
    """Shard the middle layer as a unit, and the rest in the root."""
    arguments = {"device_id": device, "sharding_strategy": strategy}
    model = build()
    model[1] = FullyShardedDataParallel(model[1], **arguments)
    return FullyShardedDataParallel(model, **arguments)


def output_after_a_step(model, data, evaluate):
    """Train one step, evaluating between backward and step if asked; return the next output."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(data).square().mean().backward()
    if evaluate:
        with torch.no_grad():
            model(data)
    optimizer.step()
    with torch.no_grad():
        return model(mine)


plain = build()
truth = output_after_a_step(plain, batch, evaluate=True)


def report(case, output):
    """Print the largest error against one plain process."""
    error = (output - truth).abs().max()
    dist.all_reduce(error, dist.ReduceOp.MAX)
    if rank == 0:
        print(f"{case:46} error {error.item():.4f}")


report("no step at all", build()(mine).detach())
for strategy in [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]:
    name = strategy.name
    report(f"{name}: train, step", output_after_a_step(sharded(strategy), mine, evaluate=False))
    output = output_after_a_step(sharded(strategy), mine, evaluate=True)
    report(f"{name}: train, evaluate, step", output)

dist.destroy_process_group()
# --8<-- [end:body]
