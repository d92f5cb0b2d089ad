"""Tests that run on ranks: each is named after what it claims, and answers a reader's question.

The comment above a test names the reports that it answers; `tests/questions.toml` lists all
reports, what is right, and the tests that show it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from tests.ranks import DIST_TIMEOUT, run_ranks
from tests.toy import mean_square, my_part, whole_batch

Claim = Callable[[], None]


def on_ranks(world_size: int, *, dist_timeout: float = DIST_TIMEOUT) -> Callable[[Claim], Claim]:
    """Make a test of a function that runs on ranks.

    Args:
        world_size: Number of ranks.
        dist_timeout: Seconds that one collective may take.
    """

    def claim(function: Claim) -> Claim:
        @functools.wraps(function)
        def test() -> None:
            run_ranks(world_size, function, dist_timeout=dist_timeout)

        # The test takes over its name, so the function needs one under which ranks find it.
        function.__qualname__ = f"on_a_rank_{function.__name__}"
        function.__globals__[function.__qualname__] = function
        return test

    return claim


def loss(model: nn.Module, *, whole: bool = False) -> Tensor:
    batch = whole_batch()
    return mean_square(model(batch if whole else my_part(batch)))


def backward_beside(plain: nn.Module, model: nn.Module) -> None:
    loss(plain, whole=True).backward()
    loss(model).backward()


def train(
    optimizers: tuple[type, dict], plain: nn.Module, model: nn.Module, steps: int = 3
) -> None:
    """Train both with one kind of optimizer, on the parameters that are trainable."""
    kind, arguments = optimizers
    one, other = (
        kind([p for p in m.parameters() if p.requires_grad], **arguments) for m in (plain, model)
    )
    for _ in range(steps):
        one.zero_grad()
        other.zero_grad()
        backward_beside(plain, model)
        one.step()
        other.step()


SGD = (torch.optim.SGD, {"lr": 0.1})
ADAMW = (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1})


def numel_of(unit: FSDP) -> int:
    return sum(p._layout.total_numel for p in unit.parameters(recurse=False))


def numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
