"""Build a model that is too large for one rank's memory, piece by piece.

Built whole, the model must fit into every rank's memory once, although each keeps only a part of
it. Inside `enable_wrap` each layer is sharded as soon as it exists, before the next one is made,
so the peak is the shards so far, one layer, and that layer's shard. The few bytes beside them are
fingerprints of the weights, which ranks compare before the first forward, and the one element
that stands for all weights that are not in memory.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 build_piece_by_piece.py

Expected output:

    bytes of the whole model: 2,105,344
    built whole, then sharded: peak 2,171,172, kept 526,724
    built piece by piece:      peak 789,876, kept 526,724
"""

# --8<-- [start:body]
import os
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_ref import FullyShardedDataParallel, ModuleWrapPolicy, enable_wrap, wrap

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

with PeakBytes() as whole:
    model = nn.Sequential(*(layer() for _ in range(LAYERS)))
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))

with PeakBytes() as pieces, enable_wrap(wrapper_cls=FullyShardedDataParallel):
    same = wrap(nn.Sequential(*(wrap(layer()) for _ in range(LAYERS))))

if dist.get_rank() == 0:
    print(f"bytes of the whole model: {LAYERS * 4 * (WIDTH * WIDTH + WIDTH):,}")
    print(f"built whole, then sharded: peak {whole.peak:,}, kept {whole.live():,}")
    print(f"built piece by piece:      peak {pieces.peak:,}, kept {pieces.live():,}")
dist.destroy_process_group()
# --8<-- [end:body]
