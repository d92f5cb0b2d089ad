"""Walk through one training step and look at the two faces of one parameter.

Why: `fully_shard` has no flat parameter. Each parameter keeps a sharded DTensor and
an unsharded tensor, and the module's attribute switches between the two. Each cell
gives the dtype and the bytes that its storage really holds, on rank 0 of two.
The gradients of weight and bias share one buffer, hence more bytes than elements.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 walk_one_step_torch_fsdp2.py

Expected output:

    moment                  | linear.weight | sharded_param.to_local() | _unsharded_param | sharded_param.grad
    constructed             | DTensor       | float32 32 B             | absent           | None
    inside its forward      | plain tensor  | float32 32 B             | bfloat16 32 B    | None
    after the forward       | DTensor       | float32 32 B             | bfloat16 0 B     | None
    inside its backward     | plain tensor  | float32 32 B             | bfloat16 32 B    | None
    root's backward goes on | DTensor       | float32 32 B             | bfloat16 0 B     | float32 40 B
    after the backward      | DTensor       | float32 32 B             | bfloat16 0 B     | float32 40 B
    after the step          | DTensor       | float32 32 B             | bfloat16 0 B     | float32 40 B
    after zero_grad         | DTensor       | float32 32 B             | bfloat16 0 B     | None
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

COLUMNS = ["linear.weight", "sharded_param.to_local()", "_unsharded_param", "sharded_param.grad"]
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # compute in bfloat16, update in float32
table = [["moment", *COLUMNS]]


def cell(tensor):
    """Describe one tensor: its dtype, and the bytes that its storage holds now."""
    if not isinstance(tensor, torch.Tensor):
        return str(tensor)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    dtype = str(local.dtype).removeprefix("torch.")
    return f"{dtype} {local.untyped_storage().nbytes()} B"


def look(moment):
    """Add one row to the table."""
    kind = "DTensor" if isinstance(linear.weight, DTensor) else "plain tensor"
    sharded, grad = param.sharded_param, param.sharded_param.grad
    unsharded = getattr(param, "_unsharded_param", "absent")
    table.append([moment, kind, cell(sharded), cell(unsharded), cell(grad)])


class Model(nn.Module):
    """An embedding layer in the root, and one layer that is a unit of its own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, 4)
        layer = nn.Sequential(nn.Linear(4, 3)).to(device)
        self.layer = fully_shard(layer, mesh=mesh, mp_policy=LOW)

    def forward(self, batch):
        hidden = self.embed(batch)
        if hidden.requires_grad:  # called when the unit's backward is over
            hidden.register_hook(lambda grad: look("root's backward goes on"))
        return self.layer(hidden)


torch.manual_seed(0)
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
model = fully_shard(Model().to(device), mesh=mesh, mp_policy=LOW)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# torch keeps this object private: it may be renamed
param = model.layer._get_fsdp_state()._fsdp_param_group.fsdp_params[0]
linear = model.layer[0]  # weight: 12 elements
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
