"""Say how many ranks a host has, when the launcher does not.

Why: `'node'` and `'local_rank_across_nodes'` read LOCAL_WORLD_SIZE, and so does a hybrid strategy
without groups of its own. `torchrun` sets it. `mpirun`, `srun` or your own `spawn` may not, and a
guess would be a wrong group on every rank. Set the variable, or name groups with a number.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 4 another_launcher.py

Expected output:

    process_group='node':
      [rank 0] FSDP201 unit 'Linear', process_group='node': expected the number of ranks on
      each host, found no LOCAL_WORLD_SIZE in the environment. Start with torchrun, set the
      variable, or use 'setK' or 'modK'.
    HYBRID_SHARD:
      [rank 0] FSDP201 unit 'Linear', process_group='node': expected the number of ranks on
      each host, found no LOCAL_WORLD_SIZE in the environment. Start with torchrun, set the
      variable, or use 'setK' or 'modK'.
    HYBRID_SHARD, ('set2', 'mod2'):
      cut among ranks [0, 1]
    HYBRID_SHARD, LOCAL_WORLD_SIZE=2:
      cut among ranks [0, 1]
"""

# --8<-- [start:body]
import os
import textwrap

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel
from fsdp_ref.errors import GroupWordError

os.environ.pop("LOCAL_WORLD_SIZE")  # as if something else had started this process
dist.init_process_group()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def attempt(title, **arguments):
    """Make a model with some arguments; on rank 0, print its groups or what was wrong."""
    layer = nn.Linear(4, 4, device=device)
    try:
        model = FullyShardedDataParallel(layer, **arguments)
        told = f"cut among ranks {dist.get_process_group_ranks(model.process_group)}"
    except GroupWordError as error:
        told = str(error)
    if dist.get_rank() == 0:
        print(f"{title}:")
        print(textwrap.fill(told, 88, initial_indent="  ", subsequent_indent="  "))


attempt("process_group='node'", process_group="node")
attempt("HYBRID_SHARD", sharding_strategy="HYBRID_SHARD")
pair = ("set2", "mod2")
attempt(f"HYBRID_SHARD, {pair}", sharding_strategy="HYBRID_SHARD", process_group=pair)
os.environ["LOCAL_WORLD_SIZE"] = "2"
attempt("HYBRID_SHARD, LOCAL_WORLD_SIZE=2", sharding_strategy="HYBRID_SHARD")

dist.destroy_process_group()
# --8<-- [end:body]
