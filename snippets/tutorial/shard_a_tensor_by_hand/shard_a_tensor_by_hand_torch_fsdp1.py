"""Shard a tensor by hand with an all-gather, and compare with what the class keeps.

Why: this is all there is to sharding a weight. A rank keeps one piece and throws the rest away.
When the layer is to compute, one collective brings the pieces together; afterwards the whole is
dropped again. Nine numbers on two ranks need one more to be cut evenly: the padding.

torch's FSDP1 cuts the same row of numbers in the same way.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 shard_a_tensor_by_hand_torch_fsdp1.py

Expected output:

    the whole weight: 1 2 3 4 5 6 7 8 9
    shards, cut by hand:
      rank 0: 1 2 3 4 5
      rank 1: 6 7 8 9 0
    gathered again, equal to the whole: True
    shards that the class keeps:
      rank 0: 1 2 3 4 5
      rank 1: 6 7 8 9 0
    the same as by hand: True
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()

whole = torch.arange(1.0, 10.0, device=device).view(3, 3)
layer = nn.Linear(3, 3, bias=False, device=device)
with torch.no_grad():
    layer.weight.copy_(whole)

# By hand: a row of numbers, padded to a multiple of the ranks; each rank keeps one piece.
flat = whole.flatten()
padding = -flat.numel() % world_size
padded = nn.functional.pad(flat, (0, padding))
shard = padded.chunk(world_size)[rank].clone()

# Before the layer computes, all pieces are gathered; then the padding goes, and the shape returns.
gathered = torch.empty_like(padded)
dist.all_gather_single(gathered, shard)
again = gathered[: flat.numel()].view(3, 3)


def everyone_says(value):
    """Print what each rank has to say."""
    said = [None] * world_size
    dist.all_gather_object(said, value)
    if rank == 0:
        for number, text in enumerate(said):
            print(f"  rank {number}: {text}")


def numbers(tensor):
    """Spell the elements of a tensor."""
    return " ".join(f"{value:.0f}" for value in tensor.flatten().tolist())


if rank == 0:
    print("the whole weight:", numbers(whole))
    print("shards, cut by hand:")
everyone_says(numbers(shard))
if rank == 0:
    print("gathered again, equal to the whole:", torch.equal(again, whole))
    print("shards that the class keeps:")

model = FullyShardedDataParallel(layer, device_id=device)
kept = next(model.parameters())
everyone_says(numbers(kept))
if rank == 0:
    print("the same as by hand:", torch.equal(kept, shard))

dist.destroy_process_group()
# --8<-- [end:body]
