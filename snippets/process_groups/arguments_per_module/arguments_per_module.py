"""Give every kind of module arguments of its own: group, strategy, precision and offload.

Why: one setting seldom suits a whole model. Experts want a group of their own, a small head
may stay whole between forward and backward, a norm wants full precision. Composer's page
documents a dict like that of the first block, with a word for the precision, and its code
refuses it. Here it works, and it does not matter who returns it: a policy, the model's
`fsdp_wrap_fn`, or a mark on the module.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 arguments_per_module.py

Expected output:

    unit     | ranks that shard | sharding_strategy | computes in
    blocks.0 | 0, 2             | SHARD_GRAD_OP     | float32
    blocks.1 | 0, 1, 2, 3       | FULL_SHARD        | bfloat16
    expert   | 0                | FULL_SHARD        | bfloat16
    norm     | 0, 1, 2, 3       | FULL_SHARD        | float32
    head     | 0                | NO_SHARD          | bfloat16
    the same by the model's fsdp_wrap_fn: True
    the same by marks on modules: True
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import CustomPolicy, FullyShardedDataParallel, explain
from fsdp_ref.wrapping import composer_auto_wrap_policy

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


ARGUMENTS = {  # by the name of the module
    "blocks.0": {
        "process_group": "mod2",
        "sharding_strategy": "SHARD_GRAD_OP",
        "mixed_precision": "FULL",
        "cpu_offload": False,
    },
    "blocks.1": True,
    "expert": {"process_group": "self", "gradient_divisor": dist.get_world_size()},
    "norm": {"mixed_precision": "FULL"},
    "head": {"sharding_strategy": "NO_SHARD", "backward_prefetch": None},
}
OPTIONS = {"mixed_precision": "DEFAULT", "sharding_strategy": "FULL_SHARD"}


def build():
    """Make the model with the same weights on every rank."""
    torch.manual_seed(0)
    return Model().to(device)


def units_of(model, policy):
    """Wrap a model by a policy, train one step, and return a row for each unit."""
    model = FullyShardedDataParallel(model, auto_wrap_policy=policy, **OPTIONS)
    model(torch.randn(4, 8).to(device)).sum().backward()
    rows = {"unit": "ranks that shard | sharding_strategy | computes in"}
    for weight in explain(model):
        ranks = ", ".join(map(str, weight.ranks))
        dtype = str(weight.dtypes.gathered).removeprefix("torch.")
        rows[weight.unit] = f"{ranks:16} | {weight.strategy:17} | {dtype}"
    return [f"{unit:8} | {row}" for unit, row in rows.items()]


# First: a policy answers for each module.
model = build()
names = {module: name for name, module in model.named_modules()}
by_policy = units_of(model, CustomPolicy(lambda module: ARGUMENTS.get(names[module], False)))

# Second: the model has a method that answers.
model = build()
names = {module: name for name, module in model.named_modules()}
model.fsdp_wrap_fn = lambda module: ARGUMENTS.get(names[module], False)
by_method = units_of(model, composer_auto_wrap_policy)

# Third: each module carries a mark.
model = build()
for name, arguments in ARGUMENTS.items():
    model.get_submodule(name)._fsdp_wrap = arguments
by_marks = units_of(model, composer_auto_wrap_policy)

if rank == 0:
    print("\n".join(by_policy))
    print("the same by the model's fsdp_wrap_fn:", by_method == by_policy)
    print("the same by marks on modules:", by_marks == by_policy)

dist.destroy_process_group()
# --8<-- [end:body]
