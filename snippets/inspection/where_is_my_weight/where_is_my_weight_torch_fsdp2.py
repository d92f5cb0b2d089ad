"""Find a weight in a sharded model: its unit, its ranks, its bytes.

Why: wrapping takes weights out of their modules and cuts them at places that depend on the
number of ranks. When a checkpoint, an optimizer or the memory of one rank looks wrong, the
first question is what lies where.

Torch's second FSDP leaves each weight in its module, as a `DTensor` that tells its placement:
cut along its first dimension, into as many equal pieces as there are ranks. The last ranks may
get less, or nothing. It does not tell which unit gathers a weight, in which dtype, and what
padding that takes.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 where_is_my_weight_torch_fsdp2.py

Expected output:

    read.weight     (8, 4)   S(0): [(2, 4), (2, 4), (2, 4), (2, 4)]
    think.0.weight  (7, 4)   S(0): [(2, 4), (2, 4), (2, 4), (1, 4)]
    think.0.bias    (7,)     S(0): [(2,), (2,), (2,), (1,)]
    think.2.weight  (4, 7)   S(0): [(1, 7), (1, 7), (1, 7), (1, 7)]
    think.2.bias    (4,)     S(0): [(1,), (1,), (1,), (1,)]
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(device.type, (world_size,))


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
fully_shard(model.think, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
fully_shard(model, mesh=mesh)

mine = {name: tuple(weight.to_local().shape) for name, weight in model.named_parameters()}
of_all = [None] * world_size
dist.all_gather_object(of_all, mine)

if rank == 0:
    for name, weight in model.named_parameters():
        shapes = [shapes[name] for shapes in of_all]
        print(f"{name:15} {tuple(weight.shape)!s:8} {weight.placements[0]}: {shapes}")

dist.destroy_process_group()
# --8<-- [end:body]
