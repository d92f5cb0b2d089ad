"""Average over all tokens when ranks have unequally many.

Why: a reduction takes the mean over ranks. If each rank took the mean over its own tokens, a
token on a rank with few of them counts more than one on a rank with many. Sums divided by one
number, the tokens of all ranks and all micro-batches of the step, weigh every token alike.

The reduction divides by the number of ranks, so a loss is multiplied by it. This class has no way
to say another divisor.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 unequal_batches_torch_fsdp1.py

Expected output:

    mean of each micro-batch, divided by two     error 0.0723
    sum, divided by this rank's tokens           error 0.0359
    sum, times ranks, divided by all tokens      error 0.0000
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(1)
tokens = torch.randn(10, 6, device=device)
micro_batches = tokens.split([1, 5, 2, 2])[2 * rank :][:2]  # 1 and 5 on rank 0, 2 and 2 on rank 1
count = torch.tensor(sum(map(len, micro_batches)), device=device)
dist.all_reduce(count)  # once a step: the tokens of all ranks and micro-batches


def build():
    """Build the same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)


def losses(model, batch):
    """Compute one loss per token."""
    return model(batch).square().mean(dim=1)


def gradients(model):
    """Return this rank's shards of the gradient."""
    return [parameter.grad for parameter in model.parameters()]


def train(loss_of):
    """Accumulate the gradient of both micro-batches in a sharded model."""
    model = FullyShardedDataParallel(build(), device_id=device)
    for batch in micro_batches:
        loss_of(losses(model, batch)).backward()
    return gradients(model)


whole = FullyShardedDataParallel(build(), device_id=device)
losses(whole, tokens).mean().backward()  # all tokens on every rank: the mean of equal gradients
truth = gradients(whole)


def report(case, found):
    """Print the largest error of the gradient, over all ranks."""
    errors = [(f - t).abs().max() for f, t in zip(found, truth, strict=True) if t.numel()]
    error = torch.stack([*errors, torch.zeros((), device=device)]).max()
    dist.all_reduce(error, dist.ReduceOp.MAX)
    if rank == 0:
        print(f"{case:44} error {error.item():.4f}")


mine = sum(map(len, micro_batches))
report("mean of each micro-batch, divided by two", train(lambda each: each.mean() / 2))
report("sum, divided by this rank's tokens", train(lambda each: each.sum() / mine))
report("sum, times ranks, divided by all tokens", train(lambda e: e.sum() * world_size / count))

dist.destroy_process_group()
# --8<-- [end:body]
