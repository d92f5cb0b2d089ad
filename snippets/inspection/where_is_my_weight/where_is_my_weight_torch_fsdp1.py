"""Find a weight in a sharded model: its unit, its ranks, its bytes.

Why: wrapping takes weights out of their modules and cuts them at places that depend on the
number of ranks. When a checkpoint, an optimizer or the memory of one rank looks wrong, the
first question is what lies where.

Torch's first FSDP tells the shape of the flat parameters, and with `use_orig_params=True` how
many elements of each weight this rank has. Which elements these are, and in which dtype they
are gathered, it does not tell. To see the other ranks, each of them has to be asked.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 where_is_my_weight_torch_fsdp1.py

Expected output:

    a unit around Translator: 8 elements on each rank
    a unit around Sequential: 17 elements on each rank
    read.weight     elements on ranks 0 to 3: [8, 8, 8, 8]
    think.0.weight  elements on ranks 0 to 3: [19, 9, 0, 0]
    think.0.bias    elements on ranks 0 to 3: [0, 6, 1, 0]
    think.2.weight  elements on ranks 0 to 3: [0, 0, 17, 11]
    think.2.bias    elements on ranks 0 to 3: [0, 0, 0, 4]
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()


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


def wrapped(**arguments):
    """Make the layers in the middle a unit, and the whole."""
    model = Translator().to(device)
    arguments = {"device_id": device, **arguments}
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model.think = FullyShardedDataParallel(model.think, mixed_precision=precision, **arguments)
    return FullyShardedDataParallel(model, **arguments)


flat, pieces = wrapped(), wrapped(use_orig_params=True)
units = FullyShardedDataParallel.fsdp_modules(flat)
mine = {
    name.replace("_fsdp_wrapped_module.", ""): parameter.numel()
    for name, parameter in pieces.named_parameters()
}
of_all = [None] * world_size
dist.all_gather_object(of_all, mine)

if rank == 0:
    for unit in units:
        shard = next(unit.parameters())
        print(f"a unit around {type(unit.module).__name__}: {shard.numel()} elements on each rank")
    for name in mine:
        print(f"{name:15} elements on ranks 0 to 3: {[sizes[name] for sizes in of_all]}")

dist.destroy_process_group()
# --8<-- [end:body]
