"""Read a training step in order, and count what it sends.

Why: a step is a fixed series of collectives, so its cost can be read off. Units other
than the root are gathered twice and reduced once, which is half as much again as under
DDP; the root is gathered once and costs as much as under DDP.
The one small all-reduce lets the ranks agree on which parameters were used.

The first word is where the unit itself is. A unit that is idle when its all-gather is
issued is gathered ahead: the messages travel while the layer before it still computes.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 order_of_a_step.py

Expected output:

    forward        all-gather root
    forward        unshard root
    forward        all-gather 1
    forward        unshard 1
    idle           reshard 1
    forward        all-gather 2
    forward        unshard 2
    idle           reshard 2
    idle           all-gather 2
    pre_backward   unshard 2
    idle           all-gather 1
    post_backward  reshard 2
    post_backward  reduce-scatter 2
    pre_backward   unshard 1
    post_backward  reshard 1
    post_backward  reduce-scatter 1
    post_backward  reshard root
    post_backward  reduce-scatter root
    idle           all-reduce root
    DDP sends 864 bytes, FSDP 1184, ratio 1.3704
    1 + 0.5 (1 - root share) = 1.3704
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel, timeline

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()


def build():
    """Build layers of different sizes; 1 and 2 will be units, 0 and 3 stay in the root."""
    torch.manual_seed(0)
    sizes = [(4, 8), (8, 8), (8, 12), (12, 2)]
    return nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes)).to(device)


model = build()
model[1] = FullyShardedDataParallel(model[1])
model[2] = FullyShardedDataParallel(model[2])
model = FullyShardedDataParallel(model)
with timeline() as recorded:
    model(torch.ones(2, 4, device=device)).square().sum().backward()

elements = sum(weight.numel() for weight in build().parameters())
root_elements = build()[0].weight.numel() + build()[3].weight.numel()
# DDP all-reduces each gradient of four bytes an element: in a ring, each rank sends this.
ddp_bytes = 2 * (world_size - 1) / world_size * elements * 4
fsdp_bytes = recorded.bytes_sent("all-gather") + recorded.bytes_sent("reduce-scatter")

if rank == 0:
    for event in recorded.events:
        print(f"{event.phase:14} {event.operation} {event.unit}")
    ratio = fsdp_bytes / ddp_bytes
    print(f"DDP sends {ddp_bytes:.0f} bytes, FSDP {fsdp_bytes:.0f}, ratio {ratio:.4f}")
    print(f"1 + 0.5 (1 - root share) = {1 + 0.5 * (1 - root_elements / elements):.4f}")

dist.destroy_process_group()
# --8<-- [end:body]
