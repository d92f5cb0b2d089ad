"""Generate tokens with a sharded model: gather the root around the loop, and stop together.

Why: `generate()` does not go through the forward of the wrapped model, so nothing gathers
what the root holds. Inner units gather themselves, one at a time, so the model never has to
fit as a whole. Each step is a collective: a rank that is done goes on until all are, and
throws away what comes.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 generate.py

Expected output:

    as it is: NotGatheredError: FSDP305 'embedding.weight'
    rank 0: [0, 8, 3, 4], as without sharding: True
    rank 1: [1, 24, 1, 24, 1, 24, 1, 24], as without sharding: True
    gathered at once 1328 of 2144 elements
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel, ModuleWrapPolicy, timeline

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()


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
model = FullyShardedDataParallel(build(), auto_wrap_policy=ModuleWrapPolicy({Block}))
try:
    model.module.generate(prompt, length)
except RuntimeError as error:
    refused = f"{type(error).__name__}: {str(error).partition(': ')[0].removeprefix('[rank 0] ')}"

with timeline() as recorded, model.summon_full_params(recurse=False, writeback=False):
    found = model.module.generate(prompt, length)

everyone = [None] * world_size
dist.all_gather_object(everyone, (found, found == truth))
if rank == 0:
    print("as it is:", refused)
    for index, (tokens, equal) in enumerate(everyone):
        print(f"rank {index}: {tokens}, as without sharding: {equal}")
    peak, whole = recorded.peak_unsharded_bytes // 4, sum(p.numel() for p in build().parameters())
    print(f"gathered at once {peak} of {whole} elements")

dist.destroy_process_group()
# --8<-- [end:body]
