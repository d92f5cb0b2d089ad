"""Gather the next unit ahead: when, and what it costs in memory.

Why: a layer cannot compute before its weights have arrived. Gathered ahead, they travel
while the layer before computes. `BACKWARD_PRE` asks for them before the gradients of that
layer are computed, `BACKWARD_POST` after, and `None` not before they are needed.
What is sent is the same, and so is the result.

The upper table is a backward. The lower one is a forward, which gathers ahead on request
only, in the order of the forward before it. The last line of each table says how many
elements were gathered at once; 12 of them are the root's.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 prefetch.py

Expected output:

    BACKWARD_PRE      BACKWARD_POST     None
    all-gather 2      all-gather 2      all-gather 2
    all-gather 1      compute 2         compute 2
    compute 2         all-gather 1      reduce-scatter 2
    reduce-scatter 2  reduce-scatter 2  all-gather 1
    all-gather 0      compute 1         compute 1
    compute 1         all-gather 0      reduce-scatter 1
    reduce-scatter 1  reduce-scatter 1  all-gather 0
    compute 0         compute 0         compute 0
    reduce-scatter 0  reduce-scatter 0  reduce-scatter 0
    180 gathered      108 gathered      108 gathered
    forward           forward_prefetch
    all-gather 0      all-gather 0
    compute 0         all-gather 1
    all-gather 1      compute 0
    compute 1         all-gather 2
    all-gather 2      compute 1
    compute 2         compute 2
    108 gathered      180 gathered
"""

# --8<-- [start:body]
import os
import time

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel, timeline

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()


def build():
    """Build four layers; the first three will be units, the last one stays in the root."""
    torch.manual_seed(0)
    sizes = [(4, 8), (8, 12), (12, 6), (6, 2)]
    return nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes)).to(device)


def watch(title, *, forward=False, **options):
    """Train two steps; return what happened in half of the second one, with its peak memory."""
    model = build()
    computed = []
    for index in range(3):
        begins = model[index].register_full_backward_pre_hook
        if forward:
            begins = model[index].register_forward_pre_hook
        begins(lambda *_, i=index: computed.append((time.perf_counter_ns(), f"compute {i}")))
        model[index] = FullyShardedDataParallel(model[index], **options)
    model = FullyShardedDataParallel(model, **options)
    batch = torch.ones(2, 4, device=device, requires_grad=True)
    model(batch).sum().backward()
    computed.clear()
    with timeline() as in_forward:
        loss = model(batch).sum()
    with timeline() as in_backward:  # always, or the root would stay gathered
        loss.backward()
    recorded = in_forward if forward else in_backward
    sent = [e for e in recorded.events if e.operation in ("all-gather", "reduce-scatter")]
    happened = sorted(computed + [(e.time_ns, f"{e.operation} {e.unit}") for e in sent])
    texts = [text for _, text in happened if "root" not in text]
    peak = recorded.peak_unsharded_bytes // 4  # four bytes in each float32 element
    return [title, *texts, f"{peak} gathered"]


columns = [
    watch("BACKWARD_PRE", backward_prefetch="BACKWARD_PRE"),
    watch("BACKWARD_POST", backward_prefetch="BACKWARD_POST"),
    watch("None", backward_prefetch=None),
]
forwards = [
    watch("forward", forward=True),
    watch("forward_prefetch", forward=True, forward_prefetch=True),
]
if rank == 0:
    for table in columns, forwards:
        for row in zip(*table, strict=True):
            print("".join(cell.ljust(18) for cell in row).rstrip())

dist.destroy_process_group()
# --8<-- [end:body]
