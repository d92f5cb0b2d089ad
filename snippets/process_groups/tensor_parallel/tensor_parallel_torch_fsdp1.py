"""Split a pair of layers over the ranks of a host, and shard the pieces across hosts.

Why: a pair of large layers may be too large to compute on one device. The first is cut by
columns, the second by rows; the ranks of a host hold one piece of each and add up their
results. Each piece is a unit in `'local_rank_across_nodes'`: the ranks that hold the same
piece shard it, and average its gradient over the hosts' batches. What must be right: outputs,
gradients and weights, put together again, are those of the model in one piece, and so is the
norm that clipping uses.

Two agents on this machine stand for two hosts. On two real ones, name the first in place of
`localhost`, and type the command on each.

torch's FSDP1 takes group objects made by hand, and then does the same.

Run on any machine, no GPU needed; type this in two terminals:

    torchrun --nnodes 2 --nproc-per-node 2 \
        --rdzv-backend c10d --rdzv-endpoint localhost:29400 tensor_parallel_torch_fsdp1.py

Expected output:

                       | in one piece | tensor parallel
    norm in step 1     | 0.5113       | 0.5113
    norm in step 2     | 0.3608       | 0.3608
    norm in step 3     | 0.2809       | 0.2809

    outputs put together are those of the model in one piece: True
    gradients put together are those of the model in one piece: True
    weights put together are those of the model in one piece: True
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
pieces = int(os.environ["LOCAL_WORLD_SIZE"])  # each host holds the whole pair, in pieces
host, hosts = rank // pieces, world_size // pieces
# Every rank creates every group, also those that it is not in.
in_hosts = [list(range(at, at + pieces)) for at in range(0, world_size, pieces)]
across_hosts = [list(range(at, world_size, pieces)) for at in range(pieces)]
tensor_group, _ = dist.new_subgroups_by_enumeration(in_hosts)
same_piece_group, _ = dist.new_subgroups_by_enumeration(across_hosts)

WIDTH, HIDDEN, STEPS = 8, 32, 3


class ToAllPieces(torch.autograd.Function):
    """Before the pair: every piece gets the input, and the pieces' gradients are added up."""

    @staticmethod
    def forward(ctx, batch):
        return batch.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=tensor_group)
        return gradient


class SumOfPieces(torch.autograd.Function):
    """After the pair: the pieces' results are added up, and each gets the whole gradient."""

    @staticmethod
    def forward(ctx, partial):
        total = partial.clone()
        dist.all_reduce(total, group=tensor_group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Pair(nn.Module):
    """Two layers in one piece."""

    def __init__(self):
        super().__init__()
        self.column = nn.Linear(WIDTH, HIDDEN)
        self.row = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, batch):
        return batch + self.row(self.column(batch).relu()) + self.bias


class PieceOfPair(Pair):
    """This rank's columns of the first layer and rows of the second; the last bias is whole."""

    def __init__(self):
        super().__init__()
        for layer, name, dim in WHERE_CUT:
            whole = getattr(getattr(self, layer), name)
            piece = whole.detach().chunk(pieces, dim)[local_rank].clone()
            setattr(getattr(self, layer), name, nn.Parameter(piece))

    def forward(self, batch):
        partial = self.row(self.column(ToAllPieces.apply(batch)).relu())
        return batch + SumOfPieces.apply(partial) + self.bias


WHERE_CUT = [("column", "weight", 0), ("column", "bias", 0), ("row", "weight", 1)]


def build(pair):
    """Make the model; one seed gives all ranks, and the model in one piece, the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), pair(), nn.Linear(WIDTH, 1)).to(device)


def pieces_are_units(module):
    """Shard a piece over the ranks that hold the same one; all else over all ranks."""
    is_piece = any(module is layer for layer in (model[1].column, model[1].row))
    return {"process_group": same_piece_group} if is_piece else False


def put_together(values):
    """Join the pieces of this host; collective."""
    whole = {}
    for name, value in values.items():
        dim = {f"1.{layer}.{kind}": dim for layer, kind, dim in WHERE_CUT}.get(name)
        parts = [torch.empty_like(value) for _ in range(pieces)]
        dist.all_gather(parts, value.contiguous(), group=tensor_group)
        whole[name] = value if dim is None else torch.cat(parts, dim)
    return whole


def full(model):
    """Return the model's whole weights and gradients, by name; collective."""
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        named = dict(model.named_parameters())
        weights = {name: value.detach().clone() for name, value in named.items()}
        return put_together(weights), put_together({n: p.grad.clone() for n, p in named.items()})


def close(ours, others):
    """Tell whether two sets of tensors are equal on all ranks, but for rounding."""
    near = [torch.allclose(ours[name], others[name], atol=1e-6) for name in others]
    answers = [None] * world_size
    dist.all_gather_object(answers, all(near) and ours.keys() == others.keys())
    return all(answers)


torch.manual_seed(1)
batch = torch.randn(16, WIDTH).to(device)
mine = batch.chunk(hosts)[host]  # the ranks of a host compute one model: they share a batch

plain, model = build(Pair), build(PieceOfPair)
model = FullyShardedDataParallel(
    model,
    auto_wrap_policy=CustomPolicy(pieces_are_units),
    use_orig_params=True,  # for gradients in summon_full_params
    device_id=device,
)
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
shown = dict.fromkeys(("outputs", "gradients", "weights"), True)
if rank == 0:
    print("                   | in one piece | tensor parallel")
for step in range(1, STEPS + 1):
    for optimizer in optimizers:
        optimizer.zero_grad()
    expected, output = plain(batch), model(mine)
    shown["outputs"] &= close({"": output}, {"": expected.chunk(hosts)[host]})
    expected.square().mean().backward()
    output.square().mean().backward()
    gradients = {name: weight.grad for name, weight in plain.named_parameters()}
    shown["gradients"] &= close(full(model)[1], gradients)
    norms = nn.utils.clip_grad_norm_(plain.parameters(), 0.5), model.clip_grad_norm_(0.5)
    for optimizer in optimizers:
        optimizer.step()
    shown["weights"] &= close(full(model)[0], dict(plain.named_parameters()))
    if rank == 0:
        print(f"norm in step {step}     | {norms[0]:.4f}       | {norms[1]:.4f}")
if rank == 0:
    print()
    for name, equal in shown.items():
        print(f"{name} put together are those of the model in one piece: {equal}")

dist.destroy_process_group()
# --8<-- [end:body]
