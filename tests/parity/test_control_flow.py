"""Unusual ways through a model: the gradients are still those of plain PyTorch.

Each way is a function that is run twice, on the plain model with the whole batch and on the
sharded model with this rank's part. Losses are means, so the gradients have to agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ModuleWrapPolicy, errors, timeline
from tests.models import part
from tests.parity.training import full_gradients, gradients_of
from tests.ranks import run_ranks
from tests.toy import (
    WIDTH,
    WRAPPINGS,
    Stack,
    assert_equal_gradients,
    assert_sharded,
    mean_square,
    my_part,
    nested,
    seeded,
    whole_batch,
)


class Checkpointed(nn.Module):
    """Recompute the module inside during the backward."""

    def __init__(self, module: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = module, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


# ---------------------------------------------------------------- ways through it


def once(model: nn.Module, x: Tensor) -> None:
    mean_square(model(x)).backward()


def input_needs_gradient(model: nn.Module, x: Tensor) -> None:
    mean_square(model(x.clone().requires_grad_())).backward()


def two_forwards_one_backward(model: nn.Module, x: Tensor) -> None:
    (mean_square(model(x)) + mean_square(model(2 * x))).backward()


def two_forwards_two_backwards(model: nn.Module, x: Tensor) -> None:
    first, second = mean_square(model(x)), mean_square(model(2 * x))
    first.backward()
    second.backward()


def two_forwards_two_backwards_reversed(model: nn.Module, x: Tensor) -> None:
    first, second = mean_square(model(x)), mean_square(model(2 * x))
    second.backward()
    first.backward()


def two_forwards_but_only_the_second_counts(model: nn.Module, x: Tensor) -> None:
    first, second = mean_square(model(x)), mean_square(model(2 * x))
    second.backward()
    assert first.requires_grad  # alive, never differentiated


def output_of_one_call_feeds_the_next(model: nn.Module, x: Tensor) -> None:
    mean_square(model(torch.cat([model(x), model(x), x[:, :1]], dim=1))).backward()


def the_same_graph_twice(model: nn.Module, x: Tensor) -> None:
    loss = mean_square(model(x))
    loss.backward(retain_graph=True)
    loss.backward()


def three_backwards_accumulate(model: nn.Module, x: Tensor) -> None:
    for factor in (1.0, 0.5, 2.0):
        mean_square(model(factor * x)).backward()


def evaluation_in_between(model: nn.Module, x: Tensor) -> None:
    loss = mean_square(model(x))
    with torch.no_grad():
        model(3 * x)
    loss.backward()


def inference_first(model: nn.Module, x: Tensor) -> None:
    with torch.inference_mode():
        model(x)
    once(model, x)


def whole_model_in_a_checkpoint(model: nn.Module, x: Tensor) -> None:
    mean_square(checkpoint(model, x, use_reentrant=False)).backward()


def whole_model_in_a_reentrant_checkpoint(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    mean_square(checkpoint(model, x, use_reentrant=True)).backward()


def two_reentrant_checkpoints_of_the_model(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    y = checkpoint(model, x, use_reentrant=True)
    z = checkpoint(model, 2 * x, use_reentrant=True)
    mean_square(y + z).backward()


def saved_tensors_on_cpu(model: nn.Module, x: Tensor) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = mean_square(model(x))
    loss.backward()


def a_failed_forward_before(model: nn.Module, x: Tensor) -> None:
    with pytest.raises(RuntimeError):
        model(x[:, :-1])
    once(model, x)


def a_failed_backward_before(model: nn.Module, x: Tensor) -> None:
    y = model(x)
    y.register_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        mean_square(y).backward()
    del y
    once(model, x)


def _fail(gradient: Tensor) -> Tensor:
    raise ZeroDivisionError("in a hook")


WAYS = [
    once,
    input_needs_gradient,
    two_forwards_one_backward,
    two_forwards_two_backwards,
    two_forwards_two_backwards_reversed,
    two_forwards_but_only_the_second_counts,
    output_of_one_call_feeds_the_next,
    the_same_graph_twice,
    three_backwards_accumulate,
    evaluation_in_between,
    inference_first,
    whole_model_in_a_checkpoint,
    whole_model_in_a_reentrant_checkpoint,
    two_reentrant_checkpoints_of_the_model,
    saved_tensors_on_cpu,
    a_failed_forward_before,
    a_failed_backward_before,
]


# ---------------------------------------------------------------- comparing


def compare(
    build: Callable[[], nn.Module],
    wrap: Callable[[Any], nn.Module],
    way: Callable[[nn.Module, Tensor], None],
) -> list[str]:
    """Assert equal gradients; return what the sharded run did. On ranks."""
    x = whole_batch()
    plain = seeded(build)
    way(plain, x)
    model = wrap(seeded(build))
    with timeline() as recorded:
        way(model, my_part(x))
    assert_equal_gradients(model, plain, getattr(build, "zeros", ()))
    assert_sharded(model)
    once(model, my_part(x))  # it goes on
    assert_sharded(model)
    return recorded.lines()


@pytest.mark.parametrize(
    ("wrapping", "world_size"),
    [("nested", 1), ("nested", 2), ("nested", 3), ("one unit", 2), ("three deep", 2)],
)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_gradients_equal_plain_pytorch(way, wrapping, world_size):
    lines = run_ranks(world_size, compare, Stack, WRAPPINGS[wrapping], way)
    assert all(rank == lines[0] for rank in lines), "ranks did different things"


# ---------------------------------------------------------------- checkpoints and units


def checkpoint_around_units(reentrant: bool, model: Stack) -> nn.Module:
    for index, layer in enumerate(model.layers):
        model.layers[index] = Checkpointed(FSDP(layer), reentrant)
    return FSDP(model)


def checkpoint_inside_units(reentrant: bool, model: Stack) -> nn.Module:
    for index, layer in enumerate(model.layers):
        model.layers[index] = FSDP(Checkpointed(layer, reentrant))
    return FSDP(model)


def checkpoint_around_two_units(reentrant: bool, model: Stack) -> nn.Module:
    layers = list(model.layers)
    pair = nn.Sequential(FSDP(layers[0]), FSDP(layers[1]))
    model.layers = nn.ModuleList([Checkpointed(pair, reentrant), FSDP(layers[2])])
    return FSDP(model)


def compare_checkpointed(place: Callable[[bool, Stack], nn.Module], reentrant: bool) -> None:
    """Gradients by value, because the checkpoint changes the names. On ranks."""
    x = whole_batch()
    plain = seeded(Stack)
    input_needs_gradient(plain, x)
    model = place(reentrant, seeded(Stack))
    for step in range(2):
        model.zero_grad()
        input_needs_gradient(model, my_part(x))
        found = {
            name.replace("inner.", "").replace("layers.0.0.", "layers.0."): gradient
            for name, gradient in full_gradients(model).items()
        }
        if place is checkpoint_around_two_units:
            found = {
                name.replace("layers.1.", "layers.2.").replace("layers.0.1.", "layers.1."): value
                for name, value in found.items()
            }
        for name, gradient in gradients_of(plain).items():
            torch.testing.assert_close(
                found[name], gradient, rtol=1e-10, atol=1e-12, msg=f"{name} in step {step}"
            )
        assert_sharded(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize(
    "place", [checkpoint_around_units, checkpoint_inside_units, checkpoint_around_two_units]
)
def test_activation_checkpointing_changes_no_gradient(place, reentrant, world_size):
    run_ranks(world_size, compare_checkpointed, place, reentrant)


# ---------------------------------------------------------------- models with a twist


class CalledTwice(Stack):
    """One layer, used two times in one forward."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[0](self.layers[1](self.layers[0](x))) + self.layers[2](x))


