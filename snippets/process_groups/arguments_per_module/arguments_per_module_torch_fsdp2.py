"""Give every kind of module arguments of its own: group, strategy, precision and offload.

Why: one setting seldom suits a whole model. Experts want a group of their own, a small head
may stay whole between forward and backward, a norm wants full precision. Composer's page
documents a dict like that of the first block, with a word for the precision, and its code
refuses it. Here it works, and it does not matter who returns it: a policy, the model's
`fsdp_wrap_fn`, or a mark on the module.

torch's FSDP2 knows no policy: a loop calls `fully_shard` with the arguments of each module.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 arguments_per_module_torch_fsdp2.py

Expected output:

    unit     | ranks that shard | computes in
    blocks.0 | 0, 2             | float32
    blocks.1 | 0, 1, 2, 3       | bfloat16
    expert   | 0                | bfloat16
    norm     | 0, 1, 2, 3       | float32
    head     | 0, 1, 2, 3       | bfloat16
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
rank = dist.get_rank()


class Block(nn.Linear):
    """A layer of which there are several."""


class Model(nn.Module):
    """Two blocks, an expert, a norm and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(8, 8), Block(8, 8))
        self.expert = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)

    def forward(self, batch):
        return self.head(self.norm(self.expert(self.blocks(batch))))


everyone = init_device_mesh(device.type, (4,))
names = ("alternate", "block")
alternate = init_device_mesh(device.type, (2, 2), mesh_dim_names=names)["alternate"]
alone = init_device_mesh(device.type, (4, 1), mesh_dim_names=("others", "self"))["self"]
low, full = MixedPrecisionPolicy(torch.bfloat16), MixedPrecisionPolicy(torch.float32)
ARGUMENTS = {  # by the name of the module
    "blocks.0": {"mesh": alternate, "reshard_after_forward": False, "mp_policy": full},
    "blocks.1": {},
    "expert": {"mesh": alone},
    "norm": {"mp_policy": full},
    "head": {"reshard_after_forward": False},  # there is no NO_SHARD
}
OPTIONS = {"mesh": everyone, "mp_policy": low}

torch.manual_seed(0)
model = Model().to(device)
seen = {}
for name, arguments in ARGUMENTS.items():
    module = fully_shard(model.get_submodule(name), **(OPTIONS | arguments))
    module.register_forward_pre_hook(
        lambda module, args, name=name: seen.update({name: module.weight.dtype})
    )
fully_shard(model, **OPTIONS)
model.expert.set_gradient_divide_factor(4)
model(torch.randn(4, 8).to(device)).sum().backward()
if rank == 0:
    print("unit     | ranks that shard | computes in")
for name in ARGUMENTS:
    weight = model.get_submodule(name).weight
    ranks = ", ".join(map(str, weight.device_mesh.mesh.tolist()))
    if rank == 0:
        print(f"{name:8} | {ranks:16} | {str(seen[name]).removeprefix('torch.')}")

dist.destroy_process_group()
# --8<-- [end:body]
