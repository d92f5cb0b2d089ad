"""Compare the strategies: what a step sends, and what memory holds.

Why: strategies trade memory for messages. Each row is one training step of the same model of
six layers, each a unit of its own. Gathered is the most elements of full parameters in memory
at once; kept is what a rank stores between steps; sent counts elements that one rank sends in
a step, in a ring.

The hybrid strategies cut over pairs of ranks and hold two copies. On two hosts a pair would be
the ranks of one host: then only the all-reduce goes from host to host.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 bytes_and_memory.py

Expected output:

                        gathered kept all-gather reduce-scatter all-reduce sent
    FULL_SHARD               512  384       2304           1152          0 3456
    SHARD_GRAD_OP           1536  384       1152           1152          0 2304
    NO_SHARD                1536 1536          0              0       2304 2304
    HYBRID_SHARD             512  768       1536            768        768 3072
    _HYBRID_SHARD_ZERO2     1536  768        768            768        768 2304
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel, timeline

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()
TITLES = ["gathered", "kept", "all-gather", "reduce-scatter", "all-reduce", "sent"]


def build():
    """Build six layers of 256 elements each."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6))).to(device)


def measure(strategy, group=None):
    """Train one step under a strategy and print a row."""
    options = {"sharding_strategy": strategy, "process_group": group}
    model = build()
    for index in range(len(model)):
        model[index] = FullyShardedDataParallel(model[index], **options)
    model = FullyShardedDataParallel(model, **options)
    with timeline() as recorded:
        model(torch.ones(4, 16, device=device)).sum().backward()
    gathered = recorded.peak_unsharded_bytes // 4  # four bytes in each float32 element
    kept = sum(p.numel() for p in model.parameters())
    sent = {"all-gather": 0, "reduce-scatter": 0, "all-reduce": 0}
    for event in recorded.events:
        if event.operation in sent and event.dtype is torch.float32:
            sent[event.operation] += event.bytes_on_wire // 4
    if rank == 0:
        numbers = [gathered, kept, *sent.values(), sum(sent.values())]
        cells = (f"{number:{len(name)}}" for name, number in zip(TITLES, numbers, strict=True))
        print(f"{strategy:19}", *cells)


if rank == 0:
    print(f"{'':19}", *TITLES)
measure("FULL_SHARD")
measure("SHARD_GRAD_OP")
measure("NO_SHARD")
measure("HYBRID_SHARD", ("set2", "mod2"))
measure("_HYBRID_SHARD_ZERO2", ("set2", "mod2"))

dist.destroy_process_group()
# --8<-- [end:body]
