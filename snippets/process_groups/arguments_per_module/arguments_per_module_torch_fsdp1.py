"""Give every kind of module arguments of its own: group, strategy, precision and offload.

Why: one setting seldom suits a whole model. Experts want a group of their own, a small head
may stay whole between forward and backward, a norm wants full precision. Composer's page
documents a dict like that of the first block, with a word for the precision, and its code
refuses it. Here it works, and it does not matter who returns it: a policy, the model's
`fsdp_wrap_fn`, or a mark on the module.

torch's FSDP1 takes such a dict from `CustomPolicy`, with objects in place of words. The last
lines show what it says to the words of the first tab.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 arguments_per_module_torch_fsdp1.py

Expected output:

    unit     | ranks that shard | sharding_strategy | computes in
    blocks.0 | 0, 2             | SHARD_GRAD_OP     | float32
    blocks.1 | 0, 1, 2, 3       | FULL_SHARD        | bfloat16
    expert   | 0                | NO_SHARD          | bfloat16
    norm     | 0, 1, 2, 3       | FULL_SHARD        | float32
    head     | 0, 1, 2, 3       | NO_SHARD          | bfloat16
    process_group='mod2': AttributeError: 'str' object has no attribute 'rank'
    sharding_strategy='SHARD_GRAD_OP': KeyError: 'SHARD_GRAD_OP'
    mixed_precision='FULL': AttributeError: 'str' object has no attribute
        'param_dtype'
    cpu_offload=False: works
    gradient_divisor=4: TypeError: FullyShardedDataParallel.__init__() got an
        unexpected keyword argument 'gradient_divisor'
"""

# --8<-- [start:body]
import os
import textwrap

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy

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


# Every rank creates every group, also those that it is not in, in the same order.
alternate, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
alone, _ = dist.new_subgroups(group_size=1)
low = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
full = MixedPrecision(param_dtype=torch.float32, cast_forward_inputs=True)
ARGUMENTS = {  # by the name of the module
    "blocks.0": {
        "process_group": alternate,
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
        "mixed_precision": full,
    },
    "blocks.1": True,
    "expert": {"process_group": alone},
    "norm": {"mixed_precision": full},
    "head": {"sharding_strategy": ShardingStrategy.NO_SHARD, "backward_prefetch": None},
}
OPTIONS = {"mixed_precision": low, "device_id": device}


def wrap(arguments):
    """Make the model and let a policy answer for each module."""
    torch.manual_seed(0)
    model = Model()
    names = {module: name for name, module in model.named_modules()}
    policy = CustomPolicy(lambda module: arguments.get(names[module], False))
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, **OPTIONS)


def attempt(name, argument, value):
    """Try one argument of the reference's snippet, and say what happens."""
    try:
        wrap({name: {argument: value}})(torch.randn(4, 8).to(device)).sum().backward()
        found = "works"
    except Exception as error:
        found = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if rank == 0:
        print(textwrap.fill(f"{argument}={value!r}: {found}", 80, subsequent_indent="    "))


model = wrap(ARGUMENTS)
model(torch.randn(4, 8).to(device)).sum().backward()
if rank == 0:
    print("unit     | ranks that shard | sharding_strategy | computes in")
for name in ARGUMENTS:
    unit = model.get_submodule("_fsdp_wrapped_module." + name)
    ranks = ", ".join(map(str, dist.get_process_group_ranks(unit.process_group)))
    dtype = str(unit.mixed_precision.param_dtype or torch.float32).removeprefix("torch.")
    if rank == 0:
        print(f"{name:8} | {ranks:16} | {unit.sharding_strategy.name:17} | {dtype}")

attempt("blocks.0", "process_group", "mod2")
attempt("blocks.0", "sharding_strategy", "SHARD_GRAD_OP")
attempt("blocks.0", "mixed_precision", "FULL")
attempt("blocks.0", "cpu_offload", False)
attempt("expert", "gradient_divisor", 4)

dist.destroy_process_group()
# --8<-- [end:body]
