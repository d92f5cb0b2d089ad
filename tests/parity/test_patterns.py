"""What people do with models besides training them straight: still the numbers of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors
from tests.parity.training import full_gradients, full_weights
from tests.ranks import run_ranks
from tests.toy import (
    WIDTH,
    Stack,
    assert_equal_gradients,
    assert_equal_weights,
    assert_near,
    assert_sharded,
    mean_square,
    my_part,
    nested,
    seeded,
    whole_batch,
)

# ---------------------------------------------------------------- modules of unusual make


class Recurrent(nn.Module):
    """`nn.LSTM` keeps a list of its weights beside its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x[:, None, :].expand(-1, 3, -1))[0])


class Normed(nn.Module):
    """Weights computed from others in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(WIDTH, 4))
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Transposed(nn.Module):
    """A parameter that is not contiguous, and one with a long stride."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH).t())
        self.shift = nn.Parameter(torch.randn(3, 7)[:, 0])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.shift


class Listed(nn.Module):
    """Parameters in a ParameterList and a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([torch.randn(WIDTH) for _ in range(3)])
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH, 2), "b": torch.randn(2)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.several:
            x = torch.tanh(x * weight)
        return x @ self.named["a"] + self.named["b"]


def train_both(build: Callable[[], nn.Module], units: tuple[type[nn.Module], ...]) -> None:
    plain, inner = seeded(build), seeded(build)
    for name, child in list(inner.named_children()):
        if isinstance(child, units):
            setattr(inner, name, FSDP(child))
    model = FSDP(inner)
    assert list(model.state_dict()) == list(plain.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        mean_square(plain(whole_batch())).backward()
        mean_square(model(my_part(whole_batch()))).backward()
        assert_equal_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()
    weights = full_weights(model)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-9, atol=1e-9)
    assert_sharded(model)


@pytest.mark.parametrize("build", [Recurrent, Normed, Transposed, Listed])
def test_modules_of_unusual_make_train_like_plain_ones(build):
    run_ranks(2, train_both, build, (nn.LSTM, nn.Linear))


# ---------------------------------------------------------------- several models at once


def generator_and_judge() -> None:
    """One loss through two roots, then a step of one of them alone."""
    plain = [seeded(), seeded(lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)))]
    model = [nested(seeded()), None]
    judge = seeded(lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)))
    judge[0] = FSDP(judge[0])
    model[1] = FSDP(judge)
    for _ in range(2):
        for one in (*plain, *model):
            one.zero_grad()
        mean_square(plain[1](plain[0](whole_batch()))).backward()
        mean_square(model[1](model[0](my_part(whole_batch())))).backward()
        for mine, theirs in zip(model, plain, strict=True):
            assert_equal_gradients(mine, theirs)
        for one in model:
            assert_sharded(one)
        mean_square(plain[1](plain[0](whole_batch()).detach())).backward()
        mean_square(model[1](model[0](my_part(whole_batch())).detach())).backward()
        for mine, theirs in zip(model, plain, strict=True):
            assert_equal_gradients(mine, theirs)
        assert_sharded(model[1])  # the generator's root still waits for a backward


def teacher_and_student() -> None:
    """The teacher evaluates between the student's forward and backward."""
    plain, student, teacher = seeded(), nested(seeded()), nested(seeded())
    with torch.no_grad():
        target = seeded()(whole_batch()) * 2
    mean_square(plain(whole_batch()) - target).backward()
    output = student(my_part(whole_batch()))
    with torch.no_grad():
        target = teacher(my_part(whole_batch())) * 2
    mean_square(output - target).backward()
    assert_equal_gradients(student, plain)
    assert all(p.grad is None for p in teacher.parameters())
    assert_sharded(teacher)


@pytest.mark.parametrize("together", [generator_and_judge, teacher_and_student])
def test_two_models_in_one_process_do_not_disturb_each_other(together):
    run_ranks(2, together)


# ---------------------------------------------------------------- freezing, clearing, parts


def freeze_later() -> None:
    """Freezing a whole unit after wrapping, as fine-tuning does."""
    plain, model = seeded(), nested(seeded())
    plain.layers[0].requires_grad_(False)
    model.layers[0].requires_grad_(False)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        mean_square(plain(whole_batch())).backward()
        mean_square(model(my_part(whole_batch()))).backward()
        assert_equal_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()
    assert_equal_weights(model, plain)


