"""Save the full state dict: call it on every rank, write it on one.

Why: the full weights exist on no rank until all ranks bring their shards together, so
`state_dict()` is collective: on one rank alone it would wait forever. The names are
those of the plain model, which loads the file without any wrapper.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 save_on_every_rank.py

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

from fsdp_ref import FullyShardedDataParallel

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()


def build():
    """Build the plain model; nothing here knows about sharding."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


torch.manual_seed(0)
plain = build().to(device)
plain[0] = FullyShardedDataParallel(plain[0])
model = FullyShardedDataParallel(plain)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.ones(4, 8)
model(batch.to(device)).square().sum().backward()
optimizer.step()

weights = model.state_dict()  # collective: every rank calls it
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
