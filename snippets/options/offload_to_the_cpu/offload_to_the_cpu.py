"""Offload to the CPU: what lives where, moment by moment.

Why: between uses a shard only takes up memory on the device. Offloaded, it lives on the
CPU; so does its gradient, and so does the state of the optimizer, which is most of all
that is stored. Copies to the device and back, in every step, are the price.

A cell gives the bytes that a tensor holds, and `elsewhere` if it is not on the device that
its column promises. Without a GPU the device is the CPU too; the places are the same.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 offload_to_the_cpu.py

Expected output:

    moment              | shard: CPU | full: device | gradient: CPU | optimizer: CPU
    constructed         | 32 B       | -            | -             | -
    inside the forward  | 32 B       | 64 B         | -             | -
    after the forward   | 32 B       | 0 B          | -             | -
    inside the backward | 32 B       | 64 B         | -             | -
    after the backward  | 32 B       | 0 B          | 32 B          | -
    after the step      | 32 B       | 0 B          | 32 B          | 32 B
    after zero_grad     | 32 B       | 0 B          | -             | 32 B
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()
COLUMNS = ["shard: CPU", "full: device", "gradient: CPU", "optimizer: CPU"]
table = [["moment", *COLUMNS]]


def cell(tensor, place):
    """Describe a tensor: what its storage holds now, if it is where it should be."""
    if tensor is None:
        return "-"
    if tensor.device != place:
        return "elsewhere"
    return f"{tensor.untyped_storage().nbytes()} B"


def look(moment):
    """Add one row to the table."""
    cpu, state = torch.device("cpu"), optimizer.state.get(flat_param, {})
    tensors = [
        cell(flat_param, cpu),
        cell(flat_param._full_param_padded, device),
        cell(flat_param.grad, cpu),
        cell(state.get("momentum_buffer"), cpu),
    ]
    table.append([moment, *tensors])


torch.manual_seed(0)
layer = nn.Linear(4, 4, bias=False).to(device)
model = nn.Sequential(FullyShardedDataParallel(layer, cpu_offload=True))
model = FullyShardedDataParallel(model, cpu_offload=True)
flat_param = model[0]._flat_param
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
layer.register_forward_hook(lambda *_: look("inside the forward"))
layer.register_full_backward_pre_hook(lambda *_: look("inside the backward"))

look("constructed")
loss = model(torch.ones(2, 4, device=device, requires_grad=True)).sum()
look("after the forward")
loss.backward()
look("after the backward")
optimizer.step()
look("after the step")
optimizer.zero_grad()
look("after zero_grad")

if rank == 0:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print(" | ".join(map(str.ljust, row, widths)).rstrip())

dist.destroy_process_group()
# --8<-- [end:body]
