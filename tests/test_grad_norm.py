"""`clip_grad_norm_` computes the norm of the whole gradient, and scales it like plain PyTorch."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_ref
from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import grad_norm
from fsdp_ref.errors import ClippingError
from tests.models import CASES
from tests.parity.training import full_gradients
from tests.provoked import provokes
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

NORMS = [2.0, 1.0, 3.0, 0.5, 12.0, math.inf]


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


# ---------------------------------------------------------------- strategies, groups, dtypes


def whole_gradients(model: FSDP) -> dict[str, torch.Tensor]:
    """Copy every gradient, also of models that keep their original parameters. Collective."""
    with model.summon_full_params(with_grads=True, writeback=False):
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def every_strategy_at_once() -> FSDP:
    model = seeded()
    model.layers[0] = FSDP(model.layers[0], sharding_strategy="NO_SHARD")
    model.layers[1] = FSDP(model.layers[1], ("set2", "mod2"), "HYBRID_SHARD")
    model.layers[2] = FSDP(model.layers[2], sharding_strategy="SHARD_GRAD_OP")
    return FSDP(model, sharding_strategy="FULL_SHARD")


def hybrid_root() -> FSDP:
    model = seeded()
    model.layers[0] = FSDP(model.layers[0])
    return FSDP(model, ("set2", "mod2"), "HYBRID_SHARD")


def one_unit_in_bfloat16() -> FSDP:
    model = seeded().float()
    for index, dtype in ((1, torch.bfloat16), (2, torch.float32)):
        precision = {"param_dtype": dtype, "cast_forward_inputs": True}
        model.layers[index] = FSDP(model.layers[index], mixed_precision=precision)
    return FSDP(model)


MIXTURES = {
    "strategies": every_strategy_at_once,
    "hybrid root": hybrid_root,
    "one unit in bfloat16": one_unit_in_bfloat16,
    "everything in bfloat16": lambda: nested(seeded().bfloat16()),
    "offloaded": lambda: nested(seeded(), cpu_offload=True),
    "original parameters": lambda: nested(seeded(), use_orig_params=True),
}


def clip_mixture(mixture: str) -> list[float]:
    """Clip what a mixture computed like torch does, given the same gradients unsharded."""
    norms = []
    for norm_type in NORMS:
        model = MIXTURES[mixture]()
        dtype = next(iter(model.parameters())).dtype
        mean_square(model(my_part(whole_batch()).to(dtype))).backward()
        # Torch adds up and rounds in the gradient's dtype; the truth is what it does in float64.
        exact = {name: gradient.double() for name, gradient in whole_gradients(model).items()}
        expected = nn.utils.get_total_norm(exact.values(), norm_type)
        limit = expected.item() / 3
        found = model.clip_grad_norm_(limit, norm_type)
        precision = 1e-12 if dtype == torch.float64 else 1e-6
        torch.testing.assert_close(found.double(), expected, rtol=precision, atol=0)
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        clipped = whole_gradients(model)
        for name, gradient in exact.items():
            wanted = (gradient * (limit / (expected + 1e-6))).to(dtype)
            rounding = {"rtol": 0.01, "atol": 0} if dtype == torch.bfloat16 else {}
            torch.testing.assert_close(clipped[name], wanted, msg=name, **rounding)
        norms.append(found.item())
    return norms


@pytest.mark.parametrize("mixture", MIXTURES)
def test_any_mixture_of_strategies_precisions_and_offload_has_the_true_norm(mixture):
    per_rank = run_ranks(4, clip_mixture, mixture)
    assert all(norms == per_rank[0] for norms in per_rank), "ranks got different norms"


def sums_that_a_low_dtype_cannot_hold() -> list[float]:
    model = FSDP(nn.Linear(512, 64, bias=False).bfloat16())
    (flat_param,) = model.parameters()
    flat_param.grad = torch.ones_like(flat_param)
    found = [model.clip_grad_norm_(math.inf, norm_type).item() for norm_type in (1.0, 2.0)]
    tiny = FSDP(nn.Linear(8, 8, bias=False))
    (flat_param,) = tiny.parameters()
    flat_param.grad = torch.full_like(flat_param, 1e-5)
    return [*found, tiny.clip_grad_norm_(math.inf, 20.0).item()]


def test_small_and_many_elements_add_up_exactly():
    """In bfloat16 a sum of ones stops growing at 256; in float32 1e-5 to the 20th is zero."""
    many = 512 * 64
    for ones, twos, twentieth in run_ranks(2, sums_that_a_low_dtype_cannot_hold):
        assert (ones, twos) == (float(many), pytest.approx(many**0.5, rel=1e-7))
        assert twentieth == pytest.approx(1e-5 * 64**0.05, rel=1e-6)


def factors_are_not_rounded_to_the_gradients_dtype() -> None:
    model = FSDP(nn.Linear(64, 1, bias=False).bfloat16())
    (flat_param,) = model.parameters()
    flat_param.grad = torch.linspace(-1, 1, flat_param.numel()).bfloat16()
    before = flat_param.grad.clone()
    norm = model.clip_grad_norm_(0.3337)
    assert torch.equal(flat_param.grad, (before.float() * (0.3337 / (norm + 1e-6))).bfloat16())


def test_a_gradient_in_bfloat16_is_scaled_in_float32():
    run_ranks(2, factors_are_not_rounded_to_the_gradients_dtype)


# ---------------------------------------------------------------- parameters without a unit


def parameters_that_no_unit_holds(norm_type: float) -> tuple[float, float]:
    """One has the same gradient on all ranks, the other one of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = nested(seeded())
    mean_square(model(my_part(whole_batch()))).backward()
    shared, own, without = (nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(3))
    shared.grad = torch.tensor([0.3, -0.4, 0.0], dtype=torch.float64)
    own.grad = torch.full((3,), 0.1 * (rank + 1), dtype=torch.float64)
    others = [shared, own, without]

    of_units = [g for g in full_gradients(model).values() if g is not None]
    of_ranks = [torch.full((3,), 0.1 * (r + 1), dtype=torch.float64) for r in range(size)]
    if norm_type == math.inf:
        expected = nn.utils.get_total_norm([*of_units, shared.grad, *of_ranks], norm_type)
    else:
        powers = sum(g.abs().pow(norm_type).sum() for g in [*of_units, shared.grad])
        powers += sum(g.abs().pow(norm_type).sum() for g in of_ranks) / size
        expected = powers ** (1 / norm_type)

    flat_params = [p for unit in FSDP.fsdp_modules(model) for p in unit._unit.flat_params]
    groups = model._unit.placement.groups
    norm = grad_norm.total_norm(flat_params, norm_type, groups, others)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    before = own.grad.clone()
    grad_norm.scale_gradients(flat_params, norm, norm.item() / 2, others)
    torch.testing.assert_close(own.grad, before / 2, rtol=1e-5, atol=0)
    again = grad_norm.total_norm(flat_params, norm_type, groups, others)
    torch.testing.assert_close(again, norm / 2, rtol=1e-5, atol=0)
    assert without.grad is None
    return norm.item(), again.item()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_parameters_that_no_unit_holds_count_once_and_all_ranks_agree(norm_type):
    per_rank = run_ranks(3, parameters_that_no_unit_holds, norm_type)
    assert len(set(per_rank)) == 1, per_rank


