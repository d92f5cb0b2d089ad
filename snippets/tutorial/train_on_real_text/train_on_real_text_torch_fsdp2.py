"""Train a small transformer on real text with torch's `fully_shard`, beside DDP.

There is no wrapper and nothing to summon: the plain model is initialised first and then sharded in
place. `get_model_state_dict` gathers the full weights, with `cpu_offload=True` on rank 0 alone;
`set_model_state_dict` hands them out from rank 0, so no other rank reads the file.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 train_on_real_text_torch_fsdp2.py

Expected output:

    856 bytes of text, 135,168 parameters, 67,584 of them on rank 0
    step    DDP   sharded
       0  5.561  5.561
       5  4.057  4.057
      10  3.474  3.474
      15  3.325  3.325
      20  3.272  3.272
      25  3.121  3.121
      30  3.059  3.059
      35  2.915  2.915
      40  2.747  2.747
      45  2.643  2.643
      49  2.505  2.505
    loss of the trained model 2.592
    loss of a new model 5.630, with the saved weights 2.592
"""

# --8<-- [start:body]
import contextlib
import io
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

with contextlib.redirect_stdout(io.StringIO()):  # importing `this` prints its text
    import this

CONTEXT, WIDTH, HEADS, BATCH, STEPS = 32, 64, 4, 8, 50


class Block(nn.Module):
    """One causal transformer block; each becomes one unit."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):  # (batch, time, WIDTH)
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        query, key, value = heads.unbind(dim=2)  # each (batch, HEADS, time, WIDTH / HEADS)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteModel(nn.Module):
    """Predict the next byte of a text."""

    def __init__(self):
        super().__init__()
        self.byte, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, x):  # (batch, time) bytes -> (batch, time, 256) logits
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.byte(x) + self.place(places))))


@torch.no_grad()
def initialise(model):
    """Small normal weights and zero biases, drawn on the CPU: equal on every kind of device."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.copy_(0.02 * torch.randn(module.weight.shape, generator=generator))
        if isinstance(module, nn.Linear):
            module.bias.zero_()


def shard(model):
    """Shard every block, then what is left: inner modules come first."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


dist.init_process_group()  # gloo on CPU, NCCL on GPUs
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()
torch.manual_seed(0)  # every rank builds the same model
mesh = init_device_mesh(device.type, (dist.get_world_size(),))

text = "".join(this.d.get(letter, letter) for letter in this.s)
text = torch.tensor(list(text.encode()))  # (856,) one integer per byte


def batch(step):
    """This rank's windows of the text and, for each byte of them, the byte that follows."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
    windows = text[starts + torch.arange(CONTEXT + 1)].to(device)
    return windows[:, :-1], windows[:, 1:]


def loss_of(model, step):
    """The mean loss of this rank's batch."""
    bytes_in, bytes_out = batch(step)
    return F.cross_entropy(model(bytes_in).flatten(0, 1), bytes_out.flatten())


def mean_over_ranks(loss):
    """The loss of the global batch, as a number."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(model):
    """Train and return the loss of every step."""
    # Made after sharding. SGD, because Adam would hide a gradient of the wrong scale.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses


def evaluate(model):
    """The loss of a batch that was not trained on."""
    with torch.no_grad():
        return mean_over_ranks(loss_of(model, STEPS))


plain = ByteModel().to(device)
initialise(plain)
all_numel = sum(parameter.numel() for parameter in plain.parameters())
ddp_losses = train(DistributedDataParallel(plain))

sharded = ByteModel().to(device)
initialise(sharded)  # while every rank still has whole weights
shard(sharded)
my_numel = sum(parameter.to_local().numel() for parameter in sharded.parameters())
fsdp_losses = train(sharded)

if rank == 0:
    print(f"{len(text)} bytes of text, {all_numel:,} parameters, {my_numel:,} of them on rank 0")
    print("step    DDP   sharded")
    for step in [*range(0, STEPS, 5), STEPS - 1]:
        print(f"{step:4}  {ddp_losses[step]:.3f}  {fsdp_losses[step]:.3f}")

trained_loss = evaluate(sharded)
full_on_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
full_weights = get_model_state_dict(sharded, options=full_on_rank_0)  # empty on other ranks
loaded = shard(ByteModel().to(device))
new_loss = evaluate(loaded)
loaded.reshard()  # the root stays unsharded after a forward, and loading needs the shards
with tempfile.TemporaryDirectory() as folder:
    if rank == 0:
        torch.save(full_weights, Path(folder, "model.pt"))
        full_weights = torch.load(Path(folder, "model.pt"))
    set_model_state_dict(loaded, full_weights, options=from_rank_0)
loaded_loss = evaluate(loaded)

if rank == 0:
    print(f"loss of the trained model {trained_loss:.3f}")
    print(f"loss of a new model {new_loss:.3f}, with the saved weights {loaded_loss:.3f}")
dist.destroy_process_group()
# --8<-- [end:body]
