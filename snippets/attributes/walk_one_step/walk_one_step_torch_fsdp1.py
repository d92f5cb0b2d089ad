"""Walk through one training step and look at the attributes of one flat parameter.

Why: sharding saves memory because most tensors are empty most of the time. The
table shows which attribute holds memory at which moment, with bfloat16 to compute
in and float32 to update. Each cell gives the dtype and the bytes that its storage
really holds, on rank 0 of two.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 walk_one_step_torch_fsdp1.py

Expected output:

    moment                  | _local_shard | _mp_shard    | _full_param_padded | _cpu_grad | _saved_grad_shard | grad
    constructed             | absent       | absent       | absent             | absent    | absent            | None
    inside its forward      | float32 32 B | bfloat16 0 B | bfloat16 32 B      | absent    | absent            | None
    after the forward       | float32 32 B | bfloat16 0 B | bfloat16 0 B       | absent    | absent            | None
    inside its backward     | float32 32 B | bfloat16 0 B | bfloat16 32 B      | absent    | absent            | None
    root's backward goes on | float32 32 B | bfloat16 0 B | bfloat16 0 B       | absent    | float32 32 B      | None
    after the backward      | float32 32 B | bfloat16 0 B | bfloat16 0 B       | absent    | absent            | float32 32 B
    after the step          | float32 32 B | bfloat16 0 B | bfloat16 0 B       | absent    | absent            | float32 32 B
    after zero_grad         | float32 32 B | bfloat16 0 B | bfloat16 0 B       | absent    | absent            | None
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

ATTRIBUTES = [
    "_local_shard",
    "_mp_shard",
    "_full_param_padded",
    "_cpu_grad",
    "_saved_grad_shard",
    "grad",
]
LOW = MixedPrecision(param_dtype=torch.bfloat16)  # compute in bfloat16, update in float32
table = [["moment", *ATTRIBUTES]]


def cell(flat_param, attribute):
    """Describe one attribute: its dtype, and the bytes that its storage holds now."""
    value = getattr(flat_param, attribute, "absent")
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {value.untyped_storage().nbytes()} B"
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)


def look(moment):
    """Add one row to the table."""
    table.append([moment, *(cell(flat_param, attribute) for attribute in ATTRIBUTES)])


class Model(nn.Module):
    """An embedding layer in the root, and one layer that is a unit of its own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, 4)
        self.layer = FullyShardedDataParallel(
            nn.Linear(4, 3), mixed_precision=LOW, device_id=device
        )

    def forward(self, batch):
        hidden = self.embed(batch)
        if hidden.requires_grad:  # called when the unit's backward is over
            hidden.register_hook(lambda grad: look("root's backward goes on"))
        return self.layer(hidden)


torch.manual_seed(0)
model = FullyShardedDataParallel(Model(), mixed_precision=LOW, device_id=device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
flat_param = model.layer._flat_param
linear = model.layer.module
linear.register_forward_hook(lambda *args: look("inside its forward"))
linear.register_full_backward_pre_hook(lambda *args: look("inside its backward"))

look("constructed")
loss = model(torch.ones(8, 2, device=device)).square().mean()
look("after the forward")
loss.backward()
look("after the backward")
optimizer.step()
look("after the step")
optimizer.zero_grad()
look("after zero_grad")

if dist.get_rank() == 0:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print(" | ".join(map(str.ljust, row, widths)).rstrip())

dist.destroy_process_group()
# --8<-- [end:body]
