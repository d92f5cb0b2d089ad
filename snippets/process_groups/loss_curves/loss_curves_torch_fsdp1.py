"""Train one model in four ways: all of them follow the loss of the model without sharding.

Why: a group that is too small, or a divisor that is wrong, gives no error. The curve of a
plain run is what to compare with. Here a model with a pair of large layers and four experts
is trained unsharded; sharded by default; with one expert on each rank; and with the pair cut
over two ranks. The last column has the mistake: experts whose gradients are divided by the
number of their own ranks.

torch's FSDP1 needs the experts' gradients scaled by hand.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 loss_curves_torch_fsdp1.py

Expected output:

    step | unsharded | sharded | experts on 'self' | tensor parallel | wrong divisor
       1 |    0.6781 |  0.6781 |            0.6781 |          0.6781 |        0.6781
       2 |    0.4880 |  0.4880 |            0.4880 |          0.4880 |        0.4851
       3 |    0.4349 |  0.4349 |            0.4349 |          0.4349 |        0.4333
       4 |    0.4115 |  0.4115 |            0.4115 |          0.4115 |        0.4102
       5 |    0.4009 |  0.4009 |            0.4009 |          0.4009 |        0.3994
       6 |    0.3953 |  0.3953 |            0.3953 |          0.3953 |        0.3933
       7 |    0.3920 |  0.3920 |            0.3920 |          0.3920 |        0.3894
       8 |    0.3898 |  0.3898 |            0.3898 |          0.3898 |        0.3865
       9 |    0.3883 |  0.3883 |            0.3883 |          0.3883 |        0.3842
      10 |    0.3870 |  0.3870 |            0.3870 |          0.3870 |        0.3820
      11 |    0.3853 |  0.3853 |            0.3853 |          0.3853 |        0.3794
      12 |    0.3842 |  0.3842 |            0.3842 |          0.3842 |        0.3773
      13 |    0.3831 |  0.3831 |            0.3831 |          0.3831 |        0.3753
      14 |    0.3821 |  0.3821 |            0.3821 |          0.3821 |        0.3733
      15 |    0.3810 |  0.3810 |            0.3810 |          0.3810 |        0.3712
      16 |    0.3800 |  0.3800 |            0.3800 |          0.3800 |        0.3691
      17 |    0.3790 |  0.3790 |            0.3790 |          0.3790 |        0.3670
      18 |    0.3779 |  0.3779 |            0.3779 |          0.3779 |        0.3648
      19 |    0.3768 |  0.3768 |            0.3768 |          0.3768 |        0.3626
      20 |    0.3761 |  0.3761 |            0.3761 |          0.3761 |        0.3610
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

WIDTH, HIDDEN, STEPS = 16, 32, 20
# Every rank creates every group, also those that it is not in.
tensor_group, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
alternate, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
alone, _ = dist.new_subgroups(group_size=1)


class Exchange(torch.autograd.Function):
    """Send some rows to each rank, receive some from each; gradients take the way back."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.way_back = received, sent
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent)
        return result

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.way_back), None, None


class Sum(torch.autograd.Function):
    """Add up over the ranks that hold a pair together: forward, backward, or neither."""

    @staticmethod
    def forward(ctx, batch, in_forward):
        ctx.in_backward = not in_forward
        return Sum.over_pieces(batch) if in_forward else batch.clone()

    @staticmethod
    def backward(ctx, gradient):
        return Sum.over_pieces(gradient) if ctx.in_backward else gradient, None

    @staticmethod
    def over_pieces(tensor):
        tensor = tensor.clone()
        dist.all_reduce(tensor, group=tensor_group)
        return tensor


class Pair(nn.Module):
    """Two layers, whole or cut over two ranks."""

    def __init__(self, cut):
        super().__init__()
        self.cut = cut
        self.column = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.row = nn.Linear(HIDDEN, WIDTH, bias=False)
        if cut:
            for layer, dim in ((self.column, 0), (self.row, 1)):
                piece = layer.weight.detach().chunk(2, dim)[rank % 2].clone()
                layer.weight = nn.Parameter(piece)

    def forward(self, batch):
        if not self.cut:
            return batch + self.row(self.column(batch).relu())
        return batch + Sum.apply(self.row(self.column(Sum.apply(batch, False)).relu()), True)


class Mixture(nn.Module):
    """Four experts, all here or one on each rank."""

    def __init__(self, spread):
        super().__init__()
        self.router = nn.Linear(WIDTH, world_size, bias=False)
        experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(world_size))
        self.experts = experts[rank : rank + 1] if spread else experts

    def forward(self, tokens):
        share, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=world_size)
        results = self.ask_experts(tokens[order], counts)
        return tokens + share[:, None] * results[order.argsort()].tanh()

    def ask_experts(self, tokens, counts):
        if len(self.experts) == world_size:
            pairs = zip(self.experts, tokens.split(counts.tolist()), strict=True)
            return torch.cat([expert(piece) for expert, piece in pairs])
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sent, received = counts.tolist(), arriving.tolist()
        arrived = Exchange.apply(tokens, sent, received)
        return Exchange.apply(self.experts[0](arrived), received, sent)


def build(cut=False, spread=False):
    """Make the model; one seed gives all of them the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(Pair(cut), Mixture(spread), nn.Linear(WIDTH, 1)).to(device)


def sharded(model, special, group=None):
    """Shard a model; some of its modules get a group of their own."""

    def policy(module):
        return {"process_group": group} if any(module is one for one in special) else False

    policy = CustomPolicy(policy)
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device)


def losses(model, tokens, targets, scale=1.0):
    """Train, and return the losses, averaged over the ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(tokens) - targets).square().mean()
        loss.backward()
        for name, parameter in model.named_parameters():
            if "expert" in name:
                parameter.grad *= scale
        optimizer.step()
        seen.append(loss.detach().clone())
    seen = torch.stack(seen)
    dist.all_reduce(seen)
    return (seen / world_size).tolist()


torch.manual_seed(1)
tokens = torch.randn(128, WIDTH).to(device)
targets = tokens[:, :4].prod(dim=1, keepdim=True)


def part(at, of):
    """Return one of several equal parts of the batch."""
    return tokens.chunk(of)[at], targets.chunk(of)[at]


dense, pair, right, wrong = build(), build(cut=True), build(spread=True), build(spread=True)
runs = {
    "unsharded": losses(build(), tokens, targets),
    "sharded": losses(sharded(dense, dense[1].experts), *part(rank, world_size)),
    "experts on 'self'": losses(
        sharded(right, right[1].experts, alone), *part(rank, world_size), scale=1 / world_size
    ),
    "tensor parallel": losses(  # two ranks hold one model together, and share a batch
        sharded(pair, [pair[0].column, pair[0].row], alternate), *part(rank // 2, 2)
    ),
    "wrong divisor": losses(sharded(wrong, wrong[1].experts, alone), *part(rank, world_size)),
}
if rank == 0:
    print("step", *runs, sep=" | ")
    for step, values in enumerate(zip(*runs.values(), strict=True), 1):
        cells = (f"{v:{len(name)}.4f}" for name, v in zip(runs, values, strict=True))
        print(f"{step:4}", *cells, sep=" | ")

dist.destroy_process_group()
# --8<-- [end:body]