class OutOfOrder(Stack):
    """Layers run in another order than they were registered in."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[1](self.layers[2](self.layers[0](x))))


@dataclass
class Pair:
    """What `Structured` returns."""

    first: Tensor
    rest: dict[str, list[Tensor]]


class Branches(nn.Module):
    """A unit with keyword arguments and structured outputs, of which one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, *, x: Tensor, factor: float, flag: str) -> Pair:
        assert flag == "on"
        return Pair(self.a(x) * factor, {"b": [self.b(x)], "unused": [self.c(x)]})


class Structured(Stack):
    zeros = ("layers.1.c.",)  # unused inside a used unit: part of its flat gradient

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Branches()

    def forward(self, x: Tensor) -> Tensor:
        pair = self.layers[1](x=self.layers[0](x), factor=0.5, flag="on")
        return self.head(self.layers[2](pair.first + pair.rest["b"][0]))


class UnusedUnit(Stack):
    """The middle unit runs, and its result is thrown away."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        self.layers[1](x)
        return self.head(self.layers[2](x))


class NeverCalledUnit(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[2](self.layers[0](x)))


class DetachedUnit(Stack):
    """Nothing before the last unit is trained."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x)).detach()
        return self.head(self.layers[2](x))


class NoGradUnit(Stack):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.layers[0](x)
        return self.head(self.layers[2](self.layers[1](x)))


class SharedLinear(Stack):
    """Two layers of one unit share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Linear(WIDTH, 2)
        self.tail.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) - 2 * self.tail(x)


class InPlace(Stack):
    """The output of a unit is changed in place by the next module."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x += 1
        x = self.layers[1](x)
        x.mul_(2)
        return self.head(self.layers[2](x).relu_())


TWISTED = [
    CalledTwice,
    OutOfOrder,
    Structured,
    UnusedUnit,
    NeverCalledUnit,
    DetachedUnit,
    NoGradUnit,
    SharedLinear,
    InPlace,
]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("model", TWISTED)
def test_twisted_models_get_the_gradients_of_plain_pytorch(model, world_size):
    lines = run_ranks(world_size, compare, model, nested, three_backwards_accumulate)
    assert all(rank == lines[0] for rank in lines), "ranks did different things"


# ---------------------------------------------------------------- ranks that differ


