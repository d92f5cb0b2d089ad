"""Offload to the CPU, with torch's `FullyShardedDataParallel`: not without a GPU.

Torch's class does what the other two do, on a machine with a GPU. Without one it looks for
an accelerator to copy shards to, and finds none. That happens in the first forward.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 offload_to_the_cpu_torch_fsdp1.py

Expected output:

    RuntimeError: Cannot access accelerator device when none is available.
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel

dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
rank = dist.get_rank()

cpu = torch.device("cpu")  # the refusal is one of CPUs; `device` works if that is a GPU
torch.manual_seed(0)
try:
    model = FullyShardedDataParallel(
        nn.Linear(4, 4, bias=False), cpu_offload=CPUOffload(offload_params=True), device_id=cpu
    )
    model(torch.ones(2, 4)).sum().backward()
except (RuntimeError, AssertionError) as error:
    if rank == 0:
        print(f"{type(error).__name__}: {str(error).splitlines()[0]}")

dist.destroy_process_group()
# --8<-- [end:body]
