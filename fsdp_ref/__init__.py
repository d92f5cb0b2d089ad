"""Fully Sharded Data Parallel, written to be read.

Reading order for newcomers: `layout` (which rank owns which element), `states` (what memory
holds, where the step is), `flat_param` (one tensor, its shard, its views), `registered` (what a
module finds under a weight's name), `collectives`, `unit` (a step, hook by hook), `backward` (who
is reduced when, and how a backward ends), `schedule` (what stays in memory), and `fully_sharded`,
which people construct and call.
"""

from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.fully_sharded import FullyShardedDataParallel
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
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "explain",
    "lambda_auto_wrap_policy",
    "or_policy",
    "size_based_auto_wrap_policy",
    "timeline",
    "transformer_auto_wrap_policy",
    "unit_tree",
    "wrap",
]
