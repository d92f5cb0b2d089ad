"""`clip_grad_norm_` computes the norm of the whole gradient, and scales it like plain PyTorch."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_ref
from fsdp_ref import FullyShardedDataParallel as FSDP
from tests.models import CASES
from tests.parity.training import full_gradients
from tests.ranks import run_ranks
from tests.toy import (
    WRAPPINGS,
    Stack,
    assert_equal_gradients,
    mean_square,
    my_part,
    nested,
    seeded,
    whole_batch,
)

NORMS = [2.0, 1.0, 3.0, math.inf]


def clip_both(wrapping: str) -> list[tuple[float, float]]:
    """Clip, with each norm, the plain and the sharded gradient; return the two norms."""
    norms = []
    for norm_type in NORMS:
        for max_norm in (0.01, 1e6):
            plain = seeded()
            mean_square(plain(whole_batch())).backward()
            expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
            model = WRAPPINGS[wrapping](seeded())
            mean_square(model(my_part(whole_batch()))).backward()
            found = model.clip_grad_norm_(max_norm, norm_type)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
            assert_equal_gradients(model, plain)
            norms.append((found.item(), expected.item()))
    return norms


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_clipping_equals_plain_pytorch_in_every_norm(wrapping, world_size):
    per_rank = run_ranks(world_size, clip_both, wrapping)
    assert all(norms == per_rank[0] for norms in per_rank), "ranks got different norms"


def a_large_limit_changes_no_bit() -> None:
    model = nested(seeded())
    mean_square(model(my_part(whole_batch()))).backward()
    before = {name: g.clone() for name, g in full_gradients(model).items()}
    model.clip_grad_norm_(1e9)
    for name, gradient in full_gradients(model).items():
        assert torch.equal(gradient, before[name]), name


def test_a_gradient_below_the_limit_is_left_alone_bit_for_bit():
    run_ranks(2, a_large_limit_changes_no_bit)


def nothing_to_clip() -> float:
    return nested(seeded()).clip_grad_norm_(1.0).item()


def test_without_gradients_the_norm_is_zero():
    assert run_ranks(2, nothing_to_clip) == [0.0, 0.0]


def frozen_and_unused_do_not_count() -> None:
    for name in ("frozen", "unused"):
        case = CASES[name]
        batch = case.batches(1, torch.float64)[0]
        plain = case.model(torch.float64)
        case.loss(plain(batch), batch).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        model = FSDP(
            case.model(torch.float64), auto_wrap_policy=fsdp_ref.ModuleWrapPolicy({nn.Linear})
        )
        mine = my_part(batch)
        case.loss(model(mine), mine).backward()
        found = model.clip_grad_norm_(0.1)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_frozen_and_unused_parameters_do_not_count():
    run_ranks(2, frozen_and_unused_do_not_count)


def groups_of_every_size() -> float:
    """A tree with one unit over all ranks, one over pairs and one alone on each rank."""
    model = seeded(Stack)
    model.layers[0] = FSDP(model.layers[0])
    model.layers[1] = FSDP(model.layers[1], process_group="set2")
    model.layers[2] = FSDP(model.layers[2], process_group="self")
    model = FSDP(model)
    mean_square(model(my_part(whole_batch()))).backward()

    squares = torch.zeros(2, dtype=torch.float64)
    for unit in FSDP.fsdp_modules(model):
        for flat_param in unit.parameters(recurse=False):
            squares[0] += flat_param.grad.square().sum()
    dist.all_reduce(squares)  # every element of every shard, on whatever rank it lies

    norm = model.clip_grad_norm_(0.01)
    torch.testing.assert_close(norm**2, squares[0], rtol=1e-10, atol=0)
    again = model.clip_grad_norm_(0.01).item()
    assert abs(again - 0.01) < 1e-5  # the constant that guards against division by zero
    return norm.item()


def test_with_mixed_groups_every_rank_gets_the_same_number():
    norms = run_ranks(4, groups_of_every_size)
    assert len(set(norms)) == 1


def the_clipped_model_trains_on() -> None:
    plain, model = seeded(), nested(seeded())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        mean_square(plain(whole_batch())).backward()
        mean_square(model(my_part(whole_batch()))).backward()
        assert_equal_gradients(model, plain)
        for m in (plain, model):
            for parameter in m.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)  # what clipping does, without its rounding
        for optimizer in optimizers:
            optimizer.step()


def test_gradients_may_be_scaled_by_hand_like_any_others():
    run_ranks(2, the_clipped_model_trains_on)
