"""Split a pair of layers over the ranks of a host, and shard the pieces across hosts.

Why: a pair of large layers may be too large to compute on one device. The first is cut by
columns, the second by rows; the ranks of a host hold one piece of each and add up their
results. Each piece is a unit in `'local_rank_across_nodes'`: the ranks that hold the same
piece shard it, and average its gradient over the hosts' batches. What must be right: outputs,
gradients and weights, put together again, are those of the model in one piece, and so is the
norm that clipping uses.

Two agents on this machine stand for two hosts. On two real ones, name the first in place of
`localhost`, and type the command on each.

torch's FSDP2 has tensor parallelism beside it: one mesh of two dimensions, a plan for the pair.

Run on any machine, no GPU needed; type this in two terminals:

    torchrun --nnodes 2 --nproc-per-node 2 \
        --rdzv-backend c10d --rdzv-endpoint localhost:29400 tensor_parallel_torch_fsdp2.py

Expected output:

                       | in one piece | tensor parallel
    norm in step 1     | 0.5113       | 0.5113
    norm in step 2     | 0.3608       | 0.3608
    norm in step 3     | 0.2809       | 0.2809

    outputs put together are those of the model in one piece: True
    gradients put together are those of the model in one piece: True
    weights put together are those of the model in one piece: True
    torch's own clip_grad_norm_:
    RuntimeError: All operands in aten.stack.default must have the same mesh, but
    got DeviceMesh((hosts=2, pieces=2), 'cpu', stride=(2, 1)) and
    DeviceMesh((hosts=2), 'cpu', stride=(2,)).
"""

# --8<-- [start:body]
import os
import textwrap

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()
pieces = int(os.environ["LOCAL_WORLD_SIZE"])  # each host holds the whole pair, in pieces
host, hosts = rank // pieces, world_size // pieces
mesh = init_device_mesh(device.type, (hosts, pieces), mesh_dim_names=("hosts", "pieces"))

WIDTH, HIDDEN, STEPS = 8, 32, 3


class Pair(nn.Module):
    """Two layers in one piece."""

    def __init__(self):
        super().__init__()
        self.column = nn.Linear(WIDTH, HIDDEN)
        self.row = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, batch):
        return batch + self.row(self.column(batch).relu()) + self.bias


def build(pair):
    """Make the model; one seed gives all ranks, and the model in one piece, the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), pair(), nn.Linear(WIDTH, 1)).to(device)


def whole(tensor):
    """Return a whole tensor, wherever its pieces are; collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(ours, others):
    """Tell whether two sets of tensors are equal on all ranks, but for rounding."""
    near = [torch.allclose(ours[name], others[name], atol=1e-6) for name in others]
    answers = [None] * world_size
    dist.all_gather_object(answers, all(near) and ours.keys() == others.keys())
    return all(answers)


def clip(model, max_norm):
    """Clip by the norm over both meshes, which torch's function refuses to mix."""
    by_mesh = {}
    for parameter in model.parameters():
        by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
    norms = [
        whole(nn.utils.get_total_norm([parameter.grad for parameter in parameters]))
        for parameters in by_mesh.values()
    ]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for parameters in by_mesh.values():
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


torch.manual_seed(1)
batch = torch.randn(16, WIDTH).to(device)
mine = batch.chunk(hosts)[host]  # the ranks of a host compute one model: they share a batch

plain, model = build(Pair), build(Pair)
plan = {"column": ColwiseParallel(), "row": RowwiseParallel()}
parallelize_module(model[1], mesh["pieces"], plan)
fully_shard(model, mesh=mesh["hosts"])  # all units, cut or whole, across hosts only
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
    shown["gradients"] &= close({n: whole(p.grad) for n, p in model.named_parameters()}, gradients)
    norms = nn.utils.clip_grad_norm_(plain.parameters(), 0.5), clip(model, 0.5)
    for optimizer in optimizers:
        optimizer.step()
    shown["weights"] &= close(
        {n: whole(p) for n, p in model.named_parameters()}, dict(plain.named_parameters())
    )
    if rank == 0:
        print(f"norm in step {step}     | {norms[0]:.4f}       | {norms[1]:.4f}")
try:
    found = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
except RuntimeError as error:
    found = f"{type(error).__name__}: {str(error).splitlines()[0]}"
if rank == 0:
    print()
    for name, equal in shown.items():
        print(f"{name} put together are those of the model in one piece: {equal}")
    print("torch's own clip_grad_norm_:")
    print(textwrap.fill(str(found), 80))

dist.destroy_process_group()
# --8<-- [end:body]
