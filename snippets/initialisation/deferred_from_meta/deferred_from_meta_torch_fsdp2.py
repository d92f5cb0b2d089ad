"""Build a model on the meta device, shard it there, and give memory to the shards alone.

With `fully_shard` the order is the other way round: shard on meta, then `to_empty`, then
initialise the shards. No rank ever holds a whole layer. But on a CPU mesh every rank draws its own
shard, and with one seed all shards are alike; see the trap of initialising after sharding.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 deferred_from_meta_torch_fsdp2.py

Expected output:

    bytes of the whole model: 2,105,344
    built on meta: peak 0
    wrapped: peak 526,336, kept 526,336
    the same weights as the model that was built whole: False
    distinct values in the first weight: 16,373 instead of 65,418
"""

# --8<-- [start:body]
import os
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH, LAYERS = 256, 8


class PeakBytes(TorchDispatchMode):
    """Follow every storage that is created inside, and keep the most bytes alive at once."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = weakref.WeakSet(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, DTensor) or not isinstance(tensor, torch.Tensor):
                continue
            if not tensor.is_meta:
                self.storages.add(tensor.untyped_storage())
        self.peak = max(self.peak, self.live())
        return result

    def live(self):
        """Bytes alive now."""
        return sum(storage.nbytes() for storage in self.storages)


def build():
    """Build the plain model; it knows nothing of devices or sharding."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


dist.init_process_group()  # gloo on CPU, NCCL on GPUs
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
cpu_mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # the trap is one of CPU meshes

with PeakBytes() as built, torch.device("meta"):
    model = build()
with PeakBytes() as wrapped:
    for module in (*model, model):
        fully_shard(module, mesh=cpu_mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for layer in model:
        layer.reset_parameters()

torch.manual_seed(0)
whole = build().state_dict()
weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
equal = all(torch.equal(weights[name], value) for name, value in whole.items())
distinct, expected = weights["0.weight"].unique().numel(), whole["0.weight"].unique().numel()
if dist.get_rank() == 0:
    print(f"bytes of the whole model: {LAYERS * 4 * (WIDTH * WIDTH + WIDTH):,}")
    print(f"built on meta: peak {built.peak:,}")
    print(f"wrapped: peak {wrapped.peak:,}, kept {wrapped.live():,}")
    print(f"the same weights as the model that was built whole: {equal}")
    print(f"distinct values in the first weight: {distinct:,} instead of {expected:,}")
dist.destroy_process_group()
# --8<-- [end:body]
