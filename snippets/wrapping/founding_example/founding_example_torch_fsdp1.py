"""The founding example with torch's `FullyShardedDataParallel`: `auto_wrap` is gone.

torch kept `enable_wrap` and `wrap` but has no public `auto_wrap`. The size policy goes to the
constructor instead, and there the transformer itself always becomes a unit, however small.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 founding_example_torch_fsdp1.py

Expected output:

    module 'torch.distributed.fsdp.wrap' has no attribute 'auto_wrap'
    threshold 100,000,000: root 0, l1 528, l2 10,752
        first output 0.932, of the plain model 0.932
    threshold 8,000: root 0, l1 528, l2 64, l2.encoder.layers.0 4,272, l2.decoder.layers.0 6,416
        first output 0.932, of the plain model 0.932
"""

# --8<-- [start:body]
import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import enable_wrap, size_based_auto_wrap_policy, wrap


class FoundingExample(nn.Module):
    """A small layer, and a transformer of which only the big parts shall be units."""

    def __init__(self, min_num_params):
        super().__init__()
        torch.manual_seed(0)  # every rank builds the same model
        self.l1 = wrap(nn.Linear(32, 32))
        transformer = nn.Transformer(32, 4, 1, 1, dim_feedforward=64, dropout=0.0, batch_first=True)
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=min_num_params)
        self.l2 = wrap(transformer, auto_wrap_policy=policy)

    def forward(self, x):  # (batch, time, 32)
        return self.l2(x, self.l1(x))


def units(model):
    """All units, each with how many elements of its own this rank stores."""
    for name, unit in model.named_modules():
        if isinstance(unit, FullyShardedDataParallel):
            name = name.replace("_fsdp_wrapped_module.", "").removesuffix("._fsdp_wrapped_module")
            stored = sum(parameter.numel() for parameter in unit.module.parameters(recurse=False))
            yield f"{name or 'root'} {stored:,}"


dist.init_process_group()  # gloo on CPU, NCCL on GPUs
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
x = torch.linspace(-1, 1, 2 * 5 * 32).reshape(2, 5, 32).to(device)
plain = FoundingExample(1e8).to(device)  # outside the context `wrap` does nothing
fsdp_params = {"process_group": dist.group.WORLD, "device_id": device}

try:
    auto_wrap = torch.distributed.fsdp.wrap.auto_wrap
except AttributeError as error:
    if dist.get_rank() == 0:
        print(error)

for min_num_params in (1e8, 8e3):
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, **fsdp_params):
        model = wrap(FoundingExample(min_num_params))

    names, output, expected = list(units(model)), model(x)[0, 0, 0], plain(x)[0, 0, 0]
    if dist.get_rank() == 0:
        print(f"threshold {min_num_params:,.0f}: {', '.join(names)}")
        print(f"    first output {output:.3f}, of the plain model {expected:.3f}")
dist.destroy_process_group()
# --8<-- [end:body]
