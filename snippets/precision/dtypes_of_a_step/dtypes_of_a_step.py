"""Follow the dtypes through a step: weights, messages, gradients, buffers, batch norm.

Why: only what is gathered and what is computed has to be small. The optimizer must see the
weight and its gradient in full, or small updates get lost; statistics of batch norm suffer too.

The first column has no mixed precision. The second says `param_dtype` alone, and gradients are
reduced in it. The last one is the word `'default'`: reduced in full, and buffers cast too. The
policy makes a unit of its own of batch norm, and exempts it.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 dtypes_of_a_step.py

Expected output:

                             None        param_dtype 'default'
    weight in the forward    float32     bfloat16    bfloat16
    what the layer returns   float32     bfloat16    bfloat16
    its buffer               float32     float32     bfloat16
    input of batch norm      float32     float32     float32
    weight of batch norm     float32     float32     float32
    its running mean         float32     float32     float32
    all-gather               float32     bfloat16    bfloat16
    reduce-scatter           float32     bfloat16    float32
    gradient of the shard    float32     float32     float32
    shard                    float32     float32     float32
    weight in a state dict   float32     float32     float32
    buffer in a state dict   float32     float32     float32
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

FLOAT, HALF = torch.float32, torch.bfloat16


class Layer(nn.Module):
    """A linear layer with a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, batch):
        return self.linear(batch) + self.shift.to(self.linear.weight.dtype)


def watch(title, mixed_precision):
    """Train one step; return one column of the table."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), nn.BatchNorm1d(4), Layer()).to(device)
    first, norm = model[0], model[1]
    seen = {}

    def look(layer, args, output):
        seen["weight in the forward"] = layer.linear.weight.dtype
        seen["what the layer returns"] = output.dtype
        seen["its buffer"] = layer.shift.dtype

    def look_at_norm(norm, args, output):
        seen["input of batch norm"] = args[0].dtype
        seen["weight of batch norm"] = norm.weight.dtype
        seen["its running mean"] = norm.running_mean.dtype

    first.register_forward_hook(look)
    norm.register_forward_hook(look_at_norm)
    policy = ModuleWrapPolicy({Layer})
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, mixed_precision=mixed_precision
    )
    with timeline() as recorded:
        model(torch.randn(8, 4, device=device)).sum().backward()
    sent = {event.operation: event.dtype for event in recorded.events if event.unit == "0"}
    seen["all-gather"] = sent["all-gather"]
    seen["reduce-scatter"] = sent["reduce-scatter"]
    seen["gradient of the shard"] = model[0]._flat_param.grad.dtype
    seen["shard"] = model[0]._flat_param.dtype
    seen["weight in a state dict"] = model.state_dict()["0.linear.weight"].dtype
    seen["buffer in a state dict"] = model.state_dict()["0.shift"].dtype
    return [title, *(str(dtype).removeprefix("torch.") for dtype in seen.values())], list(seen)


columns = [
    watch("None", None),
    watch("param_dtype", {"param_dtype": HALF}),
    watch("'default'", "default"),
]
if rank == 0:
    rows = ["", *columns[0][1]]
    for row in zip(rows, *(column for column, _ in columns), strict=True):
        print(f"{row[0]:24}", "".join(cell.ljust(12) for cell in row[1:]).rstrip())

dist.destroy_process_group()
# --8<-- [end:body]
