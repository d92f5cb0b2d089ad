"""Add up what a step sends, beside what it has to send.

Why: what a step sends follows from the units alone, so it can be predicted, and a difference
means something: a unit that is called twice, a frozen one that is reduced, an evaluation in
between. The last line but one says what sharding costs beside plain data parallelism.

The second layer is frozen: gathered, and not reduced. The third is kept whole from its forward
to its backward, and not gathered again.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 bytes_of_a_step.py

Expected output:

    unit             operation       ranks  dtype    count  bytes sent  expected
    root             all-gather      0-3    float32      1         216       216
    root             reduce-scatter  0-3    float32      1         216       216
    0                all-gather      0-3    float32      2         432       432
    0                reduce-scatter  0-3    float32      1         216       216
    1                all-gather      0-3    float32      2         432       432
    2                all-gather      0-3    float32      1         216       216
    2                reduce-scatter  0-3    float32      1         216       216
    all units        all-gather                          6       1,296     1,296
    all units        reduce-scatter                      3         648       648
    all units        all of these                        9       1,944     1,944
    end of backward  all-reduce      0-3    int64        1          72        72
    full parameters in memory: at most 864 bytes
    plain data parallelism would send 1,296 bytes; this is 1.5000 of it
    measured and expected differ in 0 places
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

torch.manual_seed(0)  # the same weights on every rank
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).to(device)
model[1].requires_grad_(False)
for index in range(3):
    strategy = "SHARD_GRAD_OP" if index == 2 else "FULL_SHARD"
    model[index] = FullyShardedDataParallel(model[index], sharding_strategy=strategy)
model = FullyShardedDataParallel(model)

with timeline() as recorded:
    model(torch.ones(2, 8, device=device)).sum().backward()

if rank == 0:
    summary = recorded.summary(model)
    print(summary)
    print(f"measured and expected differ in {len(summary.differences)} places")

dist.destroy_process_group()
# --8<-- [end:body]
