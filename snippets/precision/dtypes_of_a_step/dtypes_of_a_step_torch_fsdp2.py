"""Follow the dtypes through a step: weights, messages, gradients, buffers, batch norm.

Why: only what is gathered and what is computed has to be small. The optimizer must see the
weight and its gradient in full, or small updates get lost; statistics of batch norm suffer too.

The first column has no mixed precision. The second says `param_dtype` alone, and gradients are
reduced in it. The last one reduces in full. `fully_shard` never casts buffers, and nothing exempts
batch norm: here it got a policy by hand.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 dtypes_of_a_step_torch_fsdp2.py

Expected output:

                             None        param_dtype both
    weight in the forward    float32     bfloat16    bfloat16
    what the layer returns   float32     bfloat16    bfloat16
    its buffer               float32     float32     float32
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()
mesh = init_device_mesh(device.type, (dist.get_world_size(),))

FLOAT, HALF = torch.float32, torch.bfloat16


class Layer(nn.Module):
    """A linear layer with a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, batch):
        return self.linear(batch) + self.shift.to(self.linear.weight.dtype)


class Watch(TorchDispatchMode):
    """Note in which dtype the first layer is sent: 20 elements, in a reduction or a gather."""

    def __init__(self):
        super().__init__()
        self.sent = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if "allgather" in name or "reduce_scatter" in name:
            operation = "all-gather" if "allgather" in name else "reduce-scatter"
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            if sum(tensor.numel() for tensor in tensors) == 20 + 20 // dist.get_world_size():
                self.sent[operation] = tensors[0].dtype
        return func(*args, **(kwargs or {}))


def watch(title, policy):
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
    exempt = MixedPrecisionPolicy(param_dtype=FLOAT, output_dtype=policy.param_dtype)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=exempt if layer is norm else policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    with Watch() as watched:
        model(torch.randn(8, 4, device=device)).sum().backward()
    seen["all-gather"] = watched.sent["all-gather"]
    seen["reduce-scatter"] = watched.sent["reduce-scatter"]
    seen["gradient of the shard"] = first.linear.weight.grad.dtype
    seen["shard"] = first.linear.weight.dtype
    seen["weight in a state dict"] = model.state_dict()["0.linear.weight"].dtype
    seen["buffer in a state dict"] = model.state_dict()["0.shift"].dtype
    return [title, *(str(dtype).removeprefix("torch.") for dtype in seen.values())], list(seen)


columns = [
    watch("None", MixedPrecisionPolicy()),
    watch("param_dtype", MixedPrecisionPolicy(param_dtype=HALF)),
    watch("both", MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=FLOAT)),
]
if rank == 0:
    rows = ["", *columns[0][1]]
    for row in zip(rows, *(column for column, _ in columns), strict=True):
        print(f"{row[0]:24}", "".join(cell.ljust(12) for cell in row[1:]).rstrip())

dist.destroy_process_group()
# --8<-- [end:body]
