"""Build a large model piece by piece with torch's `enable_wrap`.

The layer being sharded exists several times for a moment, as parameters and as one flat
parameter. Built piece by piece that is all there is beside the shards; built whole, the rest of
the model is there too.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 build_piece_by_piece_torch_fsdp1.py

Expected output:

    bytes of the whole model: 2,105,344
    built whole, then sharded: peak 2,434,304, kept 526,336
    built piece by piece:      peak 1,052,672, kept 526,336
"""

# --8<-- [start:body]
import os
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, enable_wrap, wrap
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
            if isinstance(tensor, torch.Tensor):
                self.storages.add(tensor.untyped_storage())
        self.peak = max(self.peak, self.live())
        return result

    def live(self):
        """Bytes alive now."""
        return sum(storage.nbytes() for storage in self.storages)


def layer():
    """One layer of the large model: it does fit into memory."""
    return nn.Linear(WIDTH, WIDTH, device=device)


dist.init_process_group()  # gloo on CPU, NCCL on GPUs
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)

with PeakBytes() as whole:
    model = nn.Sequential(*(layer() for _ in range(LAYERS)))
    policy = ModuleWrapPolicy({nn.Linear})
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device)

with PeakBytes() as pieces, enable_wrap(wrapper_cls=FullyShardedDataParallel, device_id=device):
    same = wrap(nn.Sequential(*(wrap(layer()) for _ in range(LAYERS))))

if dist.get_rank() == 0:
    print(f"bytes of the whole model: {LAYERS * 4 * (WIDTH * WIDTH + WIDTH):,}")
    print(f"built whole, then sharded: peak {whole.peak:,}, kept {whole.live():,}")
    print(f"built piece by piece:      peak {pieces.peak:,}, kept {pieces.live():,}")
dist.destroy_process_group()
# --8<-- [end:body]
