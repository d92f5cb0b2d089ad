"""Build a model on the meta device, and let torch's `FullyShardedDataParallel` give it memory.

Each unit calls `reset_parameters` of its modules right before it is cut. A module of which that
method leaves something out would keep whatever the memory held.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 deferred_from_meta_torch_fsdp1.py

Expected output:

    bytes of the whole model: 2,105,344
    built on meta: peak 0
    wrapped: peak 1,052,672, kept 526,336
    the same weights as the model that was built whole: True
"""

# --8<-- [start:body]
import os
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
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
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
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
if device.type == "cuda":
    torch.cuda.set_device(device)

torch.manual_seed(0)
with PeakBytes() as built, torch.device("meta"):
    model = build()
with PeakBytes() as wrapped:
    policy = ModuleWrapPolicy({nn.Linear})
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device)

torch.manual_seed(0)
with device:
    whole = build()
weights = sharded.state_dict()
equal = all(torch.equal(weights[name], value) for name, value in whole.state_dict().items())
if dist.get_rank() == 0:
    print(f"bytes of the whole model: {LAYERS * 4 * (WIDTH * WIDTH + WIDTH):,}")
    print(f"built on meta: peak {built.peak:,}")
    print(f"wrapped: peak {wrapped.peak:,}, kept {wrapped.live():,}")
    print(f"the same weights as the model that was built whole: {equal}")
dist.destroy_process_group()
# --8<-- [end:body]
