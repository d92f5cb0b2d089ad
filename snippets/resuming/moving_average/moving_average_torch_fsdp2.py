"""Average the weights over time, each rank its own shards.

A module from `fully_shard` cannot be copied, so `AveragedModel` fails. A second sharded model takes
its place: every rank moves its rows towards those of the first.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 moving_average_torch_fsdp2.py

Expected output:

    AveragedModel: AssertionError: FSDP does not support deepcopy
    the average on this rank: 89 of 161
    loss of the model:        0.394
    loss of the average:      0.525, of a plain one: 0.525
    weights differ by:        0.0000
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()
samples = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(device)


def build():
    """Build the plain model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)


def sharded():
    """Build the model and shard it."""
    model = build()
    fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    return model


def loss_of(model):
    """Return the mean square of what is missing to the sum of a sample."""
    return (model(samples) - samples.sum(1, keepdim=True)).square().mean()


class Average:
    """A second sharded model, moved towards the first one."""

    def __init__(self):
        self.module, self.part = sharded(), 1.0  # the first update copies

    @torch.no_grad()
    def update_parameters(self, model):
        """Update shard by shard; nothing is sent."""
        for mine, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, self.part)
        self.part = 0.5


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
expected.update_parameters(plain)

model = sharded()
try:
    AveragedModel(model)
except AssertionError as problem:
    refusal = f"{type(problem).__name__}: {str(problem).partition('. ')[0]}"

average = Average()
train(model, average)
average.update_parameters(model)

with torch.no_grad():
    losses = [loss_of(one).item() for one in (model, average.module, expected)]  # collective
weights = get_model_state_dict(
    average.module, options=StateDictOptions(full_state_dict=True)
)  # collective
pairs = zip(weights.values(), expected.module.state_dict().values(), strict=True)
difference = max((a - b).abs().max().item() for a, b in pairs)
if rank == 0:
    held = sum(parameter.to_local().numel() for parameter in average.module.parameters())
    print(f"AveragedModel: {refusal}")
    print(f"the average on this rank: {held} of {sum(p.numel() for p in plain.parameters())}")
    print(f"loss of the model:        {losses[0]:.3f}")
    print(f"loss of the average:      {losses[1]:.3f}, of a plain one: {losses[2]:.3f}")
    print(f"weights differ by:        {difference:.4f}")

dist.destroy_process_group()
# --8<-- [end:body]
