"""Reductions of the reader's own: communication hooks, and other divisors than the ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors
from tests.parity.training import full_weights
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import assert_near, mean_square, my_part, nested, one_unit, seeded, whole_batch


def whole_gradients(model: FSDP) -> dict[str, Tensor]:
    with model.summon_full_params(with_grads=True, writeback=False):
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain_gradients(factor: float = 1.0) -> dict[str, Tensor]:
    plain = seeded()
    mean_square(plain(whole_batch())).backward()
    return {name: factor * p.grad for name, p in plain.named_parameters()}


def assert_gradients(model: FSDP, expected: dict[str, Tensor]) -> None:
    found = whole_gradients(model)
    assert list(found) == list(expected)
    for name, gradient in expected.items():
        assert_near(found[name], gradient, name)


def default_state() -> Any:
    return default_hooks.DefaultState(dist.group.WORLD)


def low_state(dtype: torch.dtype) -> Any:
    return default_hooks.LowPrecisionState(process_group=dist.group.WORLD, parameter_type=dtype)


# ---------------------------------------------------------------- torch's hooks


def torchs_hooks(more: dict[str, Any]) -> None:
    cut = more.get("sharding_strategy") != "NO_SHARD" and dist.get_world_size() > 1
    hook = default_hooks.reduce_scatter_hook if cut else default_hooks.allreduce_hook
    model = nested(seeded(), **more)
    model.register_comm_hook(default_state(), hook)
    mean_square(model(my_part(whole_batch()))).backward()
    assert_gradients(model, plain_gradients())
    mean_square(model(my_part(whole_batch()))).backward()  # accumulated
    assert_gradients(model, plain_gradients(2.0))
    with model.no_sync():
        mean_square(model(my_part(whole_batch()))).backward()
    mean_square(model(my_part(whole_batch()))).backward()
    assert_gradients(model, plain_gradients(4.0))
    assert_near(
        model.clip_grad_norm_(1e9),
        torch.cat([g.flatten() for g in plain_gradients(4.0).values()]).norm(),
        "norm",
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"sharding_strategy": "NO_SHARD"},
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"use_orig_params": True},
        {"cpu_offload": True},
    ],
    ids=str,
)
def test_torchs_own_hooks_give_the_mean(more, world_size):
    run_ranks(world_size, torchs_hooks, more)


def train(model: nn.Module, hook: Any, state: Any) -> None:
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        mean_square(model((1 + step) * my_part(whole_batch()).float())).backward()
        optimizer.step()


def back_to_parameter_type(state: Any, gradient: Tensor) -> None:
    gradient.data = gradient.data.to(state.parameter_type)


def compressed(name: str, strategy: str) -> None:
    """Compressing hooks train like torch's class with them, and not like none at all."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Torch
    from torch.distributed.fsdp import ShardingStrategy

    hook = getattr(default_hooks, name)
    default_hooks._decompress = back_to_parameter_type  # torch's asks for a stream of a device
    model = one_unit(seeded().float(), sharding_strategy=strategy)
    train(model, hook, low_state(torch.float32))
    theirs = Torch(
        seeded().float(),
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy[strategy],
    )
    train(theirs, hook, low_state(torch.float32))
    with Torch.summon_full_params(theirs, writeback=False):
        expected = {n.removeprefix("_fsdp_wrapped_module."): p.clone()
                    for n, p in theirs.named_parameters()}  # fmt: skip
    found = full_weights(model)
    without = one_unit(seeded().float())
    optimizer = torch.optim.SGD(without.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        mean_square(without((1 + step) * my_part(whole_batch()).float())).backward()
        optimizer.step()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-6)
    plain = full_weights(without)
    assert any(not torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("name", ["bf16_compress_hook", "fp16_compress_hook"])
def test_compressing_hooks_give_the_numbers_of_torchs_class(name, strategy):
    run_ranks(2, compressed, name, strategy)


# ---------------------------------------------------------------- hooks of one's own


def given_to_the_hook() -> None:
    """The gradient comes whole, undivided and padded; the shard is this rank's."""
    seen: list[tuple[Any, torch.Size, torch.Size]] = []

    def by_hand(state: Any, gradient: Tensor, shard: Tensor) -> None:
        seen.append((state, gradient.shape, shard.shape))
        total = gradient.clone()
        dist.all_reduce(total)
        shard.copy_(total.chunk(dist.get_world_size())[dist.get_rank()])

    model = nested(seeded())
    state = {"any": "thing"}
    model.register_comm_hook(state, by_hand)
    mean_square(model(my_part(whole_batch()))).backward()
    assert_gradients(model, plain_gradients(dist.get_world_size()))  # it has to divide by itself
    sizes = {(p._layout.padded_numel, p.numel()) for p in model.parameters()}
    assert {(gradient[0], shard[0]) for _, gradient, shard in seen} == sizes
    assert len(seen) == 4  # once per unit
    assert all(one is state for one, _, _ in seen)
    count = len(seen)
    with model.no_sync():
        mean_square(model(my_part(whole_batch()))).backward()
    assert len(seen) == count  # nothing is reduced there
    copies: list[torch.Size] = []

    def in_place(state: Any, gradient: Tensor) -> None:
        copies.append(gradient.shape)
        dist.all_reduce(gradient)

    model = nested(seeded(), sharding_strategy="NO_SHARD")
    model.register_comm_hook(None, in_place)
    mean_square(model(my_part(whole_batch()))).backward()
    assert_gradients(model, plain_gradients(dist.get_world_size()))
    assert len(copies) == 4


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_hook_gets_whole_gradients_that_nobody_has_divided(world_size):
    run_ranks(world_size, given_to_the_hook)


def in_low_precision() -> None:
    seen = []

    def note(state: Any, gradient: Tensor, shard: Tensor) -> None:
        seen.append(gradient.dtype)
        default_hooks.reduce_scatter_hook(state, gradient, shard)

    model = nested(seeded().float(), mixed_precision=("bf16"))
    model.register_comm_hook(default_state(), note)
    model(my_part(whole_batch()).float()).float().square().mean().backward()
    assert set(seen) == {torch.bfloat16}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_a_hook_works_in_the_dtype_of_the_reduction():
    run_ranks(2, in_low_precision)


def refused() -> None:
    hook = default_hooks.reduce_scatter_hook
    model = nested(seeded())
    with provokes(FSDP.register_comm_hook, errors.RootOnlyError, match="register_comm_hook"):
        model.layers[0].register_comm_hook(None, hook)
    with provokes(FSDP.register_comm_hook, errors.OptionError, match="cannot be called"):
        model.register_comm_hook(None, "reduce_scatter")
    model.register_comm_hook(default_state(), hook)
    with provokes(FSDP.register_comm_hook, errors.OptionError, match="registered before"):
        model.register_comm_hook(default_state(), hook)
    mean_square(model(my_part(whole_batch()))).backward()  # the first one goes on working
    assert_gradients(model, plain_gradients())


def hybrid() -> None:
    model = seeded()
    model.layers[1] = FSDP(model.layers[1], ("set2", "mod2"), "HYBRID_SHARD")
    model = FSDP(model)
    with provokes(FSDP.register_comm_hook, errors.OptionError, match=r"layers\.1.*two steps"):
        model.register_comm_hook(None, default_hooks.reduce_scatter_hook)
    mean_square(model(my_part(whole_batch()))).backward()  # no unit has it
    assert_gradients(model, plain_gradients())


def test_hooks_that_cannot_work_are_refused():
    run_ranks(2, refused)
    run_ranks(4, hybrid)


# ---------------------------------------------------------------- other divisors


def divided(pre: float, post: float, strategy: str) -> None:
    group = {"process_group": ("set2", "mod2")} if "HYBRID" in strategy else {}
    for more in ({}, {"use_orig_params": True}, {"cpu_offload": True}):
        model = nested(seeded(), sharding_strategy=strategy, **group, **more)
        model.set_gradient_divide_factors(pre, post)
        expected = dist.get_world_size() / (pre * post)
        mean_square(model(my_part(whole_batch()))).backward()
        assert_gradients(model, plain_gradients(expected))
        mean_square(model(my_part(whole_batch()))).backward()
        assert_gradients(model, plain_gradients(2 * expected))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize(("pre", "post"), [(1, 1), (4, 1), (1, 4), (2, 2), (3.0, 0.5)], ids=str)
def test_gradients_are_divided_by_both_factors(pre, post, strategy):
    run_ranks(4, divided, pre, post, strategy)


def one_unit_alone() -> None:
    """An expert that sees the tokens of all ranks; the rest is averaged as ever."""
    model = nested(seeded())
    model.layers[1].set_gradient_divide_factors(1, 1)
    mean_square(model(my_part(whole_batch()))).backward()
    expected = plain_gradients()
    for name in expected:
        if name.startswith("layers.1."):
            expected[name] *= dist.get_world_size()
    assert_gradients(model, expected)
    model = nested(seeded())
    model.set_gradient_divide_factors(1, 1, recursive=False)
    mean_square(model(my_part(whole_batch()))).backward()
    expected = plain_gradients()
    for name in expected:
        if name.startswith("head."):
            expected[name] *= dist.get_world_size()
    assert_gradients(model, expected)


def an_expert_of_one_rank() -> None:
    """A unit on its own rank, whose gradient is a sum over what came to it from all ranks."""
    model = seeded()
    model.layers[1] = FSDP(model.layers[1], "self")
    model = FSDP(model)
    model.layers[1].set_gradient_divide_factors(dist.get_world_size(), 1)
    mean_square(model(my_part(whole_batch()))).backward()
    plain = seeded()
    mean_square(plain(my_part(whole_batch()))).backward()
    found = model.layers[1]._unit.flat_params[0]
    own = torch.cat([p.grad.flatten() for p in plain.layers[1].parameters()])
    order = torch.cat([plain.layers[1].get_parameter(s.name).grad.flatten()
                       for s in found._layout.slots])  # fmt: skip
    assert own.numel() == order.numel()
    assert_near(found.grad, order / dist.get_world_size(), "expert")


def test_factors_of_one_unit_leave_the_others_alone():
    run_ranks(2, one_unit_alone)
    run_ranks(2, an_expert_of_one_rank)


def wrong_factors() -> None:
    model = nested(seeded())
    for pre, post in ((0, 1), (1, 0), (-2, 1), (float("nan"), 1)):
        with provokes(FSDP.set_gradient_divide_factors, errors.OptionError, match="above 0"):
            model.set_gradient_divide_factors(pre, post)
    mean_square(model(my_part(whole_batch()))).backward()
    assert_gradients(model, plain_gradients())


def test_factors_that_are_not_above_zero_are_refused():
    run_ranks(2, wrong_factors)


def broken_hook() -> None:
    """What a hook raises comes out as it is, not as a rank that fell silent."""

    def broken(state: Any, gradient: Tensor, shard: Tensor) -> None:
        raise RuntimeError("the hook's own mistake")

    model = nested(seeded())
    model.register_comm_hook(None, broken)
    with pytest.raises(RuntimeError, match="the hook's own mistake") as caught:
        mean_square(model(my_part(whole_batch()))).backward()
    assert not isinstance(caught.value, errors.SilentRanksError)


def test_an_exception_of_a_hook_is_not_explained_away():
    run_ranks(2, broken_hook)
