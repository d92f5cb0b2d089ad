"""Train a mixture of experts: the experts stay on their ranks, and the tokens travel.

Why: each token uses one of four experts, so most weights rest most of the time. Every rank
keeps one expert, an all-to-all sends each token to its expert's rank and the result back.
The losses must be those of a single process that holds all experts and sees all tokens.
They are, once the gradient of an expert is divided by the number of all ranks: the backward
of the all-to-all brings it the gradients of all ranks' losses.

torch's FSDP2 sets the divisor after sharding, module by module. Over several ranks gloo also
needs the sum to be forced, since it cannot multiply while it adds. Over a mesh of one rank
that must not be done: the gradient is then divided twice, as the last line shows.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 mixture_of_experts_torch_fsdp2.py

Expected output:

                         | single  | expert's gradient divided by
                         | process | its own ranks | all ranks
    gradient of experts  | 0.2215  | 0.8860        | 0.2215
    loss in step 1       | 0.8157  | 0.8157        | 0.8157
    loss in step 2       | 0.3246  | 0.3226        | 0.3246
    loss in step 3       | 0.2847  | 0.2804        | 0.2847
    loss in step 4       | 0.2667  | 0.2610        | 0.2667
    loss in step 5       | 0.2551  | 0.2480        | 0.2551

    Divided by all: on all ranks the weights of the single process? True
    With the sum forced as well, the gradient of experts is 0.0554
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

EXPERTS, WIDTH, STEPS = 4, 16, 5
everyone = init_device_mesh(device.type, (world_size,))
alone = init_device_mesh(device.type, (world_size, 1), mesh_dim_names=("others", "self"))["self"]
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
    gradients = [getattr(weight.grad, "_local_tensor", weight.grad) for weight in experts]
    total = sum(gradient.square().sum() for gradient in gradients)
    if model is not single:
        dist.all_reduce(total)
    return total.sqrt().item()


def train(model, tokens, targets):
    """Train; return the first step's gradient of the experts, and the losses over all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    norm, losses = None, []
    for _ in range(STEPS):
        loss = (model(tokens) - targets).square().mean()
        losses.append(loss.detach().clone())
        loss.backward()
        norm = norm or norm_of_experts(model)
        optimizer.step()
        optimizer.zero_grad()
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return [norm, *(losses / world_size).tolist()]


def sharded(divisor, forced=False):
    """Shard the model: the expert over its own rank, everything else over all ranks."""
    model = build(ParallelMixture)
    expert = fully_shard(model[1].expert, mesh=alone)
    if divisor:
        expert.set_gradient_divide_factor(divisor)
        expert.set_force_sum_reduction_for_comms(forced)
    return fully_shard(model, mesh=everyone)


torch.manual_seed(1)
tokens = torch.randn(64, WIDTH).to(device)
targets = tokens[:, :4].prod(dim=1, keepdim=True)
mine = tokens.chunk(world_size)[rank], targets.chunk(world_size)[rank]

single, by_default, by_all = build(Mixture), sharded(None), sharded(world_size)
divided_twice = train(sharded(world_size, forced=True), *mine)[0]
runs = train(single, tokens, targets), train(by_default, *mine), train(by_all, *mine)

plain = single.state_dict()
whole = {name: weight.full_tensor() for name, weight in by_all.named_parameters()}  # collective
same = [
    torch.allclose(weight, plain[name.replace("expert.", f"experts.{rank}.")])
    for name, weight in whole.items()
]
all_same = [None] * world_size
dist.all_gather_object(all_same, all(same) and len(same) == 7)

if rank == 0:
    print("                     | single  | expert's gradient divided by")
    print("                     | process | its own ranks | all ranks")
    for step, numbers in enumerate(zip(*runs, strict=True)):
        name = f"loss in step {step}" if step else "gradient of experts"
        print(f"{name:20} | {numbers[0]:.4f}  | {numbers[1]:.4f}        | {numbers[2]:.4f}")
    print()
    print("Divided by all: on all ranks the weights of the single process?", all(all_same))
    print(f"With the sum forced as well, the gradient of experts is {divided_twice:.4f}")

dist.destroy_process_group()
# --8<-- [end:body]
