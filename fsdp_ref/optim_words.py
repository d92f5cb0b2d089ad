"""Optimizer state in words: what one rank can tell others of it before any tensor moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_ref.errors import OptimizerStateError


@dataclass(frozen=True)
class Whole:
    """A value with one element per element of a weight, to be had when it is its turn.

    Attributes:
        shape: Its whole shape.
        dtype: Its dtype.
        fetch: Returns it; collective where it is not on this rank already.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fetch: Callable[[], Tensor] = lambda: torch.empty(0)


def encoded(value: Any) -> Any:
    """Return what JSON can say of a value: tensors of any dimension become their shape and dtype.

    Args:
        value: Dicts, lists and tuples of tensors, numbers and words.

    Raises:
        OptimizerStateError: If there is anything else in it.

    Examples:
        >>> decoded(encoded({"step": torch.tensor(3.0), "betas": (0.9, 0.99)}))
        {'step': tensor(3.), 'betas': (0.9, 0.99)}
    """
    if isinstance(value, Mapping):
        return {"d": {key: encoded(one) for key, one in value.items()}}
    if isinstance(value, (tuple, list)):
        return {"t" if isinstance(value, tuple) else "l": [encoded(one) for one in value]}
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"w": [*value.shape], "y": dtype} if value.dim() else {"s": value.item(), "y": dtype}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise OptimizerStateError.at(
        "optimizer state",
        expected="tensors, numbers and words, which can be told to other ranks",
        found=f"a {type(value).__name__}",
        fix="Keep other objects out of the state, or give every rank the dict.",
    )


def decoded(told: Any) -> Any:
    """Undo `encoded`; what was a tensor with dimensions comes back as a `Whole` without values."""
    if not isinstance(told, dict):
        return told
    if "d" in told:
        return {key: decoded(one) for key, one in told["d"].items()}
    if "t" in told:
        return tuple(map(decoded, told["t"]))
    if "l" in told:
        return list(map(decoded, told["l"]))
    dtype = getattr(torch, told["y"])
    if "s" in told:
        return torch.tensor(told["s"], dtype=dtype)
    return Whole(tuple(told["w"]), dtype)
