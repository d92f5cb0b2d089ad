"""Clipping by the true norm: every element of every shard counted once, one number for all.

Each rank sees only shards, so `torch.nn.utils.clip_grad_norm_` computes a norm of its own on
each rank and scales the pieces of one gradient differently.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_ref.collectives import all_reduce
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.rank_group import RankGroup


def total_norm(
    flat_params: Sequence[FlatParameter], norm_type: float, group: RankGroup, device: torch.device
) -> Tensor:
    """Return the norm of the whole model's gradient, the same number on every rank. Collective.

    A unit whose group is smaller than ``group`` exists once per such group, with weights of
    its own; each of those counts.

    Args:
        flat_params: All flat parameters of the model; those without gradient count as zero.
        norm_type: The p of the p-norm; may be infinite.
        group: The root's group.
        device: Where to compute, also when there is no gradient at all.

    Returns:
        A scalar tensor in float32, or in float64 if a parameter is.
    """
    dtype = torch.float32  # of all ranks alike, so not that of the gradients that are there
    for flat_param in flat_params:
        dtype = torch.promote_types(dtype, flat_param.dtype)
    shards = [p._saved_grad_shard for p in flat_params]
    gradients = [shard for shard in shards if shard is not None]
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=dtype) for g in gradients]
    norms = [n.to(device) for n in norms] or [torch.zeros((), dtype=dtype, device=device)]
    local = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if norm_type == float("inf"):
        return all_reduce(local, dist.ReduceOp.MAX, group)
    return all_reduce(local**norm_type, dist.ReduceOp.SUM, group) ** (1 / norm_type)


def scale_gradients(flat_params: Sequence[FlatParameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients so that their norm is at most ``max_norm``. Local.

    Args:
        flat_params: The flat parameters whose gradients to scale.
        norm: The total norm, as returned by `total_norm`.
        max_norm: The largest norm allowed.
    """
    # The small constant and the clamp are those of torch.nn.utils.clip_grad_norm_.
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for flat_param in flat_params:
        gradient = flat_param._saved_grad_shard
        if gradient is not None:
            gradient.mul_(coefficient.to(gradient.device, gradient.dtype))
