"""`use_orig_params=True`: modules keep their own parameters, and they behave like a plain model's.

The reference is the plain model, on the whole batch, with the same optimizer and the same
handling of parameters and gradients. What a sharded parameter shows is compared with the piece of
the plain one that this rank owns.
"""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_ref
from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors
from fsdp_ref.leaves import shown_by
from tests.models import CASES
from tests.parity.training import full_weights
from tests.ranks import run_ranks
from tests.toy import (
    WRAPPINGS,
    assert_equal_gradients,
    assert_equal_weights,
    assert_near,
    mean_square,
    my_part,
    nested,
    seeded,
    whole_batch,
)

KEEP = {"use_orig_params": True}
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]


def placed(strategy: str) -> dict[str, Any]:
    """Return arguments for a strategy; a hybrid one makes two copies of two ranks."""
    hybrid = {"process_group": ("set2", "mod2")} if "HYBRID" in strategy else {}
    return {"sharding_strategy": strategy, **KEEP, **hybrid}


def by_class(case_name: str, dtype: torch.dtype = torch.float64, **arguments: Any) -> FSDP:
    case = CASES[case_name]
    classes = set(case.unit_classes)
    policy = fsdp_ref.ModuleWrapPolicy(classes) if classes else None
    return FSDP(case.model(dtype), auto_wrap_policy=policy, **KEEP, **arguments)


# ---------------------------------------------------------------- comparing pieces


