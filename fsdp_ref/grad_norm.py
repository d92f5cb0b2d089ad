"""Clipping by the true norm: every element of every shard counted once, one number for all.

Each rank sees only shards, so `torch.nn.utils.clip_grad_norm_` computes a norm of its own on
each rank and scales the pieces of one gradient differently.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_ref.collectives import all_reduce, explained, record_all_reduce
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.rank_group import RankGroup


def total_norm(
    flat_params: Sequence[FlatParameter], norm_type: float, groups: Sequence[RankGroup]
) -> Tensor:
    """Return the norm of the whole model's gradient, the same number on every rank. Collective.

    A unit whose group is smaller than the root's exists once per such group, with weights of
    its own; each of those counts. Copies that are kept equal count once.

    Args:
        flat_params: All flat parameters of the model; those without gradient count as zero.
        norm_type: The p of the p-norm; may be infinite.
        groups: The root's groups.

    Returns:
        A scalar tensor in float32, or in float64 if a parameter is.

    Raises:
        ValueError: If `norm_type` is not above 0.
    """
    dtype = torch.float32  # of all ranks alike, so not that of the gradients that are there
    for flat_param in flat_params:
        dtype = torch.promote_types(dtype, flat_param.dtype)
    device = flat_params[0].device if flat_params else torch.device("cpu")
    infinite = norm_type == float("inf")
    if not norm_type > 0:
        raise ValueError(f"expected a norm_type above 0, found {norm_type}")
    total = torch.zeros((), dtype=dtype, device=device)
    for flat_param in flat_params:
        gradient = flat_param._saved_grad_shard
        if gradient is None or gradient.numel() == 0:
            continue
        norm = torch.linalg.vector_norm(gradient, norm_type, dtype=dtype).to(device)
        if infinite:
            total = torch.maximum(total, norm)
        else:
            total += norm**norm_type / flat_param._placement.copies
    record_all_reduce("clip_grad_norm_()", total, groups)
    with explained("clip_grad_norm_", groups):
        if infinite:
            return all_reduce(total, dist.ReduceOp.MAX, groups)
        return all_reduce(total, dist.ReduceOp.SUM, groups) ** (1 / norm_type)


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
