"""Share one weight between embedding and head, and put both into one unit.

Why: two units would each keep a copy of the weight and train it alone. The embedding would
learn from its own gradient and miss the head's. Here a cut tie is refused while the model is
wrapped. A list of modules is one unit. In it the weight is stored once, and its gradient is the sum
of both uses.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 tied_weights_torch_fsdp2.py

Expected output:

    one process
      loss 1.5537
    the embedding in a unit of its own
    Parameter 'embedding.weight' is shared with a parameter already managed by another
    FSDP group. For shared/tied parameters, use fully_shard([module_a, module_b]) to
    place them in the same FSDP group.
    both in one unit
      loss 1.5537, the two weights differ by 0.0000
"""

# --8<-- [start:body]
import os
import textwrap

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
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


def embedding_alone():
    """Make a unit of the embedding, and leave the head to the root."""
    model = build()
    fully_shard(model.embedding, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def both_in_one():
    """Make one unit of embedding and head together, and one of what is between them."""
    model = build()
    fully_shard([model.embedding, model.head], mesh=mesh)
    fully_shard(model.body, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def report(case, wrap):
    """Train, and print the loss and the difference of the two weights, or the refusal."""
    try:
        model = wrap()
        loss = train(model)
    except ValueError as error:
        if rank == 0:
            print(case, textwrap.fill(str(error), 84), sep="\n")
        return
    weights = model.state_dict()
    apart = (weights["embedding.weight"] - weights["head.weight"]).full_tensor().abs().max()
    if rank == 0:
        print(f"{case}\n  loss {loss:.4f}, the two weights differ by {apart.item():.4f}")


if rank == 0:
    print(f"one process\n  loss {train(build()):.4f}")
report("the embedding in a unit of its own", embedding_alone)
report("both in one unit", both_in_one)

dist.destroy_process_group()
# --8<-- [end:body]
