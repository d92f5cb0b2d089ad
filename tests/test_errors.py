"""Bad input gets a clear answer: on every rank, with rank, place, expectation, finding, remedy."""

import inspect
import re
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_ref
from fsdp_ref import FullyShardedDataParallel, errors, full_params, optimizer_watch, originals
from fsdp_ref.rank_group import RankGroup
from fsdp_ref.registered import RegisteredNames
from fsdp_ref.unit import Unit
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import (
    Layer,
    Stack,
    assert_equal_gradients,
    assert_equal_weights,
    assert_sharded,
    mean_square,
    my_part,
    nested,
    seeded,
    whole_batch,
)

FSDP = FullyShardedDataParallel


def assert_complete(message: str, code: str, *contents: str) -> None:
    """The message has all five parts, and says these things."""
    parts = re.match(r"\[rank (\d+)\] (\w+) (.+?): expected (.+), found (.+)\. (.+\.)$", message)
    parts = parts or re.match(
        r"\[rank (\d+)\] (\w+) (.+?): expected (.+), found (.+)\. (.+\?)$", message
    )
    assert parts, f"not in the form of all messages: {message}"
    rank = dist.get_rank() if dist.is_initialized() else 0
    assert parts.group(1) == str(rank)
    assert parts.group(2) == code
    for content in contents:
        assert content in message, f"{content!r} is not in {message!r}"


# ---------------------------------------------------------------- the catalogue


def error_classes() -> list[type[Exception]]:
    bases = (errors.FSDPError, errors.FSDPWarning)
    every = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, bases)]
    return [c for c in every if c not in bases]


def test_codes_are_unique_and_well_formed():
    codes = [c.code for c in error_classes()]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"FSDP[1-9]\d\d", code) for code in codes)


@pytest.mark.parametrize("error_class", error_classes(), ids=lambda c: c.__name__)
def test_every_error_can_be_caught_as_a_built_in_one_too(error_class):
    assert issubclass(error_class, (TypeError, ValueError, RuntimeError, UserWarning))
    error = error_class.at("unit 'x'", expected="a", found="b", fix="Do c.")
    assert str(error) == f"[rank 0] {error_class.code} unit 'x': expected a, found b. Do c."


# ---------------------------------------------------------------- what can be wrapped


class WithoutForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


def containers() -> None:
    linear = nn.Linear(2, 2)
    for module in (nn.ModuleList([linear]), nn.ModuleDict({"a": linear}), WithoutForward()):
        with provokes(
            fsdp_ref.FullyShardedDataParallel, errors.ContainerWithoutForwardError
        ) as caught:
            FullyShardedDataParallel(module)
        assert_complete(caught.message, "FSDP101", type(module).__name__, "Wrap the modules inside")
        with provokes(originals.refuse_module, errors.ContainerWithoutForwardError):
            originals.refuse_module(module, "unit 'x'")


def test_a_container_without_forward_is_refused():
    run_ranks(2, containers)