def complex_parameters_and_no_units_at_all() -> list[float]:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    parameter.grad = torch.tensor([3 + 4j, 0], dtype=torch.complex64)
    groups = FSDP(nn.Linear(2, 2))._unit.placement.groups
    return [grad_norm.total_norm([], p, groups, [parameter]).item() for p in (1.0, 2.0)]


def test_complex_parameters_count_by_their_absolute_value():
    assert run_ranks(1, complex_parameters_and_no_units_at_all) == [[5.0, 5.0]]


# ---------------------------------------------------------------- refusals and odd numbers


def refusals() -> None:
    model = nested(seeded())
    mean_square(model(my_part(whole_batch()))).backward()
    before = full_gradients(model)
    flat_params = list(model.parameters())
    groups = model._unit.placement.groups
    for norm_type in (0.0, -1.0, math.nan, -math.inf):
        with provokes(grad_norm.total_norm, ClippingError, match="above 0") as caught:
            grad_norm.total_norm(flat_params, norm_type, groups)
        assert f"norm_type={norm_type}" in caught.message
        with provokes(FSDP.clip_grad_norm_, ClippingError, match="norm_type"):
            model.clip_grad_norm_(1.0, norm_type)
    for max_norm in (-1.0, math.nan):
        with provokes(grad_norm.scale_gradients, ClippingError, match="at least 0") as caught:
            grad_norm.scale_gradients(flat_params, torch.ones(()), max_norm)
        assert f"max_norm={max_norm}" in caught.message
        with provokes(FSDP.clip_grad_norm_, ClippingError, match="max_norm"):
            model.clip_grad_norm_(max_norm)
    for name, gradient in full_gradients(model).items():
        assert torch.equal(gradient, before[name]), f"{name} changed by a refused call"
    model.clip_grad_norm_(0.0)
    assert all((gradient == 0).all() for gradient in full_gradients(model).values())


def test_norms_that_are_none_and_limits_that_are_none_are_refused():
    run_ranks(2, refusals)


def one_element_is_not_a_number() -> list[bool]:
    model = nested(seeded())
    mean_square(model(my_part(whole_batch()))).backward()
    if dist.get_rank() == 1:
        next(iter(model.parameters())).grad[0] = math.nan
    norms = [model.clip_grad_norm_(math.inf, p) for p in (2.0, math.inf)]
    return [bool(norm.isnan()) for norm in norms]


def test_a_gradient_that_is_nan_on_one_rank_is_a_nan_norm_on_all():
    assert run_ranks(2, one_element_is_not_a_number) == [[True, True], [True, True]]


def an_inner_unit_spread_wider_than_the_root() -> tuple[float, float]:
    model = seeded()
    model.layers[0] = FSDP(model.layers[0])
    model = FSDP(model, process_group="self")
    mean_square(model(my_part(whole_batch()))).backward()
    squares = torch.zeros((), dtype=torch.float64)
    for flat_param in model.parameters():
        squares += flat_param.grad.square().sum()
    dist.all_reduce(squares)
    return model.clip_grad_norm_(math.inf).item(), squares.sqrt().item()


def test_an_inner_unit_may_be_spread_wider_than_the_root():
    (first, expected), (second, _) = run_ranks(2, an_inner_unit_spread_wider_than_the_root)
    assert first == second == pytest.approx(expected, rel=1e-12)


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
