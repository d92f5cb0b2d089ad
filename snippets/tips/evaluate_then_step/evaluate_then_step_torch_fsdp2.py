"""Evaluate after the step, or call `reshard()` between the evaluation and the step.

Why: gathered weights may be kept after a forward, to save the next all-gather. By default
`fully_shard` keeps the root's, and with `reshard_after_forward=False` all of them. If a
step follows, the next forward computes with the old ones, and nothing is said.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 evaluate_then_step_torch_fsdp2.py

Expected output:

    no step at all                                 error 0.0563
    None: train, step                              error 0.0000
    None: train, evaluate, step                    error 0.0409
    False: train, step                             error 0.0000
    False: train, evaluate, step                   error 0.0563
    True: train, step                              error 0.0000
    True: train, evaluate, step                    error 0.0000
    None: train, evaluate, reshard(), step         error 0.0000
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(device.type, (world_size,))

torch.manual_seed(1)
batch = torch.randn(8, 6).to(device)
mine = batch.chunk(world_size)[rank]


def build():
    """Build the same three layers on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)).to(device)


def sharded(reshard_after_forward):
    """Shard the middle layer as a unit, and the rest in the root."""
    arguments = {"mesh": mesh, "reshard_after_forward": reshard_after_forward}
    model = build()
    fully_shard(model[1], **arguments)
    return fully_shard(model, **arguments)


def output_after_a_step(model, data, evaluate, before_step=lambda: None):
    """Train one step, evaluating between backward and step if asked; return the next output."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(data).square().mean().backward()
    if evaluate:
        with torch.no_grad():
            model(data)
    before_step()
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
for setting in [None, False, True]:
    report(f"{setting}: train, step", output_after_a_step(sharded(setting), mine, evaluate=False))
    output = output_after_a_step(sharded(setting), mine, evaluate=True)
    report(f"{setting}: train, evaluate, step", output)

model = sharded(None)
output = output_after_a_step(model, mine, evaluate=True, before_step=model.reshard)
report("None: train, evaluate, reshard(), step", output)

dist.destroy_process_group()
# --8<-- [end:body]
