"""Fully Sharded Data Parallel, written to be read.

Reading order for newcomers: `layout` (which rank owns which element), `states` (what memory
holds, where the step is), `flat_param` (one tensor, its shard, its views), `registered` (what a
module finds under a weight's name), `collectives`, `unit` (a step, hook by hook), `backward` (who
is reduced when, and how a backward ends), `schedule` (what stays in memory), and `fully_sharded`,
which people construct and call.
"""

import importlib
from typing import Any

from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.fully_sharded import FullyShardedDataParallel, register_fsdp_forward_method
from fsdp_ref.inspection import explain, unit_tree
from fsdp_ref.layout import FlatLayout, ParameterSlot
from fsdp_ref.recording import Event, Wait
from fsdp_ref.states import Phase, ShardState
from fsdp_ref.timelines import Timeline, timeline
from fsdp_ref.wrapping import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    auto_wrap,
    composer_auto_wrap_policy,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    or_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

__all__ = [
    "CustomPolicy",
    "Event",
    "FlatLayout",
    "FlatParameter",
    "FullyShardedDataParallel",
    "ModuleWrapPolicy",
    "ParameterSlot",
    "Phase",
    "ShardState",
    "Timeline",
    "Wait",
    "always_wrap_policy",
    "auto_wrap",
    "composer_auto_wrap_policy",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "explain",
    "lambda_auto_wrap_policy",
    "or_policy",
    "register_fsdp_forward_method",
    "size_based_auto_wrap_policy",
    "timeline",
    "transformer_auto_wrap_policy",
    "unit_tree",
    "wrap",
]

# Torch's own enums and dataclasses, which the constructor takes as they are. They are imported
# when they are asked for, because torch.distributed.fsdp takes long to import.
_TORCHS_OWN = {
    "BackwardPrefetch": "torch.distributed.fsdp",
    "CPUOffload": "torch.distributed.fsdp",
    "FullOptimStateDictConfig": "torch.distributed.fsdp",
    "FullStateDictConfig": "torch.distributed.fsdp",
    "LocalOptimStateDictConfig": "torch.distributed.fsdp",
    "LocalStateDictConfig": "torch.distributed.fsdp",
    "MixedPrecision": "torch.distributed.fsdp",
    "OptimStateDictConfig": "torch.distributed.fsdp",
    "OptimStateKeyType": "torch.distributed.fsdp.fully_sharded_data_parallel",
    "ShardedGradScaler": "torch.distributed.fsdp.sharded_grad_scaler",
    "ShardedOptimStateDictConfig": "torch.distributed.fsdp",
    "ShardedStateDictConfig": "torch.distributed.fsdp",
    "ShardingStrategy": "torch.distributed.fsdp",
    "StateDictConfig": "torch.distributed.fsdp",
    "StateDictSettings": "torch.distributed.fsdp",
    "StateDictType": "torch.distributed.fsdp",
}


def __getattr__(name: str) -> Any:
    """Return one of torch's own classes, so that changing the package in an import is enough."""
    if name in _TORCHS_OWN:
        return getattr(importlib.import_module(_TORCHS_OWN[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
