"""Find a weight in a sharded model: its unit, its ranks, its bytes.

Why: wrapping takes weights out of their modules and cuts them at places that depend on the
number of ranks. When a checkpoint, an optimizer or the memory of one rank looks wrong, the
first question is what lies where. Any rank can answer it alone, before the first forward.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 where_is_my_weight.py

Expected output:

    unit      class       parameters  elements  padding  bytes here  whole
    root      Translator           1        32        0          32    128  FULL_SHARD over 0-3
    └─ think  Sequential           4        67        1          68    136  FULL_SHARD over 0-3

    parameter                   shape   offset  elements on ranks                 bytes here  whole
    root: FULL_SHARD over 0-3, float32
      read.weight               (8, 4)       0  0[0:8] 1[8:16] 2[16:24] 3[24:32]          32    128
      say.weight = read.weight  (8, 4)       0  0[0:8] 1[8:16] 2[16:24] 3[24:32]          32    128
    think: FULL_SHARD over 0-3, float32, gathered in bfloat16, 1 of padding
      think.0.weight            (7, 4)       0  0[0:17] 1[17:28]                          68     56
      think.0.bias              (7,)        28  1[0:6] 2[6:7]                              0     14
      think.2.weight            (4, 7)      35  2[0:16] 3[16:28]                           0     56
      think.2.bias              (4,)        63  3[0:4]                                     0      8

    think.2.weight of shape (4, 7) lies on ranks [2, 3]
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel, explain, unit_tree

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()


class Translator(nn.Module):
    """Read a token, think, say the next one; the first weight is also the last."""

    def __init__(self):
        super().__init__()
        self.read = nn.Embedding(8, 4)
        self.think = nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 4))
        self.say = nn.Linear(4, 8, bias=False)
        self.say.weight = self.read.weight

    def forward(self, tokens):
        return self.say(self.think(self.read(tokens)))


model = Translator().to(device)
precision = {"param_dtype": torch.bfloat16}
model.think = FullyShardedDataParallel(model.think, mixed_precision=precision)
model = FullyShardedDataParallel(model)

if rank == 0:
    print(unit_tree(model))
    print()
    print(explain(model))
    place = explain(model).named("think.2.weight")
    holders = [piece.rank for piece in place.pieces]
    print()
    print(f"{place.name} of shape {place.shape} lies on ranks {holders}")

dist.destroy_process_group()
# --8<-- [end:body]
