"""`summon_full_params` gives the plain model back for a while, and keeps edits as a whole."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref.errors import SummonContextError, SummonDisagreementError, WeightsChangedError
from tests.models import CASES
from tests.parity.training import WRAPPINGS as CASE_WRAPPINGS
from tests.parity.training import full_weights
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import (
    WRAPPINGS,
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


def the_plain_model_reappears(wrapping: str) -> None:
    for case in CASES.values():
        if wrapping != "one unit" and not case.unit_classes:
            continue
        plain = case.model(torch.float64)
        model = CASE_WRAPPINGS[wrapping](case.model(torch.float64), case)
        with model.summon_full_params():
            found = list(model.named_parameters())
            expected = list(plain.named_parameters())
            assert [name for name, _ in found] == [name for name, _ in expected]
            for (name, mine), (_, theirs) in zip(found, expected, strict=True):
                assert mine.shape == theirs.shape, name
                assert mine.requires_grad == theirs.requires_grad, name
                assert torch.equal(mine, theirs), name
            for name, module in plain.named_modules():  # and each module registers its own
                mine = dict(plain_modules(model))[name]
                assert list(mine._parameters) == list(module._parameters)
        assert all(p.dim() == 1 for p in model.parameters())  # shards again
        assert_sharded(model)


def plain_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return modules under the names that they had before wrapping."""
    named = [(f"{name}.", m) for name, m in model.named_modules() if not isinstance(m, FSDP)]
    return [(name.replace("_fsdp_wrapped_module.", "").rstrip("."), m) for name, m in named]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("wrapping", ["one unit", "by class"])
def test_names_shapes_order_and_values_are_those_of_the_plain_model(wrapping, world_size):
    run_ranks(world_size, the_plain_model_reappears, wrapping)


def edit(model: nn.Module) -> None:
    """An edit of every parameter, the same on every rank."""
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.add_(index + 1).mul_(0.25)


def edits_with_and_without_writeback(wrapping: str) -> None:
    plain, model = seeded(), WRAPPINGS[wrapping](seeded())
    with model.summon_full_params(writeback=False):
        edit(model)
    assert_equal_weights(model, plain)
    with model.summon_full_params():
        edit(model)
    edit(plain)
    assert_equal_weights(model, plain)
    mean_square(plain(whole_batch())).backward()
    mean_square(model(my_part(whole_batch()))).backward()
    assert_equal_gradients(model, plain)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_edits_are_kept_with_writeback_and_lost_without(wrapping, world_size):
    run_ranks(world_size, edits_with_and_without_writeback, wrapping)


def initialise(model: nn.Module) -> None:
    torch.manual_seed(7)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            nn.init.uniform_(module.bias)


def initialise_inside() -> None:
    plain, model, applied = seeded(), nested(seeded()), nested(seeded())
    initialise(plain)
    with model.summon_full_params():
        initialise(model)
    torch.manual_seed(7)
    applied.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)
    assert_equal_weights(model, plain)
    again = seeded()
    torch.manual_seed(7)
    again.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)
    assert_equal_weights(applied, again)


def test_initialising_inside_equals_initialising_the_plain_model():
    run_ranks(3, initialise_inside)


def ranks_disagree(where: str) -> None:
    model, plain = nested(seeded()), seeded()
    with (
        provokes(
            FSDP.summon_full_params,
            SummonDisagreementError,
            match=rf"^\[rank {dist.get_rank()}\] FSDP401 summon_full_params: .*'{where}'",
        ) as caught,
        model.summon_full_params(),
    ):
        edit(model)
        with torch.no_grad():
            target = model.head.bias if where == "root" else model.layers[1].scale
            target[-1] = dist.get_rank()
    assert "expected the same values written on every rank" in caught.message
    assert "Make the same edit on every rank" in caught.message
    assert_equal_weights(model, plain)  # nothing was kept, not even what all agreed on
    assert_sharded(model)


