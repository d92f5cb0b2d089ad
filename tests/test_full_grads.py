"""`summon_full_params(with_grads=True)` shows and keeps whole gradients, as on a plain model."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import full_grads, full_params, timeline, votes
from fsdp_ref.errors import (
    SummonContextError,
    SummonDisagreementError,
    UnsynchronizedStepError,
)
from tests.models import CASES
from tests.parity.training import my_part as my_part_of_case
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import mean_square, my_part, nested, seeded, whole_batch

KINDS = {
    "full": {},
    "kept whole": {"sharding_strategy": "SHARD_GRAD_OP"},
    "copied": {"sharding_strategy": "NO_SHARD"},
    "original parameters": {"use_orig_params": True},
    "offloaded": {"cpu_offload": True},
    "hybrid": {"process_group": ("self", None), "sharding_strategy": "HYBRID_SHARD"},
}


def trained(**arguments) -> tuple[FSDP, nn.Module]:
    """A sharded and a plain model after one backward."""
    model, plain = nested(seeded(), **arguments), seeded()
    mean_square(plain(whole_batch())).backward()
    mean_square(model(my_part(whole_batch()))).backward()
    return model, plain


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    """Both show parameters; every gradient is the same, also by being absent."""
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None and theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12, msg=name)


def assert_same_after_a_step(model: FSDP, plain: nn.Module) -> None:
    for one in (model, plain):
        torch.optim.SGD(one.parameters(), lr=0.1).step()
        one.zero_grad()
    mean_square(plain(whole_batch())).backward()
    mean_square(model(my_part(whole_batch()))).backward()
    with model.summon_full_params(with_grads=True, writeback=False):
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
        assert_same_gradients(model, plain)


def looking(kind: str) -> None:
    model, plain = trained(**KINDS[kind])
    with timeline() as recorded:
        for arguments in ({}, {"writeback": False}, {"offload_to_cpu": True}):
            with model.summon_full_params(with_grads=True, **arguments):
                assert_same_gradients(model, plain)
    gathers = recorded.lines("all-gather").count("all-gather layers.1")
    assert gathers == (10 if kind in ("copied", "hybrid") else 6)  # copies are compared by some
    with model.summon_full_params():
        assert all(p.grad is None for p in model.parameters())
    with model.summon_full_params(with_grads=True, rank0_only=True, writeback=False):
        if dist.get_rank() == 0:
            assert_same_gradients(model, plain)
    assert_same_after_a_step(model, plain)


@pytest.mark.parametrize("kind", [*KINDS])
def test_every_gradient_is_the_plain_models_and_looking_changes_nothing(kind):
    run_ranks(2, looking, kind)


def change(model: nn.Module, how: str) -> None:
    parameters = list(model.parameters())
    if how == "scaled":
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
    elif how == "by torch's clipping":
        nn.utils.clip_grad_norm_(parameters, 0.01)
    elif how == "replaced":
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, index / 10)
    elif how == "cleared":
        for parameter in parameters:
            parameter.grad = None
    elif how == "with weights":
        with torch.no_grad():
            for parameter in parameters:
                parameter.grad.add_(parameter)
                parameter.mul_(2)


HOWS = ("scaled", "by torch's clipping", "replaced", "cleared", "with weights")


def edited(kind: str) -> None:
    for rank0_only in (False, True):
        for how in HOWS:
            model, plain = trained(**KINDS[kind])
            change(plain, how)
            with model.summon_full_params(with_grads=True, rank0_only=rank0_only):
                if dist.get_rank() == 0 or not rank0_only:
                    change(model, how)
            with model.summon_full_params(with_grads=True, writeback=False):
                assert_same_gradients(model, plain)
                change(model, how)  # forgotten
            assert_same_after_a_step(model, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_edits_of_gradients_are_kept_as_in_a_plain_model(kind):
    run_ranks(2, edited, kind)


def new_ones() -> None:
    for arguments in ({}, {"use_orig_params": True}):
        model, plain = nested(seeded(), **arguments), seeded()
        change(plain, "replaced")
        with model.summon_full_params(with_grads=True):
            assert all(p.grad is None for p in model.parameters())
            change(model, "replaced")
        assert_same_after_a_step(model, plain)


def test_gradients_may_be_set_where_there_were_none():
    run_ranks(2, new_ones)


def one_of_several(use_orig_params: bool) -> None:
    model, plain = trained(use_orig_params=use_orig_params)
    for one in (model, plain):
        if one is model:
            with model.summon_full_params(with_grads=True):
                model.layers[0].module.scale.grad = None
        else:
            plain.layers[0].scale.grad = None
    if not use_orig_params:  # part of a flat gradient: zero is all that it can be
        plain.layers[0].scale.grad = torch.zeros_like(plain.layers[0].scale)
    with model.summon_full_params(with_grads=True, writeback=False):
        assert_same_gradients(model, plain)
    assert_same_after_a_step(model, plain)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_one_cleared_gradient_is_none_or_within_a_flat_one_zero(use_orig_params):
    run_ranks(2, one_of_several, use_orig_params)


def unused_and_frozen() -> None:
    for name in ("unused", "frozen"):
        case = CASES[name]
        batch = case.batches(1, torch.float64)[0]
        plain, model = case.model(torch.float64), case.model(torch.float64)
        for index, child in list(model.named_children()):
            setattr(model, index, FSDP(child))
        model = FSDP(model)
        case.loss(plain(batch), batch).backward()
        mine = my_part_of_case(batch)
        case.loss(model(mine), mine).backward()
        with model.summon_full_params(with_grads=True):
            assert_same_gradients(model, plain)


def test_unused_and_frozen_parameters_have_none():
    run_ranks(2, unused_and_frozen)


def low_precision() -> None:
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    model = nested(seeded().float(), mixed_precision=precision)
    mean_square(model(my_part(whole_batch()))).backward()
    shards = [p.grad.clone() for p in model.parameters()]
    with model.summon_full_params(with_grads=True):
        assert all(p.grad.dtype == p.dtype == torch.float32 for p in model.parameters())
        largest = max(p.grad.abs().max() for p in model.parameters())
    assert largest == max(
        value for value in every_rank(torch.stack([s.abs().max() for s in shards]))
    )
    for flat_param, before in zip(model.parameters(), shards, strict=True):
        assert torch.equal(flat_param.grad, before)


def kept_in_a_lower_dtype() -> None:
    model = FSDP(nn.Linear(4, 3, bias=False))
    (flat_param,) = model.parameters()
    flat_param.grad = torch.linspace(-1, 1, flat_param.numel()).bfloat16()
    before = flat_param.grad.clone()
    with model.summon_full_params(with_grads=True):
        assert model.weight.grad.dtype == torch.float32
        model.weight.grad.mul_(0.5)
    assert flat_param.grad.dtype == torch.bfloat16
    assert torch.equal(flat_param.grad, before * 0.5)


def test_gradients_that_are_kept_in_a_lower_dtype_are_shown_in_the_parameters_and_kept_in_theirs():
    run_ranks(2, kept_in_a_lower_dtype)


def every_rank(values: torch.Tensor) -> list[float]:
    found = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(found, values)
    return torch.cat(found).tolist()


def test_gradients_come_in_the_parameters_own_dtype():
    run_ranks(2, low_precision)


# ---------------------------------------------------------------- refusals


def look(model: FSDP) -> None:
    with model.summon_full_params(with_grads=True):
        pass


def not_reduced_yet() -> None:
    model = nested(seeded())
    with model.no_sync():
        mean_square(model(my_part(whole_batch()))).backward()
    with provokes(FSDP.summon_full_params, UnsynchronizedStepError, match="with_grads=True"):
        look(model)
    with provokes(full_params.full_parameters, UnsynchronizedStepError):
        look(model)
    with provokes(full_grads.show_full_gradients, UnsynchronizedStepError):
        look(model)
    mean_square(model(my_part(whole_batch()))).backward()
    with model.summon_full_params(with_grads=True):
        pass


def test_gradients_that_are_not_reduced_yet_are_refused():
    run_ranks(2, not_reduced_yet)


def some_ranks_only() -> None:
    model, plain = trained()
    if dist.get_rank() == 1:
        model.layers[1].zero_grad()
    found = "unit 'layers.1' has a gradient"
    with provokes(FSDP.summon_full_params, SummonDisagreementError, match=found):
        look(model)
    with provokes(full_grads.show_full_gradients, SummonDisagreementError, match=found):
        look(model)
    with provokes(votes.Ballot.count, SummonDisagreementError, match=found):
        look(model)
    model.zero_grad()
    with model.summon_full_params(with_grads=True):
        assert all(p.grad is None for p in model.parameters())
    assert plain is not None


def test_gradients_on_some_ranks_only_are_an_error_on_all():
    run_ranks(2, some_ranks_only)


def ranks_differ(what: str) -> None:
    model, plain = trained()
    expected = {
        "scaled": "the gradient of unit 'layers.2'",
        "cleared": "whether there is a gradient of 'layers.2.scale'",
    }[what]
    with (
        provokes(FSDP.summon_full_params, SummonDisagreementError, match=expected),
        model.summon_full_params(with_grads=True),
        torch.no_grad(),
    ):
        for parameter in model.parameters():
            parameter.mul_(2)  # all agree about the weights
        scale = model.layers[2].module.scale
        if dist.get_rank() == 1:
            scale.grad = None if what == "cleared" else scale.grad * 2
    assert_same_after_a_step(model, plain)  # nothing was kept


@pytest.mark.parametrize("what", ["scaled", "cleared"])
def test_if_ranks_differ_neither_gradients_nor_weights_are_kept(what):
    run_ranks(2, ranks_differ, what)


def set_a_gradient(model: FSDP) -> None:
    with model.summon_full_params():
        model.layers[2].module.scale.grad = torch.ones_like(model.layers[2].module.scale)


def gradients_nobody_asked_for() -> None:
    model, plain = trained()
    found = "'scale'.*with_grads=True"
    with provokes(FSDP.summon_full_params, SummonContextError, match=found):
        set_a_gradient(model)
    with provokes(full_grads.refuse_lost_gradients, SummonContextError, match=found):
        set_a_gradient(model)
    with model.summon_full_params(writeback=False):
        model.layers[2].module.scale.grad = torch.ones_like(model.layers[2].module.scale)
    assert_same_after_a_step(model, plain)


def test_gradients_set_without_asking_for_them_are_refused_and_never_added_to_later_ones():
    run_ranks(2, gradients_nobody_asked_for)
