"""Find a dense layer that drifted because its group is too small.

Why: a layer in a group of two ranks is averaged over these two. On four ranks it exists
twice from then on, and each pair trains its own version on half of the data. The loss falls
as it should, so nobody notices; a checkpoint of the first rank loses the other version.
`check_replicas` compares what ranks hold under one name and says which of them differ.

torch's FSDP2 drifts in the same way on a small mesh, and has nothing that compares.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 drift_of_a_dense_layer_torch_fsdp2.py

Expected output:

    middle layer in the default group: losses 0.0795 0.0720 0.0699 0.0569
      versions of its weight: 1
    middle layer in groups of two: losses 0.0795 0.0719 0.0700 0.0567
      versions of its weight: 2
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


def train(mesh):
    """Train with the middle layer on a mesh; return the model and its losses over all ranks."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8).to(device) for _ in range(3)]
    fully_shard(layers[1], mesh=mesh)
    model = fully_shard(nn.Sequential(*layers), mesh=everyone)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)  # every rank has its own data
    losses = []
    for _ in range(4):
        loss = model(torch.randn(16, 8).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(f"{total.item() / world_size:.4f}")
    return model, " ".join(losses)


def versions(weight):
    """Count the different values of one full weight over the ranks; collective."""
    copies = [None] * world_size
    dist.all_gather_object(copies, weight.flatten().tolist())
    return len(set(map(tuple, copies)))


everyone = init_device_mesh(device.type, (4,))
pair = init_device_mesh(device.type, (2, 2), mesh_dim_names=("others", "pair"))["pair"]
for name, mesh in {"the default group": everyone, "groups of two": pair}.items():
    model, losses = train(mesh)
    count = versions(model[1].weight.full_tensor())  # collective
    if rank == 0:
        print(f"middle layer in {name}: losses {losses}")
        print("  versions of its weight:", count)

dist.destroy_process_group()
# --8<-- [end:body]
