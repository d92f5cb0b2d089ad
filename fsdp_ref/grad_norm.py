"""Clipping by the true norm: every element of every shard counted once, one number for all.

Each rank sees only shards, so `torch.nn.utils.clip_grad_norm_` computes a norm of its own on
each rank and scales the pieces of one gradient differently. The true norm costs one all-reduce
of a single number: p-th powers add up over shards as they do over parameters, and the largest
element of all is the largest of the ranks' largest ones.

Gradients are added up in float32 or better, whatever their own dtype. They stay where they are,
also on the CPU when they are offloaded; only their norms travel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_ref.collectives import all_reduce, explained, record_all_reduce
from fsdp_ref.errors import ClippingError
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.rank_group import RankGroup


def total_norm(
    flat_params: Sequence[FlatParameter],
    norm_type: float,
    groups: Sequence[RankGroup],
    others: Sequence[nn.Parameter] = (),
) -> Tensor:
    """Return the norm of the whole model's gradient, the same number on every rank. Collective.

    A unit whose group is smaller than the root's exists once per such group, with weights of
    its own; each of those counts. Copies that are kept equal count once. So do parameters that
    no unit holds: every rank has a gradient of its own for them, and counts its share of it.

    Args:
        flat_params: All flat parameters of the model; those without gradient count as zero.
        norm_type: The p of the p-norm; may be infinite.
        groups: The root's groups.
        others: Parameters of the model that no unit holds, such as ignored ones.

    Returns:
        A scalar tensor in float32, or in float64 if a parameter is, on the device to compute on.
        NaN or infinite if a gradient is.

    Raises:
        ClippingError: If `norm_type` is not above 0: that is no norm.
    """
    if not norm_type > 0:
        raise ClippingError.at(
            "clip_grad_norm_",
            expected="a norm_type above 0, or float('inf')",
            found=f"norm_type={norm_type}",
            fix="The common one is 2.",
        )
    groups = _widest(flat_params, groups)
    dtype, device = _kind_of_result(flat_params, others)
    # A sum of powers: float32 could not hold the higher ones.
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient, share in _shares(flat_params, others, math.prod(group.size for group in groups)):
        norm = _norm(gradient, norm_type, dtype).to(device, torch.float64)
        if norm_type == math.inf:
            total = torch.maximum(total, norm)
        else:
            total += norm**norm_type * share
    record_all_reduce("clip_grad_norm_()", total, groups)
    with explained("clip_grad_norm_", groups):
        if norm_type == math.inf:
            return all_reduce(total, dist.ReduceOp.MAX, groups).to(dtype)
        return (all_reduce(total, dist.ReduceOp.SUM, groups) ** (1 / norm_type)).to(dtype)


def scale_gradients(
    flat_params: Sequence[FlatParameter],
    norm: Tensor,
    max_norm: float,
    others: Sequence[nn.Parameter] = (),
) -> None:
    """Scale gradients so that their norm is at most ``max_norm``. Local.

    Args:
        flat_params: The flat parameters whose gradients to scale, in place.
        norm: The total norm, as returned by `total_norm`. If it is NaN, so is everything after.
        max_norm: The largest norm allowed; may be infinite.
        others: Parameters that no unit holds.

    Raises:
        ClippingError: If `max_norm` is negative, which would turn every gradient around, or NaN.
    """
    if not max_norm >= 0:
        raise ClippingError.at(
            "clip_grad_norm_",
            expected="a max_norm of at least 0",
            found=f"max_norm={max_norm}",
            fix="To measure without clipping, pass float('inf').",
        )
    # The small constant and the clamp are those of torch.nn.utils.clip_grad_norm_.
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient, _ in _shares(flat_params, others, 1):
        # A number without dimension leaves the gradient's dtype as it is. Rounding it to that
        # dtype first would lose most of its digits where gradients are kept in bfloat16.
        gradient.mul_(coefficient.to(gradient.device))


def _shares(
    flat_params: Sequence[FlatParameter], others: Sequence[nn.Parameter], ranks: int
) -> Iterator[tuple[Tensor, float]]:
    """Yield this rank's gradients, and how much of each one's norm is for this rank to count."""
    for flat_param in flat_params:
        if flat_param._saved_grad_shard is not None and flat_param.numel() > 0:
            yield flat_param._saved_grad_shard, 1 / flat_param._placement.copies
    for parameter in others:
        if parameter.grad is not None and parameter.grad.numel() > 0:
            yield parameter.grad.detach(), 1 / ranks


def _norm(gradient: Tensor, norm_type: float, dtype: torch.dtype) -> Tensor:
    # High powers of small numbers would vanish in float32.
    high = 2 < norm_type < math.inf
    gradient = gradient.abs() if gradient.is_complex() else gradient
    norm: Tensor = torch.linalg.vector_norm(
        gradient, norm_type, dtype=torch.float64 if high else dtype
    )
    return norm


def _kind_of_result(
    flat_params: Sequence[FlatParameter], others: Sequence[nn.Parameter]
) -> tuple[torch.dtype, torch.device]:
    """Choose dtype and device from the parameters, which all ranks have, not from gradients."""
    dtype = torch.float32
    for parameter in (*flat_params, *others):
        if parameter.is_floating_point():
            dtype = torch.promote_types(dtype, parameter.dtype)
    devices = [p.compute_device for p in flat_params] + [p.device for p in others]
    return dtype, devices[0] if devices else torch.device("cpu")


def _widest(flat_params: Sequence[FlatParameter], groups: Sequence[RankGroup]) -> list[RankGroup]:
    """Return the groups with the most ranks: an inner unit may be spread wider than the root."""
    candidates = [list(groups), *(p._placement.groups for p in flat_params)]
    return max(candidates, key=lambda chain: math.prod(group.size for group in chain))