def thaw_later() -> None:
    """Built frozen, thawed after wrapping."""
    plain, inner = seeded(), seeded()
    inner.layers[0].requires_grad_(False)
    model = nested(inner)
    mean_square(model(my_part(whole_batch()))).backward()
    model.zero_grad()
    model.layers[0].requires_grad_(True)
    mean_square(plain(whole_batch())).backward()
    mean_square(model(my_part(whole_batch()))).backward()
    assert_equal_gradients(model, plain)


@pytest.mark.parametrize("how", [freeze_later, thaw_later])
def test_freezing_and_thawing_a_unit_later_works_as_on_a_plain_model(how):
    run_ranks(2, how)


def zeros_instead_of_none() -> None:
    plain, model = seeded(), nested(seeded())
    for _ in range(2):
        for one in (plain, model):
            one.zero_grad(set_to_none=False)
        mean_square(plain(whole_batch())).backward()
        mean_square(model(my_part(whole_batch()))).backward()
        assert_equal_gradients(model, plain)
    model.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters())


def test_gradients_may_be_cleared_to_zeros():
    run_ranks(2, zeros_instead_of_none)


def a_part_alone() -> None:
    """After a first forward of the whole, an inner unit may be trained alone."""
    plain, model = seeded(), nested(seeded())
    with torch.no_grad():
        model(my_part(whole_batch()))
    mean_square(plain.layers[1](whole_batch())).backward()
    mean_square(model.layers[1](my_part(whole_batch()))).backward()
    assert_equal_gradients(model, plain)
    assert_sharded(model)


def test_an_inner_unit_can_be_trained_alone():
    run_ranks(2, a_part_alone)


def by_autograd_grad() -> None:
    """Gradients with respect to the input, without touching the weights' gradients."""
    plain, model = seeded(), nested(seeded())
    whole = whole_batch().requires_grad_()
    mine = my_part(whole_batch()).requires_grad_()
    (expected,) = torch.autograd.grad(mean_square(plain(whole)), whole)
    (found,) = torch.autograd.grad(mean_square(model(mine)), mine)
    assert_near(found / 2, my_part(expected), "the input")  # mean over half as many samples
    mean_square(plain(whole_batch())).backward()
    mean_square(model(my_part(whole_batch()))).backward()
    assert_equal_gradients(model, plain)
    assert_sharded(model)


def test_gradients_of_the_input_alone_leave_the_model_clean():
    run_ranks(2, by_autograd_grad)


def gradient_of_a_gradient() -> None:
    """A gradient penalty: right, or an error of ours; never a wrong number."""
    plain, model = seeded(), nested(seeded())

    def penalty(one: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (inner,) = torch.autograd.grad(one(x).sum(), x, create_graph=True)
        return inner.square().sum(1).mean()

    penalty(plain, whole_batch()).backward()
    try:
        penalty(model, my_part(whole_batch())).backward()
    except errors.FSDPError:
        model.zero_grad()
        plain.zero_grad()
        mean_square(plain(whole_batch())).backward()
        mean_square(model(my_part(whole_batch()))).backward()
    assert_equal_gradients(model, plain)


def test_a_gradient_of_a_gradient_is_right_or_refused():
    run_ranks(2, gradient_of_a_gradient)


# ---------------------------------------------------------------- lower precision


def half_precision(dtype: torch.dtype) -> None:
    """A model whose parameters are 16 bits wide equals DDP's bit for bit on two ranks."""

    def build() -> Stack:
        torch.manual_seed(0)
        return Stack().to(dtype)

    x = my_part(whole_batch()).to(dtype)
    reference, model = DistributedDataParallel(build()), nested(build())
    mean_square(reference(x).float()).backward()
    mean_square(model(x).float()).backward()
    found = full_gradients(model)
    for name, parameter in reference.module.named_parameters():
        assert found[name].dtype == dtype
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_16_bits_are_reduced_like_ddp_does(dtype):
    run_ranks(2, half_precision, dtype)


def autocast() -> None:
    torch.manual_seed(0)
    plain = DistributedDataParallel(Stack())
    torch.manual_seed(0)
    model = nested(Stack())
    x = my_part(whole_batch()).float()
    for one in (plain, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mean_square(one(x))
        loss.backward()
    found = full_gradients(model)
    for name, parameter in plain.module.named_parameters():
        assert torch.equal(found[name], parameter.grad), name


def test_autocast_equals_ddp_bit_for_bit():
    run_ranks(2, autocast)
