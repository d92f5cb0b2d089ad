"""Let small units share messages: how many are sent, and what is in memory at once.

Why: a message costs the same below some size, however short it is. A model of many small
units spends its time on messages. After one step, neighbours are gathered and reduced
together, as long as their full parameters stay below a cap.

The model has 24 small layers, each a unit. By default the cap is one eighth of them.
`bucket_cap_mb=0` lets every unit send for itself; a large cap joins all of them, and then
the whole model is gathered at once. The numbers of elements are those of one step.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 small_units.py

Expected output:

    cap      all-gathers  reduce-scatters  elements sent  gathered at once
    none     49           25               2628           180
    default  25           13               2628           252
    huge     3            2                2628           1836
    the same weights afterwards, to the last bit: True
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel, ModuleWrapPolicy, timeline

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()


class Layer(nn.Module):
    """A small residual layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def train(cap):
    """Train three steps; return what the last one did, and the weights."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(Layer() for _ in range(24)), nn.Linear(8, 4)).to(device)
    model = FullyShardedDataParallel(
        layers, auto_wrap_policy=ModuleWrapPolicy({Layer}), bucket_cap_mb=cap
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(3):
        batch = torch.randn(4, 8, device=device)
        with timeline() as recorded:
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return recorded, model.state_dict()


def messages(recorded, operation):
    """Count messages: what went along with another unit is none of its own."""
    events = [event for event in recorded.events if event.operation == operation]
    return sum(not event.together_with for event in events)


all_weights = []
rows = [("cap", "all-gathers", "reduce-scatters", "elements sent", "gathered at once")]
for name, cap in (("none", 0), ("default", None), ("huge", 1000)):
    recorded, weights = train(cap)
    all_weights.append(weights)
    floats = [event for event in recorded.events if event.dtype == torch.float32]
    rows.append(
        (
            name,
            messages(recorded, "all-gather"),
            messages(recorded, "reduce-scatter"),
            sum(event.bytes_on_wire for event in floats) // 4,  # four bytes in each float32
            recorded.peak_unsharded_bytes // 4,
        )
    )
same = all(
    torch.equal(value, other[key])
    for other in all_weights[1:]
    for key, value in all_weights[0].items()
)
if rank == 0:
    for row in rows:
        print("{:9}{:13}{:17}{:15}{}".format(*map(str, row)))
    print(f"the same weights afterwards, to the last bit: {same}")

dist.destroy_process_group()
# --8<-- [end:body]
