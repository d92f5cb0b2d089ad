"""Generate tokens with a sharded model: each rank calls it, and all stop together.

Why: `fully_shard` keeps the class of the model, so `generate()` calls a forward that gathers
what the root holds, and needs nothing around it. Each step is a collective: a rank that is
done goes on until all are, and throws away what comes.

A method that uses weights without calling the model, such as an `encode` of its own, has to be
registered: `register_fsdp_forward_method(model, "encode")`.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 generate_torch_fsdp2.py

Expected output:

    rank 0: [0, 8, 3, 4], as without sharding: True
    rank 1: [1, 24, 1, 24, 1, 24, 1, 24], as without sharding: True
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(device.type, (world_size,))


class Block(nn.Module):
    """One layer with a way around it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Decoder(nn.Module):
    """Say which token comes next, from the mean of those before."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens).mean(0)))

    @torch.no_grad()
    def generate(self, prompt, length):
        """Append the likeliest token, until every rank has as many as it wants."""
        tokens = prompt
        while anybody(len(tokens) < length):
            tokens = torch.cat([tokens, self(tokens).argmax()[None]])
        return tokens[:length].tolist()


def anybody(wants):
    """Ask all ranks whether one of them goes on."""
    count = torch.tensor(int(wants), device=device)
    dist.all_reduce(count)
    return count.item() > 0


def build():
    """Build the same model on every rank."""
    torch.manual_seed(3)
    return Decoder().to(device)


prompt, length = torch.tensor([rank], device=device), [4, 8][rank]
truth = build().generate(prompt, length)
model = build()
for module in (*model.blocks, model):
    fully_shard(module, mesh=mesh)
found = model.generate(prompt, length)

everyone = [None] * world_size
dist.all_gather_object(everyone, (found, found == truth))
if rank == 0:
    for index, (tokens, equal) in enumerate(everyone):
        print(f"rank {index}: {tokens}, as without sharding: {equal}")

dist.destroy_process_group()
# --8<-- [end:body]
