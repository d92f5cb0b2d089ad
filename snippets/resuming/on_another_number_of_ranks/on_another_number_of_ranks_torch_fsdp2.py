"""Save at four ranks, and go on at two.

Parameters are `DTensor`s from the start, and any number of ranks can read them.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 on_another_number_of_ranks_torch_fsdp2.py

Expected output:

    never stopped, 4 ranks:           2.382, 0.807, 1.312
    resumed, 2 ranks of 4 samples:    2.382, 0.807, 1.312
    largest difference in a loss:     0.0000
    with 2 samples per rank, as then: 4.124, 0.896, 1.258
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group()  # four ranks
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()
prints = rank == 0


def build(seed):
    """Build everything that goes on together."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    return model, optimizer, scheduler


def everything(model, optimizer, scheduler, step):
    """Return what a checkpoint holds, or what is to be filled from one."""
    weights, moments = get_state_dict(model, optimizer)  # collective
    rest = {"scheduler": scheduler.state_dict(), "step": step}
    return {"model": weights, "optim": moments, **rest}


def train(model, optimizer, scheduler, steps, per_rank=None):
    """Return the loss of each step: the mean over the ranks."""
    losses = []
    for step in steps:
        samples = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        mine = samples[rank :: dist.get_world_size()][:per_rank].to(device)
        loss = (model(mine) - mine.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def resume():
    """Build anew, from another seed, and fill everything from the checkpoint."""
    model, optimizer, scheduler = build(seed=1)
    state = everything(model, optimizer, scheduler, step=0)
    dcp.load(state, checkpoint_id="checkpoint")  # collective
    weights, moments = state["model"], state["optim"]
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    scheduler.load_state_dict(state["scheduler"])
    return (model, optimizer, scheduler), range(state["step"], 6)


def told(losses):
    """Write losses with few digits."""
    return ", ".join(f"{loss:.3f}" for loss in losses)


run = build(seed=0)
train(*run, range(3))
dcp.save(everything(*run, step=3), checkpoint_id="checkpoint")  # collective
expected = train(*run, range(3, 6))
if prints:
    print(f"never stopped, 4 ranks:           {told(expected)}")
dist.destroy_process_group()

# Two jobs of two ranks, each as `torchrun --nproc-per-node 2` would start one.
job, rank = divmod(rank, 2)
meeting = f"file://{os.getcwd()}/job{job}"
dist.init_process_group(init_method=meeting, rank=rank, world_size=2)

run, steps = resume()
losses = train(*run, steps)
if prints:
    print(f"resumed, 2 ranks of 4 samples:    {told(losses)}")
    pairs = zip(losses, expected, strict=True)
    print(f"largest difference in a loss:     {max(abs(a - b) for a, b in pairs):.4f}")

run, steps = resume()
losses = train(*run, steps, per_rank=2)
if prints:
    print(f"with 2 samples per rank, as then: {told(losses)}")

dist.destroy_process_group()
# --8<-- [end:body]
