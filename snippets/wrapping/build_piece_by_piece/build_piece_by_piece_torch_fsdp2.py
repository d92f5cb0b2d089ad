"""Build a large model piece by piece with torch's `fully_shard`.

`fully_shard` works in place on any module that exists, so a layer can be sharded before the next
one is made. The parameters are sharded one by one, without a flat copy of the layer.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 build_piece_by_piece_torch_fsdp2.py

Expected output:

    bytes of the whole model: 2,105,344
    built whole, then sharded: peak 2,171,136, kept 526,336
    built piece by piece:      peak 789,504, kept 526,336
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
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
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
mesh = init_device_mesh(device.type, (dist.get_world_size(),))

with PeakBytes() as whole:
    model = nn.Sequential(*(layer() for _ in range(LAYERS)))
    for module in model:
        fully_shard(module, mesh=mesh)
    sharded = fully_shard(model, mesh=mesh)

with PeakBytes() as pieces:
    same = nn.Sequential(*(fully_shard(layer(), mesh=mesh) for _ in range(LAYERS)))
    fully_shard(same, mesh=mesh)

if dist.get_rank() == 0:
    print(f"bytes of the whole model: {LAYERS * 4 * (WIDTH * WIDTH + WIDTH):,}")
    print(f"built whole, then sharded: peak {whole.peak:,}, kept {whole.live():,}")
    print(f"built piece by piece:      peak {pieces.peak:,}, kept {pieces.live():,}")
dist.destroy_process_group()
# --8<-- [end:body]
