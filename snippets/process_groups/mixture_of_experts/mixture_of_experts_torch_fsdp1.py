"""Train a mixture of experts: the experts stay on their ranks, and the tokens travel.

Why: each token uses one of four experts, so most weights rest most of the time. Every rank
keeps one expert, an all-to-all sends each token to its expert's rank and the result back.
The losses must be those of a single process that holds all experts and sees all tokens.
They are, once the gradient of an expert is divided by the number of all ranks: the backward
of the all-to-all brings it the gradients of all ranks' losses.

torch's FSDP1 has no argument for the divisor: each expert's gradient is scaled by hand before
the step. It wants groups made by hand, on all ranks in one order.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 mixture_of_experts_torch_fsdp1.py

Expected output:

                         | single  | experts' gradients
                         | process | as they are   | scaled by hand
    gradient of experts  | 0.2215  | 0.8860        | 0.2215
    loss in step 1       | 0.8157  | 0.8157        | 0.8157
    loss in step 2       | 0.3246  | 0.3226        | 0.3246
    loss in step 3       | 0.2847  | 0.2804        | 0.2847
    loss in step 4       | 0.2667  | 0.2610        | 0.2667
    loss in step 5       | 0.2551  | 0.2480        | 0.2551

    Scaled by hand: on all ranks the weights of the single process? True
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import CustomPolicy

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()

EXPERTS, WIDTH, STEPS = 4, 16, 5
# Every rank creates every group, also those that it is not in.
expert_group, _ = dist.new_subgroups(group_size=1)
exchange_group = dist.group.WORLD  # the ranks among which tokens travel


class Exchange(torch.autograd.Function):
    """Send some rows to each rank, receive some from each; gradients take the way back."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.way_back = received, sent
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=exchange_group)
        return result

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.way_back), None, None


class Mixture(nn.Module):
    """A router, and experts of which each token uses one."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, tokens):
        share, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)  # the tokens of expert 0 first, and so on
        counts = chosen.bincount(minlength=EXPERTS)
        results = self.ask_experts(tokens[order], counts)
        return tokens + share[:, None] * results[order.argsort()].tanh()

    def ask_experts(self, tokens, counts):
        pieces = tokens.split(counts.tolist())
        return torch.cat(
            [expert(piece) for expert, piece in zip(self.experts, pieces, strict=True)]
        )


class ParallelMixture(Mixture):
    """The same with one expert only; the others are on other ranks."""

    def __init__(self):
        super().__init__()
        self.expert = self.experts[rank]
        del self.experts

    def ask_experts(self, tokens, counts):
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=exchange_group)
        sent, received = counts.tolist(), arriving.tolist()
        return Exchange.apply(self.expert(Exchange.apply(tokens, sent, received)), received, sent)


def build(mixture):
    """Make the model; one seed gives every rank, and the single process, the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), mixture(), nn.Linear(WIDTH, 1)).to(device)


def norm_of_experts(model):
    """Return the norm of all experts' gradients together, whichever rank holds them."""
    experts = [weight for name, weight in model.named_parameters() if "expert" in name]
    total = sum(weight.grad.square().sum() for weight in experts)
    if model is not single:
        dist.all_reduce(total)
    return total.sqrt().item()


def train(model, tokens, targets, scale=1.0):
    """Train; return the first step's gradient of the experts, and the losses over all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    norm, losses = None, []
    for _ in range(STEPS):
        loss = (model(tokens) - targets).square().mean()
        losses.append(loss.detach().clone())
        loss.backward()
        for name, weight in model.named_parameters():
            if "expert" in name:
                weight.grad *= scale
        norm = norm or norm_of_experts(model)
        optimizer.step()
        optimizer.zero_grad()
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return [norm, *(losses / world_size).tolist()]


def sharded():
    """Shard the model: the expert over its own rank, everything else over all ranks."""

    def policy(module):
        return {"process_group": expert_group} if module is model[1].expert else False

    model = build(ParallelMixture)
    return FullyShardedDataParallel(model, auto_wrap_policy=CustomPolicy(policy), device_id=device)


torch.manual_seed(1)
tokens = torch.randn(64, WIDTH).to(device)
targets = tokens[:, :4].prod(dim=1, keepdim=True)
mine = tokens.chunk(world_size)[rank], targets.chunk(world_size)[rank]

single, by_default, by_all = build(Mixture), sharded(), sharded()
runs = (
    train(single, tokens, targets),
    train(by_default, *mine),
    train(by_all, *mine, 1 / world_size),
)

plain = single.state_dict()
with FullyShardedDataParallel.summon_full_params(by_all):  # collective
    same = [
        torch.allclose(weight, plain[name.replace("expert.", f"experts.{rank}.")])
        for name, weight in by_all.named_parameters()
    ]
all_same = [None] * world_size
dist.all_gather_object(all_same, all(same) and len(same) == 7)

if rank == 0:
    print("                     | single  | experts' gradients")
    print("                     | process | as they are   | scaled by hand")
    for step, numbers in enumerate(zip(*runs, strict=True)):
        name = f"loss in step {step}" if step else "gradient of experts"
        print(f"{name:20} | {numbers[0]:.4f}  | {numbers[1]:.4f}        | {numbers[2]:.4f}")
    print()
    print("Scaled by hand: on all ranks the weights of the single process?", all(all_same))

dist.destroy_process_group()
# --8<-- [end:body]
