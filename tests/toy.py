"""A toy model, its data and its comparisons, for tests that are not about the model.

`Stack` is three residual layers and a head. The units are the layers; the head belongs to the
root. The reference is the same model, unsharded, on the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from tests.models import part
from tests.parity.training import full_gradients, full_weights, gradients_of

WIDTH = 5


class Layer(nn.Module):
    """A small residual layer of 35 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.linear(x))


class Stack(nn.Module):
    """Layers in a row with a head."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(depth)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def nested(model: Stack, **arguments: Any) -> FSDP:
    """Make every layer a unit, and the whole, all with the same arguments."""
    for index, layer in enumerate(model.layers):
        model.layers[index] = FSDP(layer, **arguments)
    return FSDP(model, **arguments)


def one_unit(model: nn.Module, **arguments: Any) -> FSDP:
    return FSDP(model, **arguments)


def three_deep(model: Stack, **arguments: Any) -> FSDP:
    """Units inside units inside the root."""
    for layer in model.layers:
        layer.linear = FSDP(layer.linear, **arguments)
    return nested(model, **arguments)


WRAPPINGS = {"nested": nested, "one unit": one_unit, "three deep": three_deep}


def seeded(build: Callable[[], nn.Module] = Stack) -> nn.Module:
    """Build in double precision, equal everywhere."""
    torch.manual_seed(0)
    return build().double()


def whole_batch(width: int = WIDTH) -> Tensor:
    return torch.randn(12, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def my_part(batch: Tensor) -> Tensor:
    return part(batch, dist.get_rank(), dist.get_world_size())


def mean_square(y: Tensor) -> Tensor:
    return y.square().mean()


def assert_equal_gradients(model: FSDP, plain: nn.Module, zeros: tuple[str, ...] = ()) -> None:
    """Compare with the plain model's gradients, by name; `None` must be `None`. Collective."""
    expected, found = gradients_of(plain), full_gradients(model)
    assert set(expected) == set(found)
    for name, gradient in expected.items():
        if name.startswith(zeros):  # unused inside a used unit: part of its flat gradient
            assert torch.equal(found[name], torch.zeros_like(found[name])), name
        elif gradient is None:
            assert found[name] is None, f"{name}: expected None, found a gradient"
        else:
            assert found[name] is not None, f"{name}: expected a gradient, found None"
            assert_near(found[name], gradient, name)


def assert_equal_weights(model: FSDP, plain: nn.Module) -> None:
    """Compare with the plain model's weights, by name. Collective."""
    weights = full_weights(model)
    assert list(weights) == [name for name, _ in plain.named_parameters()]
    for name, parameter in plain.named_parameters():
        assert_near(weights[name], parameter.detach(), name)


def assert_near(found: Tensor, expected: Tensor, name: str) -> None:
    torch.testing.assert_close(
        found, expected, rtol=1e-10, atol=1e-12, msg=lambda text: f"{name}: {text}"
    )


def assert_sharded(model: nn.Module) -> None:
    """No unit below ``model`` holds full parameters."""
    for unit in FSDP.fsdp_modules(model):
        for name, flat_param in unit.named_parameters(recurse=False):
            full = flat_param._full_param_padded
            nbytes = 0 if full is None else full.untyped_storage().nbytes()  # None: never used
            assert nbytes == 0, f"{name} of {unit._unit.where} still holds {nbytes} bytes"
