"""The founding example with torch's `fully_shard`: the size rule is a loop.

`enable_wrap` and `wrap` work with `fully_shard` as the wrapper, and their arguments reach every
call. There is no `auto_wrap`, so a loop shards each module that still holds enough parameters
after its children were sharded; going through the modules backwards meets children first.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 founding_example_torch_fsdp2.py

Expected output:

    module 'torch.distributed.fsdp.wrap' has no attribute 'auto_wrap'
    threshold 100,000,000: root 10,752, l1 528
        first output 0.932, of the plain model 0.932
    threshold 8,000: root 64, l1 528, l2.encoder.layers.0 4,272, l2.decoder.layers.0 6,416
        first output 0.932, of the plain model 0.932
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp.wrap import enable_wrap, wrap
from torch.distributed.tensor import DTensor


def wrap_by_size(model, min_num_params):
    """Wrap every part of the model in which enough parameters are left."""
    for module in reversed(list(model.modules())):
        left = [p.numel() for p in module.parameters() if not isinstance(p, DTensor)]
        if sum(left) >= min_num_params:
            wrap(module)
    return model


class FoundingExample(nn.Module):
    """A small layer, and a transformer of which only the big parts shall be units."""

    def __init__(self, min_num_params):
        super().__init__()
        torch.manual_seed(0)  # every rank builds the same model
        self.l1 = wrap(nn.Linear(32, 32))
        transformer = nn.Transformer(32, 4, 1, 1, dim_feedforward=64, dropout=0.0, batch_first=True)
        self.l2 = wrap_by_size(transformer, min_num_params)

    def forward(self, x):  # (batch, time, 32)
        return self.l2(x, self.l1(x))


def units(model):
    """All units, each with how many elements of its own this rank stores."""
    names = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    stored = dict.fromkeys(names, 0)
    for path, parameter in model.named_parameters():
        owner = max((name for name in names if path.startswith(name)), key=len)
        stored[owner] += parameter.to_local().numel()
    return [f"{name or 'root'} {numel:,}" for name, numel in stored.items()]


dist.init_process_group()  # gloo on CPU, NCCL on GPUs
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
x = torch.linspace(-1, 1, 2 * 5 * 32).reshape(2, 5, 32).to(device)
plain = FoundingExample(1e8).to(device)  # outside the context `wrap` does nothing

try:
    auto_wrap = torch.distributed.fsdp.wrap.auto_wrap
except AttributeError as error:
    if dist.get_rank() == 0:
        print(error)

for min_num_params in (1e8, 8e3):
    with enable_wrap(wrapper_cls=fully_shard, mesh=mesh):
        model = wrap(FoundingExample(min_num_params))

    names, output, expected = list(units(model)), model(x)[0, 0, 0], plain(x)[0, 0, 0]
    if dist.get_rank() == 0:
        print(f"threshold {min_num_params:,.0f}: {', '.join(names)}")
        print(f"    first output {output:.3f}, of the plain model {expected:.3f}")
dist.destroy_process_group()
# --8<-- [end:body]