def cut_like(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """Return this rank's piece of something shaped like the whole parameter."""
    flat_param = shown_by(parameter)
    (slot,) = [slot for slot, leaf in flat_param._leaves if leaf is parameter]
    inner, _, numel = flat_param._layout.overlap(slot, flat_param._group.rank)
    return whole.reshape(-1)[inner : inner + numel]


def pairs(model: FSDP, plain: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
    found, expected = dict(model.named_parameters()), dict(plain.named_parameters())
    assert list(found) == list(expected)
    for name, parameter in found.items():
        yield name, parameter, expected[name]


def assert_like(model: FSDP, plain: nn.Module) -> None:
    """Weights and gradients are this rank's pieces of the plain model's; `None` is `None`."""
    for name, parameter, reference in pairs(model, plain):
        assert parameter.requires_grad == reference.requires_grad, name
        assert_near(parameter.detach(), cut_like(parameter, reference.detach()), name)
        if reference.grad is None:
            assert parameter.grad is None, f"{name}: expected None, found a gradient"
        else:
            assert parameter.grad is not None, f"{name}: expected a gradient, found None"
            assert_near(parameter.grad, cut_like(parameter, reference.grad), f"grad of {name}")


def backward(model: nn.Module, plain: nn.Module, factor: float = 1.0) -> None:
    """Run a backward through both, the sharded one on this rank's part of the batch."""
    mean_square(plain(factor * whole_batch())).backward()
    mean_square(model(factor * my_part(whole_batch()))).backward()


# ---------------------------------------------------------------- what is there


def registered() -> None:
    for wrap in WRAPPINGS.values():
        plain, before = seeded(), seeded()
        model = wrap(before, **KEEP)
        assert_like(model, plain)
        for name, parameter, reference in pairs(model, plain):
            assert type(parameter) is nn.Parameter
            assert parameter.dim() == 1
            numel = torch.tensor(parameter.numel())
            dist.all_reduce(numel)
            assert numel.item() == reference.numel(), name
        for unit in FSDP.fsdp_modules(model):
            owned = unit._unit.flat_params[0]
            numel = sum(leaf.numel() for _, leaf in owned._leaves)
            assert numel <= owned.numel()  # the rest is padding
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(2 * vector, model.parameters())
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.mul_(2)
        assert_equal_weights(model, plain)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_names_and_order_are_the_plain_models_and_values_are_pieces(world_size):
    run_ranks(world_size, registered)


def objects_stay() -> None:
    plain = seeded()
    before = dict(plain.named_parameters())
    model = nested(plain, **KEEP)
    seen = []
    model.head.register_forward_pre_hook(lambda m, _: seen.append(m.weight.shape))
    mean_square(model(my_part(whole_batch()))).backward()
    assert all(p is before[name] for name, p in model.named_parameters())
    assert model.head.weight is before["head.weight"]
    assert seen == [torch.Size([2, 5])]  # whole inside the forward
    assert model.head.weight.dim() == 1


def test_parameters_stay_the_same_objects_and_are_whole_in_the_forward():
    run_ranks(2, objects_stay)


# ---------------------------------------------------------------- training


def sgd(named: Iterator[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9, nesterov=True)


def adamw(named: Iterator[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.01, weight_decay=0.3)


def no_decay_on_biases(named: Iterator[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in named:
        groups[name.endswith("bias")].append(parameter)
    decay, no_decay = groups
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.5}, {"params": no_decay, "weight_decay": 0.0}], lr=0.02
    )


OPTIMIZERS = {"sgd": sgd, "adamw": adamw, "groups": no_decay_on_biases}


def train(wrapping: str, arguments: dict[str, Any], when: str, steps: int = 3) -> None:
    """Train both with every optimizer; an optimizer from before wrapping goes on working."""
    for build in OPTIMIZERS.values():
        plain, inner = seeded(), seeded()
        plain_optimizer = build(plain.named_parameters())
        optimizer = build(inner.named_parameters()) if when == "before" else None
        model = WRAPPINGS[wrapping](inner, **arguments)
        optimizer = optimizer or build(model.named_parameters())
        for step in range(steps):
            plain_optimizer.zero_grad()
            optimizer.zero_grad()
            backward(model, plain, factor=1.0 + step)
            assert_like(model, plain)
            plain_optimizer.step()
            optimizer.step()
            assert_like(model, plain)
            with torch.no_grad():  # evaluated in between: never with weights from before
                found, expected = model(whole_batch()), plain(whole_batch())
            assert_near(found, expected, "evaluation")
        assert_equal_weights(model, plain)
        for parameter, state in optimizer.state.items():
            for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                assert key not in state or state[key].shape == parameter.shape


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_training_equals_the_plain_model(wrapping, when, world_size):
    run_ranks(world_size, train, wrapping, KEEP, when)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_equals_the_plain_model_under_every_strategy(strategy):
    run_ranks(4, train, "nested", placed(strategy), "before")


def train_case(case_name: str, strategy: str) -> None:
    case = CASES[case_name]
    plain, model = case.model(torch.float64), by_class(case_name, sharding_strategy=strategy)
    plain_optimizer, optimizer = adamw(plain.named_parameters()), adamw(model.named_parameters())
    for batch in case.batches(3, torch.float64):
        plain_optimizer.zero_grad()
        optimizer.zero_grad()
        case.loss(plain(batch), batch).backward()
        case.loss(model(my_part(batch)), my_part(batch)).backward()
        for name, found, reference in pairs(model, plain):
            assert (found.grad is None) == (reference.grad is None), name
        plain_optimizer.step()
        optimizer.step()
    weights = full_weights(model)
    for name, parameter in plain.named_parameters():
        tolerance = 1e-5 if parameter.dtype == torch.float32 else 1e-9
        torch.testing.assert_close(
            weights[name], parameter.detach(), rtol=tolerance, atol=tolerance, msg=name
        )


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize(
    "case_name", ["uneven", "transformer", "tied", "unused", "frozen", "dtypes"]
)
def test_hard_models_train_like_the_plain_ones(case_name, strategy, world_size):
    """Unused parameters keep `None` and do not decay; neither do frozen ones."""
    run_ranks(world_size, train_case, case_name, strategy)


def against_torch(mixed: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as Torch
    from torch.distributed.fsdp import MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    arguments: dict[str, Any] = dict(KEEP)
    if mixed:
        arguments["mixed_precision"] = MixedPrecision(torch.bfloat16, torch.float32)
    case, trained = CASES["transformer"], []
    for wrap, policy, extra in (
        (FSDP, fsdp_ref.ModuleWrapPolicy, {}),
        (Torch, ModuleWrapPolicy, {"device_id": torch.device("cpu")}),
    ):
        model = wrap(
            case.model(torch.float32),
            auto_wrap_policy=policy(set(case.unit_classes)),
            **arguments,
            **extra,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        pieces = []
        for batch in case.batches(3, torch.float32):
            optimizer.zero_grad()
            case.loss(model(my_part(batch)), my_part(batch)).backward()
            pieces.append([
                None if p.grad is None else p.grad.clone() for p in model.parameters()
            ])  # fmt: skip
            optimizer.step()
        names = [name.replace("_fsdp_wrapped_module.", "") for name, _ in model.named_parameters()]
        trained.append((names, pieces, [p.detach().clone() for p in model.parameters()]))
    (names, grads, weights), (torch_names, torch_grads, torch_weights) = trained
    assert names == torch_names
    tolerance = 2e-2 if mixed else 1e-5

    def whole(pieces: list[Tensor]) -> Tensor:  # the two cut flat parameters differently
        return sum((p.double().square().sum() for p in pieces if p is not None), torch.zeros(()))

    for mine, theirs in zip([*grads, weights], [*torch_grads, torch_weights], strict=True):
        totals = torch.stack([whole(mine), whole(theirs)])
        dist.all_reduce(totals)
        torch.testing.assert_close(totals[0], totals[1], rtol=tolerance, atol=0)


@pytest.mark.parametrize("mixed", [False, True])
def test_the_numbers_are_those_of_torchs_class(mixed):
    run_ranks(2, against_torch, mixed)


def in_low_precision() -> None:
    """Weights and gradients stay in float32, computing happens in bfloat16, as without KEEP."""
    results = []
    for arguments in ({}, KEEP):
        model = nested(seeded().float(), mixed_precision="bf16", **arguments)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            model(my_part(whole_batch()).float()).float().square().mean().backward()
            assert all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters())
            optimizer.step()
        results.append(full_weights(model))
    flat, originals = results
    for name, weight in flat.items():
        assert torch.equal(originals[name], weight), name


def test_mixed_precision_gives_the_bits_of_flat_parameters():
    run_ranks(2, in_low_precision)


# ---------------------------------------------------------------- gradients, as people handle them


def both(**arguments: Any) -> tuple[FSDP, nn.Module]:
    return nested(seeded(), **KEEP, **arguments), seeded()


def on_both(model: nn.Module, plain: nn.Module, act: Callable[[nn.Module], object]) -> None:
    for one in (model, plain):
        act(one)


def zero(model: nn.Module, plain: nn.Module, set_to_none: bool) -> None:
    on_both(model, plain, lambda one: one.zero_grad(set_to_none=set_to_none))


def zeroed(set_to_none: bool) -> None:
    """Drop gradients between steps, between forward and backward, and twice in a row."""
    model, plain = both()
    backward(model, plain)
    zero(model, plain, set_to_none)
    assert_like(model, plain)
    backward(model, plain, 2.0)
    assert_like(model, plain)
    losses = mean_square(model(my_part(whole_batch()))), mean_square(plain(whole_batch()))
    zero(model, plain, set_to_none)
    for loss in losses:
        loss.backward()
    assert_like(model, plain)
    zero(model, plain, set_to_none)
    zero(model, plain, set_to_none)
    assert_like(model, plain)


def zeroed_after_no_sync(set_to_none: bool, use_orig_params: bool) -> None:
    """What `no_sync` accumulated is dropped as well, also beside a reduced gradient."""
    for reduced_before in (False, True):
        model, plain = nested(seeded(), use_orig_params=use_orig_params), seeded()
        if reduced_before:
            backward(model, plain, 3.0)
        with model.no_sync():
            backward(model, plain, 5.0)
        zero(model, plain, set_to_none)
        if use_orig_params or set_to_none or reduced_before:  # nothing unreduced is left
            torch.optim.SGD(model.parameters(), lr=1.0).step()
            model.clip_grad_norm_(1.0)
        backward(model, plain)
        with model.summon_full_params(with_grads=True, writeback=False):
            for name, parameter, reference in pairs(model, plain):
                assert_near(parameter.grad, reference.grad, name)
        backward(model, plain)
        if use_orig_params:
            assert_like(model, plain)
        else:
            assert_equal_gradients(model, plain)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_gradients_at_any_moment(set_to_none):
    run_ranks(2, zeroed, set_to_none)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_what_no_sync_accumulated(set_to_none, use_orig_params):
    run_ranks(2, zeroed_after_no_sync, set_to_none, use_orig_params)


def accumulated(quiet: tuple[bool, ...], strategy: str) -> None:
    model, plain = nested(seeded(), **placed(strategy)), seeded()
    plain_optimizer, optimizer = adamw(plain.named_parameters()), adamw(model.named_parameters())
    for _ in range(2):
        for factor, inside in zip((1.0, 0.5, 2.0), quiet, strict=True):
            if inside:
                with model.no_sync():
                    backward(model, plain, factor)
            else:
                backward(model, plain, factor)
                assert_like(model, plain)
        plain_optimizer.step()
        optimizer.step()
        plain_optimizer.zero_grad()
        optimizer.zero_grad()
        assert_like(model, plain)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "quiet",
    [(False, False, False), (True, True, False), (False, True, False)],
    ids=["never", "all but the last", "in the middle"],
)
def test_accumulated_gradients_equal_the_plain_models(quiet, strategy):
    run_ranks(4, accumulated, quiet, strategy)


def unreduced() -> None:
    """Inside `no_sync` a gradient reads as NaN; a step or a clip on it is refused."""
    model, plain = both()
    optimizer = sgd(model.named_parameters())
    with model.no_sync():
        backward(model, plain)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.shape == parameter.shape, name
        assert bool(parameter.grad.isnan().all()), name
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(errors.UnsynchronizedStepError, match="no_sync"):
        optimizer.step()
    with pytest.raises(errors.UnsynchronizedStepError, match="no_sync"):
        model.clip_grad_norm_(1.0)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    backward(model, plain)
    assert_like(model, plain)


def test_unreduced_gradients_read_as_nan_and_cannot_be_stepped():
    run_ranks(2, unreduced)


def single_gradients() -> None:
    """Clear one, replace one, scale one in place; then accumulate, clip and step."""
    model, plain = both()
    plain_optimizer, optimizer = adamw(plain.named_parameters()), adamw(model.named_parameters())
    backward(model, plain)

    def handle(one: nn.Module) -> None:
        named = dict(one.named_parameters())
        named["head.bias"].grad = None
        named["layers.1.scale"].grad = None
        named["head.weight"].grad = torch.ones_like(named["head.weight"])
        named["layers.0.linear.weight"].grad.mul_(3.0)
        named["layers.2.linear.bias"].grad = 2 * named["layers.2.linear.bias"].grad

    on_both(model, plain, handle)
    assert_like(model, plain)
    backward(model, plain, 0.5)
    assert_like(model, plain)
    on_both(model, plain, handle)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert_near(model.clip_grad_norm_(0.1), expected, "norm")
    assert_like(model, plain)
    plain_optimizer.step()
    optimizer.step()
    assert_like(model, plain)
    assert_equal_weights(model, plain)
    zero(model, plain, True)
    for one in (model, plain):  # gradients that no backward computed
        for parameter in one.parameters():
            parameter.grad = torch.full_like(parameter, 0.25)
    plain_optimizer.step()
    optimizer.step()
    assert_equal_weights(model, plain)
    backward(model, plain)
    assert_like(model, plain)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_single_gradients_may_be_cleared_replaced_and_scaled(world_size):
    run_ranks(world_size, single_gradients)


def a_broken_backward() -> None:
    """An exception inside a backward leaves the gradients of earlier ones, until zero_grad."""
    model, plain = both()
    backward(model, plain)

    def explode(_: Tensor) -> None:
        raise KeyError("on purpose")

    layer = model.layers[0].linear.weight
    hook = layer.register_hook(explode)
    with pytest.raises(KeyError, match="on purpose"):
        mean_square(model(my_part(whole_batch()))).backward()
    hook.remove()
    for forward_first in (True, False):
        if forward_first:
            model(my_part(whole_batch()))
        zero(model, plain, True)
        backward(model, plain)
        assert_like(model, plain)
        hook = layer.register_hook(explode)
        with pytest.raises(KeyError, match="on purpose"):
            mean_square(model(my_part(whole_batch()))).backward()
        hook.remove()


def test_after_a_broken_backward_zero_grad_starts_afresh():
    run_ranks(2, a_broken_backward)


def tensor_hooks() -> None:
    """`register_hook` gets this rank's whole gradient, and what it returns is used."""
    model, plain = both()
    seen: list[Tensor] = []

    def doubled(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return 2 * gradient

    model.head.weight.register_hook(doubled)
    model.layers[1].scale.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    mean_square(model(my_part(whole_batch()))).backward()
    mean_square(plain(my_part(whole_batch()))).backward()
    (gradient,) = seen
    assert_near(gradient, plain.head.weight.grad, "local gradient")
    mean = plain.head.weight.grad.clone()
    dist.all_reduce(mean)
    found = model.head.weight
    assert_near(found.grad, cut_like(found, 2 * mean / dist.get_world_size()), "doubled")
    assert model.layers[1].scale.grad.abs().sum() <= 5e-3


def test_tensor_hooks_fire_with_the_local_whole_gradient():
    run_ranks(2, tensor_hooks)


# ---------------------------------------------------------------- frozen and unused


def freeze_and_thaw() -> None:
    """Single parameters, a whole unit, and everything, between steps; AdamW decays what trains."""
    model, plain = both()
    plain_optimizer, optimizer = adamw(plain.named_parameters()), adamw(model.named_parameters())

    def set_trainable(names: tuple[str, ...], trainable: bool) -> None:
        for one in (model, plain):
            for name, parameter in one.named_parameters():
                if name.startswith(names):
                    parameter.requires_grad_(trainable)

    for names, trainable in (
        (("head.bias", "layers.1.linear.weight"), False),
        (("layers.0",), False),
        (("layers.1",), True),
        (("head",), False),
        (("head", "layers"), True),
    ):
        set_trainable(names, trainable)
        for _ in range(2):
            plain_optimizer.zero_grad()
            optimizer.zero_grad()
            backward(model, plain)
            assert_like(model, plain)
            plain_optimizer.step()
            optimizer.step()
    assert_equal_weights(model, plain)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_single_parameters_freeze_and_thaw_between_steps(world_size):
    run_ranks(world_size, freeze_and_thaw)


class Adapted(nn.Module):
    """A frozen linear layer with a trainable low-rank update."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    return nn.Sequential(Adapted(5), nn.Tanh(), Adapted(5))


def adapters(nested_units: bool) -> None:
    plain, inner = seeded(adapted), seeded(adapted)
    policy = fsdp_ref.ModuleWrapPolicy({Adapted}) if nested_units else None
    model = FSDP(inner, auto_wrap_policy=policy, **KEEP)
    plain_optimizer, optimizer = adamw(plain.named_parameters()), adamw(model.named_parameters())
    with fsdp_ref.timeline() as recorded:
        for _ in range(3):
            plain_optimizer.zero_grad()
            optimizer.zero_grad()
            backward(model, plain)
            assert_like(model, plain)
            plain_optimizer.step()
            optimizer.step()
    assert_equal_weights(model, plain)
    reduced = sum(e.bytes_on_wire for e in recorded.events if e.operation == "reduce-scatter")
    assert reduced == 3 * 2 * 8 * 10  # per step: half of two pairs of adapters, nothing of the base


@pytest.mark.parametrize("nested_units", [False, True])
def test_adapters_train_beside_a_frozen_base_in_one_unit(nested_units):
    run_ranks(2, adapters, nested_units)


class Experts(nn.Module):
    """Each input goes through the experts that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor, names: tuple[str, ...]) -> Tensor:
        for name in names:
            x = torch.tanh(getattr(self, name)(x))
        return x


def different_experts() -> None:
    """Rank 0 uses the first expert, rank 1 the second, nobody the third."""
    plain, model = seeded(Experts), FSDP(seeded(Experts), **KEEP)
    plain_optimizer, optimizer = adamw(plain.named_parameters()), adamw(model.named_parameters())
    mine = ("first", "second")[dist.get_rank()]
    third = plain.third.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        mean_square(model(my_part(whole_batch()), (mine,))).backward()
        for rank, name in enumerate(("first", "second")):
            (mean_square(plain(whole_batch()[rank::2], (name,))) / 2).backward()
        assert_like(model, plain)
        assert model.module.third.weight.grad is None
        plain_optimizer.step()
        optimizer.step()
    assert_equal_weights(model, plain)
    assert torch.equal(full_weights(model)["third.weight"], third)


def test_a_gradient_is_none_only_where_no_rank_used_the_parameter():
    run_ranks(2, different_experts)


def used_once_then_not() -> None:
    """A gradient from before stays when a later backward does not reach its parameter."""
    plain, model = seeded(Experts), FSDP(seeded(Experts), **KEEP)
    for names in (("first", "second"), ("second",), ("third",)):
        mean_square(model(my_part(whole_batch()), names)).backward()
        mean_square(plain(whole_batch(), names)).backward()
        assert_like(model, plain)
    zero(model, plain, True)
    with model.no_sync():
        mean_square(model(my_part(whole_batch()), ("first",))).backward()
    mean_square(plain(whole_batch(), ("first",))).backward()
    mean_square(model(my_part(whole_batch()), ("second",))).backward()
    mean_square(plain(whole_batch(), ("second",))).backward()
    assert_like(model, plain)


def test_gradients_of_parameters_that_a_later_backward_does_not_use_stay():
    run_ranks(2, used_once_then_not)


# ---------------------------------------------------------------- weights in and out


def edits_of_pieces() -> None:
    """In-place edits, replaced `.data`, and what reads or overwrites weights after them."""
    model, plain = both()
    backward(model, plain)

    def edit(one: nn.Module) -> None:
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(1.5).add_(0.01)

    def replace(one: nn.Module) -> None:
        for parameter in one.parameters():
            parameter.data = parameter.data * 0.5

    for act in (edit, replace, edit):
        on_both(model, plain, act)
        assert_near(model(whole_batch()), plain(whole_batch()), act.__name__)
        assert_equal_weights(model, plain)
    on_both(model, plain, replace)
    for name, value in model.state_dict().items():
        assert_near(value, plain.state_dict()[name], f"state dict: {name}")
    on_both(model, plain, replace)
    assert_equal_weights(model, plain)
    before = copy.deepcopy(plain.state_dict())
    on_both(model, plain, replace)
    model.load_state_dict(before)  # the later of the two wins
    plain.load_state_dict(before)
    assert_equal_weights(model, plain)
    assert_near(model(whole_batch()), plain(whole_batch()), "after loading")
    on_both(model, plain, replace)
    assert_equal_weights(copy.deepcopy(model), plain)
    on_both(model, plain, replace)
    sgd(plain.named_parameters()).step()
    sgd(model.named_parameters()).step()
    assert_equal_weights(model, plain)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_edits_of_pieces_between_steps_count(world_size):
    run_ranks(world_size, edits_of_pieces)


def edits_before_a_backward_that_never_comes(strategy: str) -> None:
    """A forward whose loss is only logged leaves full parameters in memory; edits still count."""
    model, plain = nested(seeded(), **placed(strategy)), seeded()
    model(my_part(whole_batch()))  # the root, at least, waits for a backward

    def edit(one: nn.Module) -> None:
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(0.5)

    on_both(model, plain, edit)
    assert_near(model(whole_batch()), plain(whole_batch()), "after the edit")
    assert_equal_weights(model, plain)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_edits_of_parameters_that_wait_for_a_backward_count(strategy):
    run_ranks(2, edits_before_a_backward_that_never_comes, strategy)


def digits_of_a_waiting_weight() -> None:
    """What a forward computes with in bfloat16 never rounds the weights that it was cut from."""
    for arguments in ({}, {"sharding_strategy": "NO_SHARD"}, {"cpu_offload": True}):
        model = nested(seeded().float(), mixed_precision="bf16", **KEEP, **arguments)
        before = {name: w.clone() for name, w in full_weights(model).items()}
        model(my_part(whole_batch()).float())  # the root waits, in bfloat16
        exported = model.state_dict()
        assert all(torch.equal(exported[name], weight) for name, weight in before.items())
        with torch.no_grad():
            model.head.weight[0] = 0.5  # the others of this weight keep their digits
        expected = before["head.weight"].clone()
        expected[0] = 0.5
        model.reshard()
        found = full_weights(model)
        assert torch.equal(found.pop("head.weight"), expected)
        assert all(torch.equal(weight, before[name]) for name, weight in found.items())


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_edit_in_low_precision_rounds_nothing_else(world_size):
    run_ranks(world_size, digits_of_a_waiting_weight)


def wrong_size() -> None:
    model = nested(seeded(), **KEEP)
    model.head.weight.data = torch.zeros(2, 5, dtype=torch.float64)
    with pytest.raises(errors.NotGatheredError, match=r"'head.weight'.*piece.*\(2, 5\)"):
        model(my_part(whole_batch()))


def test_data_of_another_size_than_the_piece_is_refused():
    run_ranks(4, wrong_size)


def gradients_before_any_backward() -> None:
    model, plain = both()
    for one in (model, plain):
        for parameter in one.parameters():
            parameter.grad = torch.full_like(parameter, 0.25)
    backward(model, plain)
    assert_like(model, plain)


def test_gradients_set_before_the_first_backward_are_added_to():
    run_ranks(2, gradients_before_any_backward)


def in_and_out() -> None:
    model, plain = both()
    backward(model, plain)
    with model.summon_full_params(with_grads=True):
        for name, parameter, reference in pairs(model, plain):
            assert_near(parameter.detach(), reference.detach(), name)
            assert_near(parameter.grad, reference.grad, name)
        for one in (model, plain):
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.mul_(2.0)
                    parameter.grad.mul_(0.5)
    assert_like(model, plain)
    exported = model.state_dict()
    assert list(exported) == list(plain.state_dict())
    fresh = nested(seeded(), **KEEP)
    fresh.load_state_dict(exported)
    assert_equal_weights(fresh, plain)
    plain.load_state_dict(exported)  # whole shapes
    assert_like(model, plain)


def test_summoned_saved_and_loaded_weights_are_whole():
    run_ranks(2, in_and_out)


def converted() -> None:
    """`to(dtype)` keeps the objects: an optimizer goes on with them."""
    model, plain = nested(seeded().float(), **KEEP), seeded().float()
    optimizer, plain_optimizer = sgd(model.named_parameters()), sgd(plain.named_parameters())
    held = list(model.parameters())
    model.double()
    plain.double()
    assert all(a is b for a, b in zip(model.parameters(), held, strict=True))
    for _ in range(2):
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        backward(model, plain)
        assert_like(model, plain)
        optimizer.step()
        plain_optimizer.step()
    assert_equal_weights(model, plain)
    model.to(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(my_part(whole_batch()).bfloat16()).dtype == torch.bfloat16


def test_a_model_can_be_converted_after_wrapping():
    run_ranks(2, converted)


# ---------------------------------------------------------------- together with others


class Checkpointed(nn.Module):
    """Recomputes what it wraps in the backward."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def recomputed(reentrant: bool, outside: bool) -> None:
    plain, inner = seeded(), seeded()
    for index, layer in enumerate(inner.layers):
        inner.layers[index] = (
            Checkpointed(FSDP(layer, **KEEP), reentrant)
            if outside
            else FSDP(Checkpointed(layer, reentrant), **KEEP)
        )
    model = FSDP(inner, **KEEP)
    optimizer, plain_optimizer = adamw(model.named_parameters()), adamw(plain.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        mean_square(plain(whole_batch())).backward()
        mean_square(model(my_part(whole_batch()).requires_grad_())).backward()
        found = dict(model.named_parameters())
        for name, reference in plain.named_parameters():
            parameter = found[name.replace(".linear", ".inner.linear").replace(
                ".scale", ".inner.scale")]  # fmt: skip
            assert_near(parameter.grad, cut_like(parameter, reference.grad), name)
        optimizer.step()
        plain_optimizer.step()


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(reentrant, outside):
    run_ranks(2, recomputed, reentrant, outside)


def scaled() -> None:
    """The sharded scaler sees an infinity in one rank's piece on all ranks, and skips the step."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model, plain = nested(seeded().float(), **KEEP), seeded().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device="cpu", init_scale=1024.0)
    x = whole_batch().float()
    scaler.scale(mean_square(model(my_part(x)))).backward()
    mean_square(plain(x)).backward()
    scaler.unscale_(optimizer)
    norm = model.clip_grad_norm_(0.1)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    scaler.step(optimizer)
    scaler.update()
    plain_optimizer.step()
    weights = full_weights(model)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach())
    optimizer.zero_grad()
    scaler.scale(mean_square(model(my_part(x)))).backward()
    if dist.get_rank() == 0:
        model.head.weight.grad[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    for name, weight in full_weights(model).items():
        assert torch.equal(weight, weights[name]), name


def test_the_sharded_gradient_scaler_unscales_and_skips_together():
    run_ranks(2, scaled)