class RankChooses(Stack):
    """Each sample group uses another linear layer of one unit."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.layers[0] = Choice()

    def forward(self, x: Tensor, choices: Tensor) -> Tensor:
        return self.head(self.layers[0](x, choices))


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.options = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor, choices: Tensor) -> Tensor:
        used = [
            (choices == index)[:, None] * option(x)
            for index, option in enumerate(self.options)
            if bool((choices == index).any())  # a rank without such samples does not use it
        ]
        return x + torch.stack(used).sum(0)


def ranks_use_different_parameters() -> None:
    x, rank, world_size = whole_batch(), dist.get_rank(), dist.get_world_size()
    choices = torch.arange(12) % world_size % 3  # option 3 is used by nobody
    plain = seeded(RankChooses)
    mean_square(plain(x, choices)).backward()
    model = nested(seeded(RankChooses))
    mine = part(choices, rank, world_size)
    assert len(mine.unique()) == 1
    mean_square(model(part(x, rank, world_size), mine)).backward()
    found = full_gradients(model)
    for name, gradient in gradients_of(plain).items():
        expected = torch.zeros_like(found[name]) if gradient is None else gradient
        torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_may_use_different_parameters_of_a_unit(world_size):
    run_ranks(world_size, ranks_use_different_parameters)


def only_some_ranks_use_an_output() -> None:
    """All ranks run all units; rank 0 leaves the middle one out of its loss."""
    x, rank, world_size = whole_batch(), dist.get_rank(), dist.get_world_size()

    def loss(model: nn.Module, part_of_x: Tensor, use_middle: bool) -> Tensor:
        y = model.layers[0](part_of_x)
        middle = model.layers[1](y)
        return mean_square(model.head(model.layers[2](y + middle if use_middle else y)))

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, part_of_x: Tensor, use_middle: bool) -> Tensor:
            return loss(self.inner, part_of_x, use_middle)

    plain = seeded(Stack)
    parts = [part(x, r, world_size) for r in range(world_size)]
    total = sum(loss(plain, parts[r], r != 0) for r in range(world_size))
    (total / world_size).backward()

    inner = seeded(Stack)
    for index, layer in enumerate(inner.layers):
        inner.layers[index] = FSDP(layer)
    model = FSDP(Outer(inner))
    model(parts[rank], rank != 0).backward()
    found = {name.removeprefix("inner."): g for name, g in full_gradients(model).items()}
    for name, gradient in gradients_of(plain).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12, msg=name)
    assert_sharded(model)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_leaves_a_unit_out_of_its_loss_contributes_zeros(world_size):
    run_ranks(world_size, only_some_ranks_use_an_output)


class WithSideLoss(nn.Module):
    """Leaves an auxiliary loss on itself, as routers of experts do, and one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.router = nn.Linear(5, 5), nn.Linear(5, 3)
        self.more: list[Tensor] = []

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        self.auxiliary = shares.mean(0).square().sum()
        self.more.clear()
        self.more.append(shares.var())
        return x + self.linear(x)


class SideLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([WithSideLoss() for _ in range(3)])
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def side_losses(model: nn.Module, y: Tensor) -> Tensor:
    layers = [part for part in model.modules() if isinstance(part, WithSideLoss)]
    return sum(layer.auxiliary + layer.more[0] for layer in layers) + 0 * y.sum()


def losses_beside() -> None:
    for arguments in ({}, {"use_orig_params": True}, {"sharding_strategy": "SHARD_GRAD_OP"}):
        for policy in (None, ModuleWrapPolicy({WithSideLoss})):
            plain = seeded(SideLosses)
            model = FSDP(seeded(SideLosses), auto_wrap_policy=policy, **arguments)
            for loss in (
                lambda m, y: y.square().mean() + side_losses(m, y),
                lambda m, y: side_losses(m, y.detach()),  # nothing leaves by the front door
            ):
                for one in (plain, model):
                    one.zero_grad()
                    loss(one, one(torch.ones(4, 5, dtype=torch.float64))).backward()
                found = full_gradients(model)
                for name, expected in gradients_of(plain).items():
                    unused = expected is None and found[name] is not None  # a flat unit's zeros
                    expected = torch.zeros_like(found[name]) if unused else expected
                    torch.testing.assert_close(found[name], expected, msg=name)


def test_losses_that_leave_a_unit_as_attributes_train_like_outputs():
    run_ranks(2, losses_beside)


class Renormalising(nn.Module):
    """Its embedding shortens its own rows in the forward, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 5, max_norm=0.5), nn.Linear(5, 2)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def weights_edited_by_the_forward() -> None:
    for arguments in ({}, {"use_orig_params": True}):
        model = FSDP(seeded(Renormalising), **arguments)
        loss = model(torch.arange(9)).square().mean()
        with pytest.raises(errors.WeightsChangedError, match="max_norm"):
            loss.backward()


def test_a_forward_that_edits_its_own_weights_is_refused_instead_of_losing_the_edit():
    run_ranks(2, weights_edited_by_the_forward)