@pytest.mark.parametrize("where", ["root", "layers.1"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_disagreement_raises_on_every_rank_and_keeps_nothing(where, world_size):
    run_ranks(world_size, ranks_disagree, where)


def only_rank_0_writes() -> None:
    model, plain = nested(seeded()), seeded()
    with (
        provokes(FSDP.summon_full_params, SummonDisagreementError, match="unit 'layers.0'"),
        model.summon_full_params(),
        torch.no_grad(),
    ):
        if dist.get_rank() == 0:
            model.layers[0].linear.weight.fill_(3)
    assert_equal_weights(model, plain)


def test_an_edit_on_one_rank_alone_is_reported():
    run_ranks(2, only_rank_0_writes)


def a_pair_disagrees_inside_a_larger_world() -> None:
    """Ranks 0 and 1 disagree about their own unit; ranks 2 and 3 about nothing."""
    model = seeded()
    model.layers[0] = FSDP(model.layers[0], process_group="set2")
    model = FSDP(model)
    before = full_weights(model)
    error = None
    try:
        with model.summon_full_params(), torch.no_grad():
            model.head.bias.fill_(5)  # all ranks agree about the root's
            if dist.get_rank() == 0:
                model.layers[0].scale.fill_(5)
    except SummonDisagreementError as caught:
        error = caught
    for name, value in full_weights(model).items():
        assert torch.equal(value, before[name]), f"{name} was written, or half of it"
    assert error is not None


def test_disagreement_in_a_small_group_keeps_nothing_anywhere():
    run_ranks(4, a_pair_disagrees_inside_a_larger_world)


def nesting_and_forwards_are_refused() -> None:
    model, x = nested(seeded()), my_part(whole_batch())
    with model.summon_full_params():
        with (
            provokes(FSDP.summon_full_params, SummonContextError, match="entered again"),
            model.summon_full_params(),
        ):
            pass
        with provokes(FSDP.forward, SummonContextError, match="a forward inside it"):
            model(x)
        with provokes(FSDP.forward, SummonContextError, match="unit 'layers.0'"):
            model.layers[0](x)
    assert_sharded(model)
    model.head.register_forward_pre_hook(lambda *_: summon(model))
    with provokes(FSDP.summon_full_params, SummonContextError, match="a forward under way"):
        model(x)


def summon(model: FSDP) -> None:
    with model.summon_full_params():
        pass


def test_nesting_and_forwards_inside_are_refused():
    run_ranks(2, nesting_and_forwards_are_refused)


def between_forward_and_backward() -> None:
    plain, model = seeded(), nested(seeded())
    mean_square(plain(whole_batch())).backward()
    loss = mean_square(model(my_part(whole_batch())))
    with model.summon_full_params():
        total = sum(p.detach().sum() for p in model.parameters())
    torch.testing.assert_close(total, sum(p.detach().sum() for p in plain.parameters()))
    loss.backward()
    assert_equal_gradients(model, plain)


def test_looking_between_forward_and_backward_changes_nothing():
    run_ranks(2, between_forward_and_backward)


def only_this_unit() -> list[tuple[int, ...]]:
    model = nested(seeded())
    with model.summon_full_params(recurse=False):
        outer = [tuple(p.shape) for p in model.parameters()]
    with model.layers[1].summon_full_params(recurse=True):
        inner = [name for name, _ in model.layers[1].named_parameters()]
    assert inner == ["scale", "linear.weight", "linear.bias"]
    return outer


def test_recurse_false_leaves_inner_units_alone():
    for shapes in run_ranks(2, only_this_unit):
        assert shapes == [(18,), (18,), (18,), (2, 5), (2,)]


def from_the_class() -> None:
    """Units inside a model that is not wrapped itself."""
    plain, model = seeded(), seeded()
    model.layers[0], model.layers[2] = FSDP(model.layers[0]), FSDP(model.layers[2])
    with FSDP.summon_full_params(model):
        assert [p.shape for p in model.parameters()] == [p.shape for p in plain.parameters()]
        edit(model)
    edit(plain)
    with FSDP.summon_full_params(model, writeback=False):
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_it_can_be_called_on_the_class_with_a_model_that_is_not_a_unit():
    run_ranks(2, from_the_class)


def edit_and_fail(model: nn.Module) -> None:
    edit(model)
    raise ZeroDivisionError


def an_exception_inside() -> None:
    plain, model = seeded(), nested(seeded())
    with pytest.raises(ZeroDivisionError), model.summon_full_params():
        edit_and_fail(model)
    assert_sharded(model)
    assert_equal_weights(model, plain)
    mean_square(plain(whole_batch())).backward()
    mean_square(model(my_part(whole_batch()))).backward()
    assert_equal_gradients(model, plain)


def test_after_an_exception_inside_nothing_is_kept_and_the_model_works():
    run_ranks(2, an_exception_inside)


def replaced_data(how: str) -> None:
    """The two ways to give a parameter other memory, or another parameter."""
    plain, model = seeded(), nested(seeded())
    new, refusal = torch.arange(5, dtype=torch.float64), None
    try:
        with model.summon_full_params():
            if how == "data":
                model.layers[1].scale.data = new.clone()
            else:
                model.layers[1].module.scale = nn.Parameter(new.clone())
    except RuntimeError as error:
        refusal = str(error)
    if refusal is None:
        plain.layers[1].scale.data = new.clone()
    assert refusal is None or "scale" in refusal
    assert_equal_weights(model, plain)
    mean_square(plain(whole_batch())).backward()
    mean_square(model(my_part(whole_batch()))).backward()
    assert_equal_gradients(model, plain)


@pytest.mark.parametrize("how", ["data", "parameter"])
def test_replaced_parameters_are_kept_or_refused_never_lost_in_silence(how):
    run_ranks(2, replaced_data, how)


def tied_parameters() -> None:
    case = CASES["tied"]
    plain = case.model(torch.float64)
    model = FSDP(case.model(torch.float64))
    with model.summon_full_params():
        assert model.head.weight is model.embedding.weight
        edit(model)
    edit(plain)
    assert_equal_weights(model, plain)
    assert isinstance(plain, nn.Module)


def test_tied_parameters_stay_tied_inside():
    run_ranks(2, tied_parameters)


def stack_of_depth_zero() -> None:
    model = FSDP(Stack(depth=0))
    with model.summon_full_params():
        assert len(list(model.parameters())) == 2


def test_a_unit_without_inner_units_works():
    run_ranks(2, stack_of_depth_zero)


def edits_between_forward_and_backward(writeback: bool) -> str:
    model = nested(seeded())
    loss = mean_square(model(my_part(whole_batch())))
    with model.summon_full_params(writeback=writeback):
        # Only elements that rank 1 owns, so that rank 0's shard stays as it was.
        model.module.head.bias.data.fill_(7.0)
    if writeback:
        with pytest.raises(WeightsChangedError, match="root"):
            loss.backward()
    else:
        loss.backward()
        plain = seeded()
        mean_square(plain(whole_batch())).backward()
        assert_equal_gradients(model, plain)
    return "done"


@pytest.mark.parametrize("writeback", [True, False])
def test_an_edit_before_the_backward_is_refused_everywhere_or_without_effect(writeback):
    assert run_ranks(2, edits_between_forward_and_backward, writeback) == ["done", "done"]
