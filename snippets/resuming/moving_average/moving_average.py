"""Average the weights over time, each rank its own shards.

Why: an average is taken element by element, so shards can be averaged without a message, and
they cost each rank a shard's memory. `AveragedModel` copies the sharded model and updates the
copy. What comes out is a model: it computes a loss, and its state dict is the plain model's.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 moving_average.py

Expected output:

    the average on this rank: 81 of 161
    messages in an update:    0
    loss of the model:        0.394
    loss of the average:      0.525, of a plain one: 0.525
    weights differ by:        0.0000
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fsdp_ref import FullyShardedDataParallel, timeline

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()
samples = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(device)


def build():
    """Build the plain model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)


def loss_of(model):
    """Return the mean square of what is missing to the sum of a sample."""
    return (model(samples) - samples.sum(1, keepdim=True)).square().mean()


def train(model, average):
    """Train, and update the average after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)


plain = build()
expected = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.5))
train(plain, expected)

model = FullyShardedDataParallel(build())
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
train(model, average)
with timeline() as recorded:
    average.update_parameters(model)
expected.update_parameters(plain)

with torch.no_grad():
    losses = [loss_of(one).item() for one in (model, average, expected)]  # collective
weights = average.module.state_dict()  # collective
plain.load_state_dict(weights)  # whole weights under the plain model's names
pairs = zip(weights.values(), expected.module.state_dict().values(), strict=True)
difference = max((a - b).abs().max().item() for a, b in pairs)
if rank == 0:
    held = sum(parameter.numel() for parameter in average.parameters())
    print(f"the average on this rank: {held} of {sum(p.numel() for p in plain.parameters())}")
    print(f"messages in an update:    {len(recorded.events)}")
    print(f"loss of the model:        {losses[0]:.3f}")
    print(f"loss of the average:      {losses[1]:.3f}, of a plain one: {losses[2]:.3f}")
    print(f"weights differ by:        {difference:.4f}")

dist.destroy_process_group()
# --8<-- [end:body]
