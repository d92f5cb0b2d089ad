"""Share one weight between embedding and head, and put both into one unit.

Why: two units would each keep a copy of the weight and train it alone. The embedding would
learn from its own gradient and miss the head's. This class does so, and says nothing: the loss is
another one, and the two weights are no longer one. In one unit the weight is stored once, and
its gradient is the sum of both uses.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 tied_weights_torch_fsdp1.py

Expected output:

    one process
      loss 1.5537
    the embedding in a unit of its own
      loss 1.5450, the two weights differ by 0.0805
    both in the root
      loss 1.5537, the two weights differ by 0.0000
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()
tokens = torch.arange(6, device=device)[None]


class Model(nn.Module):
    """Embed, transform, and compare with every embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens)))


def build():
    """Build the same model on every rank."""
    torch.manual_seed(0)
    return Model().to(device)


def train(model):
    """Take three steps; return the last loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens)[0], tokens[0].flip(0))
        loss.backward()
        optimizer.step()
    return loss.item()


def units_of(layer):
    """Make a unit of each such layer, and the root of the rest."""
    policy = ModuleWrapPolicy({layer})
    return FullyShardedDataParallel(build(), auto_wrap_policy=policy, device_id=device)


def report(case, layer):
    """Train, and print the loss and the difference of the two weights."""
    model = units_of(layer)
    loss = train(model)
    weights = model.state_dict()
    apart = (weights["embedding.weight"] - weights["head.weight"]).abs().max()
    if rank == 0:
        print(f"{case}\n  loss {loss:.4f}, the two weights differ by {apart.item():.4f}")


if rank == 0:
    print(f"one process\n  loss {train(build()):.4f}")
report("the embedding in a unit of its own", nn.Embedding)
report("both in the root", nn.Sequential)

dist.destroy_process_group()
# --8<-- [end:body]
