"""Save the full state dict: call it on every rank, write it on one.

Why: `model.state_dict()` holds DTensors, of which this rank has only its shard. The helper
below gathers the full weights; it is collective, and rank 0 gets the result. The names
are those of the plain model, which loads the file as it is.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 save_on_every_rank_torch_fsdp2.py

Expected output:

    0.weight (16, 8)
    0.bias (16,)
    2.weight (2, 16)
    2.bias (2,)
    the plain model differs from the sharded one by 0.0000
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()
mesh = init_device_mesh(device.type, (dist.get_world_size(),))


def build():
    """Build the plain model; nothing here knows about sharding."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


torch.manual_seed(0)
model = build().to(device)
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.ones(4, 8)
model(batch.to(device)).square().sum().backward()
optimizer.step()

options = StateDictOptions(full_state_dict=True, cpu_offload=True)
weights = get_model_state_dict(model, options=options)  # collective: every rank calls it
if rank == 0:
    torch.save(weights, "model.pt")
trained_output = model(batch.to(device)).cpu()  # collective, too

if rank == 0:
    plain = build()
    plain.load_state_dict(torch.load("model.pt"))
    for name, value in plain.state_dict().items():
        print(name, tuple(value.shape))
    difference = (plain(batch) - trained_output).abs().max().item()
    print(f"the plain model differs from the sharded one by {difference:.4f}")

dist.destroy_process_group()
# --8<-- [end:body]