class Holding(nn.Module):
    """A module with one odd parameter, inside another."""

    def __init__(self, odd: torch.Tensor) -> None:
        super().__init__()
        self.part = nn.Linear(2, 2)
        self.part.odd = nn.Parameter(odd, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


def odd_parameters() -> None:
    for odd in (torch.ones(3, dtype=torch.int64), torch.ones(3) > 0, torch.ones(3) * 1j):
        with provokes(
            fsdp_ref.FullyShardedDataParallel, errors.NonFloatingParameterError
        ) as caught:
            FullyShardedDataParallel(Holding(odd))
        assert_complete(caught.message, "FSDP102", "'part.odd'", str(odd.dtype), "Holding")
        with provokes(originals.refuse_parameters, errors.NonFloatingParameterError):
            originals.refuse_parameters(originals.collect_originals(Holding(odd)), "unit 'x'")
    with provokes(fsdp_ref.FullyShardedDataParallel, errors.ScalarParameterError) as caught:
        FullyShardedDataParallel(Holding(torch.tensor(1.0)))
    assert_complete(caught.message, "FSDP103", "'part.odd'", "(1,)", "Holding")
    with provokes(originals.refuse_parameters, errors.ScalarParameterError):
        scalar = Holding(torch.tensor(1.0))
        originals.refuse_parameters(originals.collect_originals(scalar), "unit 'x'")


def test_parameters_that_cannot_be_sharded_flat_are_named():
    run_ranks(2, odd_parameters)


def a_refused_module_is_untouched() -> None:
    module = Holding(torch.tensor(1.0))
    with provokes(fsdp_ref.FullyShardedDataParallel, errors.ScalarParameterError):
        FullyShardedDataParallel(module, auto_wrap_policy=fsdp_ref.ModuleWrapPolicy({nn.Linear}))
    assert type(module.part) is nn.Linear
    assert list(dict(module.named_parameters())) == ["part.weight", "part.bias", "part.odd"]
    assert module(torch.ones(1, 2)).shape == (1, 2)


def test_after_a_refusal_the_module_is_the_plain_one_that_it_was():
    run_ranks(2, a_refused_module_is_untouched)


def wrapping_twice() -> None:
    with provokes(fsdp_ref.FullyShardedDataParallel, errors.AlreadyWrappedError) as caught:
        FullyShardedDataParallel(FSDP(nn.Linear(2, 2)))
    assert_complete(caught.message, "FSDP104", "Linear", "Wrap a module once")
    with provokes(originals.refuse_module, errors.AlreadyWrappedError):
        originals.refuse_module(FSDP(nn.Linear(2, 2)), "unit 'x'")
    partly = nn.Sequential(FSDP(nn.Linear(2, 2)), nn.Linear(2, 2))
    with provokes(fsdp_ref.FullyShardedDataParallel, errors.AlreadyWrappedError) as caught:
        FullyShardedDataParallel(partly, auto_wrap_policy=fsdp_ref.ModuleWrapPolicy({nn.Linear}))
    assert_complete(caught.message, "FSDP104", "'0'")


def test_wrapping_twice_is_refused_by_hand_and_by_policy():
    run_ranks(2, wrapping_twice)


class Tied(Stack):
    """Two layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].linear.weight = self.layers[0].linear.weight


def tied_units() -> None:
    model = seeded(Tied)
    model.layers[0] = FSDP(model.layers[0])
    with provokes(fsdp_ref.FullyShardedDataParallel, errors.TiedParametersError) as caught:
        FullyShardedDataParallel(model.layers[2])
    assert_complete(caught.message, "FSDP105", "linear.weight", "tied to")
    with provokes(fsdp_ref.FullyShardedDataParallel, errors.TiedParametersError) as caught:
        FullyShardedDataParallel(model)  # one half in an inner unit, the other half in the root
    assert_complete(caught.message, "FSDP105", "layers.2.linear.weight")
    with provokes(originals.refuse_parameters, errors.TiedParametersError):
        originals.refuse_parameters(originals.collect_originals(model), "unit 'x'")

    by_policy = seeded(Tied)
    with provokes(fsdp_ref.FullyShardedDataParallel, errors.TiedParametersError) as caught:
        FullyShardedDataParallel(by_policy, auto_wrap_policy=fsdp_ref.ModuleWrapPolicy({Layer}))
    assert_complete(caught.message, "FSDP105", "layers.0.linear.weight", "layers.2.linear.weight")
    # Regrouped, as the message says, it works.
    plain, together = seeded(Tied), FSDP(by_policy)
    mean_square(plain(whole_batch())).backward()
    mean_square(together(my_part(whole_batch()))).backward()
    assert_equal_gradients(together, plain)


def test_a_tie_across_units_is_refused_with_both_names():
    run_ranks(2, tied_units)


def a_policy_that_matches_nothing() -> None:
    with provokes(fsdp_ref.FullyShardedDataParallel, errors.PolicyMatchedNothingWarning) as caught:
        FullyShardedDataParallel(seeded(), auto_wrap_policy=fsdp_ref.ModuleWrapPolicy({nn.Conv2d}))
    assert_complete(caught.message, "FSDP109", "Stack", "Conv2d", "none")
    plain = seeded()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.PolicyMatchedNothingWarning)
        model = FSDP(seeded(), auto_wrap_policy=fsdp_ref.ModuleWrapPolicy({nn.Conv2d}))
    mean_square(plain(whole_batch())).backward()
    mean_square(model(my_part(whole_batch()))).backward()
    assert_equal_gradients(model, plain)


def test_a_policy_that_matches_nothing_warns_and_the_work_goes_on():
    run_ranks(2, a_policy_that_matches_nothing)


# ---------------------------------------------------------------- the optimizer


def optimizer_from_before() -> None:
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, plain = nested(model), seeded()
    mean_square(model(my_part(whole_batch()))).backward()
    with provokes(optimizer_watch._before_step, errors.OptimizerBeforeWrappingError) as caught:
        optimizer.step()
    assert_complete(
        caught.message, "FSDP106", "AdamW.step()", "11 parameters", "'scale'",
        "build the optimizer from model.parameters()",
    )  # fmt: skip
    assert_equal_weights(model, plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    mean_square(plain(whole_batch())).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_equal_weights(model, plain)


def test_an_optimizer_from_before_wrapping_is_refused_at_its_first_step():
    run_ranks(2, optimizer_from_before)


def step_after_no_sync_only() -> None:
    model = nested(seeded())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        mean_square(model(my_part(whole_batch()))).backward()
    with provokes(optimizer_watch._before_step, errors.UnsynchronizedStepError) as caught:
        optimizer.step()
    assert_complete(caught.message, "FSDP306", "SGD.step()", "no_sync()", "unit '")


def test_a_step_with_gradients_that_were_never_reduced_is_refused():
    run_ranks(2, step_after_no_sync_only)


# ---------------------------------------------------------------- a training step


def inner_first() -> None:
    model, x = nested(seeded()), my_part(whole_batch())
    with provokes(
        fsdp_ref.FullyShardedDataParallel.forward, errors.InnerUnitBeforeRootError
    ) as caught:
        model.layers[1](x)
    assert_complete(caught.message, "FSDP302", "unit 'layers.1'", "Call the model itself once")
    plain = seeded()
    mean_square(plain(whole_batch())).backward()
    mean_square(model(x)).backward()
    assert_equal_gradients(model, plain)  # the failed call harmed nothing
    expected = plain.layers[1](whole_batch())
    torch.testing.assert_close(model.layers[1](whole_batch()), expected)  # now it is allowed
    assert_sharded(model)


def test_an_inner_unit_before_the_root_is_refused():
    run_ranks(2, inner_first)


CHANGES = {
    "optimizer step": lambda model, optimizer: optimizer.step(),
    "load": lambda model, optimizer: model.load_state_dict(
        {name: value * 2 for name, value in seeded().state_dict().items()}
    ),
    "in place": lambda model, optimizer: [p.detach().mul_(2) for p in model.parameters()],
    "summon": lambda model, optimizer: double_inside(model),
}


def double_inside(model: FSDP) -> None:
    with model.summon_full_params(), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


def weights_changed(change: str, fused: bool) -> None:
    model, plain = nested(seeded()), seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    mean_square(model(my_part(whole_batch()))).backward()
    loss = mean_square(model(my_part(whole_batch())))
    CHANGES[change](model, optimizer)
    with provokes(Unit.pre_backward, errors.WeightsChangedError) as caught:
        loss.backward()
    assert_complete(caught.message, "FSDP303", "unit '", "optimizer step", "run the forward again")
    del loss
    # The next step is as good as any.
    optimizer.zero_grad()
    plain.load_state_dict(model.state_dict())
    mean_square(plain(whole_batch())).backward()
    mean_square(model(my_part(whole_batch()))).backward()
    assert_equal_gradients(model, plain)
    assert_sharded(model)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_between_forward_and_backward_raise_on_every_rank(change, fused):
    run_ranks(2, weights_changed, change, fused)


def root_only() -> None:
    model = nested(seeded())
    with provokes(
        fsdp_ref.FullyShardedDataParallel.clip_grad_norm_, errors.RootOnlyError
    ) as caught:
        model.layers[2].clip_grad_norm_(1.0)
    assert_complete(caught.message, "FSDP304", "unit 'layers.2'", "clip_grad_norm_()")


def test_clipping_an_inner_unit_is_refused():
    run_ranks(2, root_only)


def weights_that_are_not_there() -> None:
    model, x = nested(seeded()), whole_batch()
    layer = model.layers[0].module
    uses = [
        lambda: layer.linear.weight + 1,
        lambda: layer.linear(x),
        lambda: layer(x),
        lambda: layer.linear.weight.zero_(),
        lambda: nn.init.zeros_(layer.linear.weight),
        lambda: layer.linear.weight.sum().item(),
    ]
    for moment in range(2):
        for use in uses:
            with pytest.raises(errors.NotGatheredError) as caught:
                use()
            assert_complete(str(caught.value), "FSDP305", "linear.weight", "summon_full_params")
        assert layer.linear.weight.shape == (5, 5)
        assert "linear.weight" in repr(layer.linear.weight)
        if moment == 0:
            mean_square(model(my_part(x))).backward()


def test_weights_outside_of_their_units_forward_refuse_to_compute():
    run_ranks(2, weights_that_are_not_there)


# ---------------------------------------------------------------- weights in and out


def summon_pieces() -> None:
    model = nested(seeded())
    units = [unit._unit for unit in FSDP.fsdp_modules(model)]
    with model.summon_full_params():
        with (
            provokes(full_params.full_parameters, errors.SummonContextError) as caught,
            full_params.full_parameters(units, units[0].group, writeback=False),
        ):
            pass
        assert_complete(caught.message, "FSDP402", "unit 'root'", "entered again")
    with (
        provokes(RegisteredNames.take_over_replacements, errors.SummonContextError) as caught,
        model.summon_full_params(),
    ):
        model.layers[1].module.scale = nn.Parameter(torch.ones(9, dtype=torch.float64))
    assert_complete(caught.message, "FSDP402", "scale", "(9,)")
    assert_equal_weights(model, seeded())

    with (
        provokes(full_params.full_parameters, errors.SummonDisagreementError),
        model.summon_full_params(),
        torch.no_grad(),
    ):
        model.head.bias.fill_(dist.get_rank())
    with (
        provokes(full_params.write_back, errors.SummonDisagreementError) as caught,
        model.summon_full_params(),
        torch.no_grad(),
    ):
        model.head.bias.fill_(dist.get_rank())
    assert_complete(caught.message, "FSDP401", "unit 'root'", "as they were")
    assert_equal_weights(model, seeded())


def test_the_parts_of_summon_raise_what_they_promise():
    run_ranks(2, summon_pieces)


def test_a_group_that_was_not_created_says_so():
    with provokes(RankGroup.live, errors.GroupNotCreatedError) as caught:
        _ = RankGroup(ranks=(0, 1), rank=0).live
    assert_complete(caught.message, "FSDP205", "[0, 1]", "outermost unit")


# ---------------------------------------------------------------- groups


def groups_without_this_rank() -> None:
    other = [1, 2] if dist.get_rank() == 0 else [0]
    with pytest.raises(errors.GroupMembershipError) as caught:
        FSDP(nn.Linear(2, 2), process_group=other)
    assert_complete(str(caught.value), "FSDP202", str(other), "Linear")
    members = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        with pytest.raises(errors.GroupMembershipError) as caught:
            FSDP(nn.Linear(2, 2), process_group=members)
        assert_complete(str(caught.value), "FSDP202", "Linear")
    for word in ("sel", "set2", "mod0", "set", "setx"):
        with pytest.raises(errors.GroupWordError) as caught:
            FSDP(nn.Linear(2, 2), process_group=word)
        assert_complete(str(caught.value), "FSDP201")


def test_a_group_that_this_rank_is_not_in_is_refused():
    run_ranks(3, groups_without_this_rank)


# ---------------------------------------------------------------- ranks that disagree


def one_layer_more(rank: int) -> FSDP:
    return nested(Stack(depth=3 + (rank == 1)).double())


def other_shape(rank: int) -> FSDP:
    model = seeded()
    if rank == 1:
        model.head = nn.Linear(5, 3).double()
    return nested(model)


def other_dtype(rank: int) -> FSDP:
    model = seeded()
    return nested(model.float() if rank == 1 else model)


def other_units(rank: int) -> FSDP:
    return FSDP(seeded()) if rank == 1 else nested(seeded())


def frozen_on_one_rank(rank: int) -> FSDP:
    model = seeded()
    model.layers[1].scale.requires_grad_(rank != 1)
    return nested(model)


def other_names(rank: int) -> FSDP:
    model = seeded()
    if rank == 1:
        first, second = model.layers[0], model.layers[1]
        first.gain, second.gain = first.scale, second.scale
        del first.scale, second.scale
    return nested(model)


def other_group(rank: int) -> FSDP:
    model = seeded()
    model.layers[0] = FSDP(model.layers[0], process_group="self" if rank == 1 else None)
    return FSDP(model)


DISAGREEMENTS = {
    "one layer more": (one_layer_more, "layers.3"),
    "another shape": (other_shape, "head.weight"),
    "another dtype": (other_dtype, "torch.float32"),
    "other units": (other_units, "layers.0"),
    "frozen on one rank": (frozen_on_one_rank, "frozen"),
    "other names": (other_names, "gain"),
    "another group": (other_group, ""),
}


def disagree(kind: str) -> float:
    build, word = DISAGREEMENTS[kind]
    model = build(dist.get_rank())
    x = my_part(whole_batch()).to(next(model.parameters()).dtype)
    start = time.monotonic()
    with pytest.raises(errors.RankDisagreementError) as caught:
        model(x)
    assert_complete(str(caught.value), "FSDP203", "rank 1", word)
    return time.monotonic() - start


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", DISAGREEMENTS)
def test_ranks_that_built_different_models_all_hear_who_differs_in_what(kind, world_size):
    assert max(run_ranks(world_size, disagree, kind)) < 15  # an answer, not a time-out


class Reordered(Stack):
    """Runs its layers in the order that it is told."""

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for index in order:
            x = self.layers[index](x)
        return self.head(x)


def other_order(second: tuple[int, ...]) -> str:
    model, x = nested(seeded(Reordered)), my_part(whole_batch())
    mean_square(model(x, (0, 1, 2))).backward()  # agreed once
    before = [p.detach().clone() for p in model.parameters()]
    order = second if dist.get_rank() == 1 else (0, 1, 2)
    try:
        mean_square(model(x, order)).backward()
    except errors.FSDPError as error:
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize(
    "second", [(1, 0, 2), (0, 2), (0, 1, 1, 2)], ids=["swapped", "one fewer", "one twice"]
)
def test_ranks_that_run_units_in_another_order_all_get_an_error(second):
    raised = run_ranks(2, other_order, second, dist_timeout=3)
    assert set(raised) <= {"SilentRanksError", "RankDisagreementError"}


def only_rank_0_saves() -> str:
    model = nested(seeded())
    mean_square(model(my_part(whole_batch()))).backward()
    if dist.get_rank() != 0:
        return "left"
    try:
        model.state_dict()
    except errors.SilentRanksError as error:
        assert_complete(str(error), "FSDP204", "unit '")
        return "error"
    return "nothing"


def test_a_collective_call_on_one_rank_alone_ends_with_an_error_not_a_hang():
    assert run_ranks(2, only_rank_0_saves, dist_timeout=3) == ["error", "left"]


def only_rank_0_starts() -> str:
    model = nested(seeded())
    if dist.get_rank() != 0:
        return "left"
    try:
        model(my_part(whole_batch()))
    except errors.SilentRanksError as error:
        assert_complete(str(error), "FSDP204", "rank 1")
        return "error"
    return "nothing"


def test_a_rank_that_never_starts_is_named():
    assert run_ranks(2, only_rank_0_starts, dist_timeout=3) == ["error", "left"]
