"""Modules that do unusual things with their weights train like the plain ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ModuleWrapPolicy
from tests.models import part
from tests.ranks import run_ranks
from tests.toy import seeded


class Around(nn.Module):
    """A module under test, then a head."""

    def __init__(self, middle: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.middle, self.head, self.run = middle, nn.Linear(5, 2), run

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.run(self.middle, x)))


class Lists(nn.Module):
    """Keeps its weights in a list and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([nn.Parameter(torch.randn(5, 5)) for _ in range(2)])
        self.named = nn.ParameterDict({"last": nn.Parameter(torch.randn(5, 5))})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.several:
            x = torch.tanh(x @ weight)
        return x @ self.named["last"]


def call(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


def recur(module: nn.Module, x: Tensor) -> Tensor:
    return module(x.unsqueeze(1))[0].squeeze(1)


def attend(module: nn.Module, x: Tensor) -> Tensor:
    x = x.unsqueeze(1)
    return module(x, x, x)[0].squeeze(1)


def encode(module: nn.Module, x: Tensor) -> Tensor:
    return module(x.unsqueeze(1)).squeeze(1)


def look_up(module: nn.Module, x: Tensor) -> Tensor:
    return module((x.abs() * 3).long().clamp(max=8)).sum(1)


CASES: dict[str, Callable[[], nn.Module]] = {
    "LSTM, which keeps a list of its weights": lambda: Around(
        nn.LSTM(5, 5, 2, batch_first=True), recur
    ),
    "GRU": lambda: Around(nn.GRU(5, 5, batch_first=True), recur),
    "weight norm by a hook": lambda: Around(weight_norm(nn.Linear(5, 5)), call),
    "weight norm by a parametrization": lambda: Around(
        parametrizations.weight_norm(nn.Linear(5, 5)), call
    ),
    "spectral norm by a hook": lambda: Around(spectral_norm(nn.Linear(5, 5)), call),
    "spectral norm by a parametrization": lambda: Around(
        parametrizations.spectral_norm(nn.Linear(5, 5)), call
    ),
    "orthogonal": lambda: Around(parametrizations.orthogonal(nn.Linear(5, 5)), call),
    "lists and dicts": lambda: Around(Lists(), call),
    "sparse gradients": lambda: Around(nn.Embedding(9, 5, sparse=True), look_up),
    "attention, which reads the weights of its projection": lambda: Around(
        nn.MultiheadAttention(5, 1, batch_first=True), attend
    ),
    "encoder layer, which has a fused path in evaluation": lambda: Around(
        nn.TransformerEncoderLayer(5, 1, 7, 0.0, batch_first=True), encode
    ),
    "one kernel for three inputs": lambda: Around(
        nn.Bilinear(5, 5, 5), lambda module, x: module(x, x.flip(-1))
    ),
}
UNITS = ModuleWrapPolicy(
    {nn.Linear, nn.LSTM, nn.GRU, nn.Embedding, nn.TransformerEncoderLayer, nn.MultiheadAttention}
)


def difference(build: Callable[[], nn.Module], policy: object, use_orig_params: bool) -> float:
    """Train three steps beside the plain model; compare outputs in evaluation."""
    plain = seeded(build)
    model = FSDP(seeded(build), auto_wrap_policy=policy, use_orig_params=use_orig_params)
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mine = part(x, dist.get_rank(), dist.get_world_size())
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
    for _ in range(3):
        for one, optimizer, batch in zip((plain, model), optimizers, (x, mine), strict=True):
            optimizer.zero_grad()
            one(batch).square().mean().backward()
            optimizer.step()
    plain.eval()
    model.eval()
    with torch.no_grad():
        return (plain(x) - model(x)).abs().max().item()


def every_wrapping(case: str) -> dict[str, float]:
    return {
        f"{'units' if policy else 'one unit'}, use_orig_params={use_orig_params}": difference(
            CASES[case], policy, use_orig_params
        )
        for policy in (None, UNITS)
        for use_orig_params in (False, True)
    }


def every_case() -> dict[str, dict[str, float]]:
    return {case: every_wrapping(case) for case in CASES}


@pytest.mark.parametrize("world_size", [2, 3])
def test_modules_that_treat_their_weights_in_odd_ways_train_like_plain_ones(world_size):
    for outcome in run_ranks(world_size, every_case, timeout=100):
        assert outcome.keys() == CASES.keys()
        for case, differences in outcome.items():
            assert max(differences.values()) < 1e-12, (case, differences)


def fused_path() -> float:
    """An even number of heads, so that torch would read the weights of inner units by itself."""
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True).eval()
    torch.manual_seed(0)
    inside = nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True)
    model = FSDP(inside, auto_wrap_policy=ModuleWrapPolicy({nn.Linear, nn.LayerNorm})).eval()
    x = torch.randn(2, 3, 4)
    with torch.no_grad():
        return (model(x) - plain(x)).abs().max().item()


def test_a_fused_module_takes_the_path_through_its_parts_while_they_are_sharded():
    for gap in run_ranks(2, fused_path):
        assert gap < 1e-6
