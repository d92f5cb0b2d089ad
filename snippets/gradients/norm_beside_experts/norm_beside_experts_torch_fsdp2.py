"""Clip a model whose experts differ from rank to rank: one norm for all, or one each.

Why: every rank has an expert of its own, beside a dense layer that all ranks share. The norm
of the whole model counts the dense layer once and every expert. A rank that counts its own
expert alone clips the shared layer by another factor than its neighbour.

Torch's utility refuses tensors of different meshes, so nothing is clipped wrongly. The squares of
all shards, added up by hand, are the way out.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 norm_beside_experts_torch_fsdp2.py

Expected output:

    the utility          RuntimeError: All operands in aten.stack.default must have the same mesh
    told to ranks 0 to 3 12.691, 12.691, 12.691, 12.691
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
dense = nn.Linear(6, 6)
torch.manual_seed(1 + rank)
expert = nn.Linear(6, 6)
batch = torch.randn(4, 6, device=device)

model = nn.Sequential(dense, nn.Tanh(), expert).to(device)
alone = [dist.new_group([member]) for member in range(world_size)][rank]
fully_shard(model[2], mesh=DeviceMesh.from_group(alone, device.type))
fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
model(batch).square().sum().backward()


def on_each_rank(number):
    """Collect one number from every rank, as text."""
    numbers = [None] * world_size
    dist.all_gather_object(numbers, f"{number:.3f}")
    return ", ".join(numbers)


try:
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    told = "clipped"
except RuntimeError as error:
    told = f"{type(error).__name__}: {str(error).partition(',')[0]}"

grads = [parameter.grad.to_local() for parameter in model.parameters()]
norm = torch.stack([grad.square().sum() for grad in grads]).sum()
dist.all_reduce(norm)  # no two ranks hold the same element
by_hand = norm.sqrt()
torch._foreach_mul_(grads, (1.0 / by_hand).clamp(max=1.0).item())
told_by_hand = on_each_rank(by_hand.item())

if rank == 0:
    print(f"the utility          {told}")
    print(f"told to ranks 0 to 3 {told_by_hand}")

dist.destroy_process_group()
# --8<-- [end:body]
