"""Keep one expert per rank: a policy gives the experts a group of their own.

Why: experts of a mixture differ from rank to rank, so they must neither be sharded over
the ranks nor averaged with the others. The policy answers with arguments for each
expert; all other layers stay on the default group and stay equal.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 experts_through_a_policy.py

Expected output:

    unit   | ranks in its group | elements on each rank | versions after training
    dense  | 4                  | 32                    | 1
    expert | 1                  | 64                    | 4
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import CustomPolicy, FullyShardedDataParallel

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()


class Expert(nn.Linear):
    """The layer of which every rank trains its own version."""


class Mixture(nn.Module):
    """Dense layers around one expert."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(8, 8, bias=False)
        self.expert = Expert(8, 8, bias=False)
        self.after = nn.Linear(8, 8, bias=False)

    def forward(self, batch):
        return self.after(self.expert(self.before(batch)).relu())


def experts_keep_to_themselves(module):
    """Make each expert a unit, with these arguments in place of the model's."""
    return {"process_group": "self"} if isinstance(module, Expert) else False


def versions(weight):
    """Count the different values of one full weight over the ranks."""
    copies = [None] * world_size
    dist.all_gather_object(copies, weight.flatten().tolist())
    return len(set(map(tuple, copies)))


def show(name, group, elements, weight):
    """Print who shares a unit, how much of it one rank holds, and how many versions exist."""
    count = versions(weight)
    if rank == 0:
        print(f"{name:6} | {group.size():<18} | {elements:<21} | {count}")


if rank == 0:
    print("unit   | ranks in its group | elements on each rank | versions after training")

torch.manual_seed(0)
model = FullyShardedDataParallel(
    Mixture().to(device), auto_wrap_policy=CustomPolicy(experts_keep_to_themselves)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

torch.manual_seed(rank)  # every rank has its own data
for _ in range(3):
    model(torch.randn(16, 8).to(device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

with FullyShardedDataParallel.state_dict_type(model, "full", replicas="mine"):
    weights = model.state_dict()  # collective: every rank calls it
expert = model.module.expert
show("dense", model.process_group, model._flat_param.numel(), weights["before.weight"])
show("expert", expert.process_group, expert._flat_param.numel(), weights["expert.weight"])

dist.destroy_process_group()
# --8<-- [end:body]
