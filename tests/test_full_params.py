"""`summon_full_params` gives the plain model back for a while, and keeps edits as a whole."""

import inspect
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import collectives, edits, exact, full_params, loading, state_dict, timeline, votes
from fsdp_ref.errors import (
    SilentRanksError,
    SummonContextError,
    SummonDisagreementError,
    WeightsChangedError,
)
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


# ---------------------------------------------------------------- how it is called


def torch_and_fairscale_call_it_differently() -> None:
    model, plain = nested(seeded()), seeded()
    shapes = [p.shape for p in plain.parameters()]
    calls = [
        lambda: FSDP.summon_full_params(model),
        lambda: FSDP.summon_full_params(module=model, writeback=False),
        lambda: FSDP.summon_full_params(model, True, False, False, False, False),
        lambda: model.summon_full_params(),
        lambda: model.summon_full_params(True, False),
        lambda: model.summon_full_params(model),  # static, and called on an instance
        lambda: model.summon_full_params(module=model, recurse=True),
        lambda: model.layers[1].summon_full_params(model),
    ]
    for call in calls:
        with call():
            assert [p.shape for p in model.parameters()] == shapes
    for forgotten in ({"volatile": True}, {"volatile": True, "writeback": False}):
        with model.summon_full_params(**forgotten):
            edit(model)
        assert_equal_weights(model, plain)
    with model.summon_full_params(volatile=False):
        edit(model)
    edit(plain)
    assert_equal_weights(model, plain)
    with (
        provokes(FSDP.summon_full_params, SummonContextError, match="volatile=False"),
        model.summon_full_params(writeback=False, volatile=False),
    ):
        pass
    with FSDP.summon_full_params(nn.Linear(2, 2)):  # no units: nothing to do
        pass
    with FSDP.summon_full_params(nn.Sequential(model), recurse=False):
        assert all(p.dim() == 1 for p in model.parameters())


def test_it_is_called_as_a_method_or_statically_as_in_torch_or_as_in_fairscale():
    run_ranks(2, torch_and_fairscale_call_it_differently)


def test_its_arguments_are_torchs_in_torchs_order():
    ours = inspect.signature(FSDP.summon_full_params).parameters
    theirs = inspect.signature(TorchFSDP.summon_full_params).parameters
    assert [(p.name, p.default) for p in theirs.values()] == [
        (p.name, p.default) for p in ours.values() if p.name != "volatile"
    ]
    assert inspect.isfunction(FSDP.summon_full_params)
    assert FSDP.summon_full_params.__doc__ == seeded_without_ranks().summon_full_params.__doc__


def seeded_without_ranks() -> FSDP:
    """A wrapper nobody has built, for what hangs on the class."""
    return FSDP.__new__(FSDP)


# ---------------------------------------------------------------- memory of its own


def edits_without_writeback_are_no_edits(arguments: dict) -> None:
    """Rank 0 alone scribbles on what it sees, between forward and backward."""
    plain, model = seeded(), nested(seeded(), **arguments)
    mean_square(plain(whole_batch())).backward()
    loss = mean_square(model(my_part(whole_batch())))
    with model.summon_full_params(writeback=False), torch.no_grad():
        if dist.get_rank() == 0:
            for parameter in model.parameters():
                parameter.fill_(7).requires_grad_(False)
    with model.summon_full_params(writeback=False, rank0_only=True), torch.no_grad():
        if dist.get_rank() == 0:
            for parameter in model.parameters():
                parameter.fill_(8)
    assert_equal_weights(model, plain)
    loss.backward()
    with model.summon_full_params(with_grads=True, writeback=False):
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)
            assert mine.requires_grad


KINDS = {
    "full": {},
    "kept whole": {"sharding_strategy": "SHARD_GRAD_OP"},
    "copied": {"sharding_strategy": "NO_SHARD"},
    "original parameters": {"use_orig_params": True},
    "offloaded": {"cpu_offload": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_nobody_keeps_disturbs_no_backward(kind):
    run_ranks(2, edits_without_writeback_are_no_edits, KINDS[kind])


def parameters_in_their_own_dtype() -> None:
    model = FSDP(seeded().float(), mixed_precision={"param_dtype": torch.bfloat16})
    expected = [p.detach() for p in seeded().float().parameters()]
    with timeline() as recorded, model.summon_full_params():
        found = list(model.parameters())
        assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
    assert recorded.lines("all-gather") == ["all-gather root"]  # not also in bfloat16
    assert_sharded(model)


def test_with_mixed_precision_it_gathers_once_and_shows_every_bit():
    run_ranks(2, parameters_in_their_own_dtype)


# ---------------------------------------------------------------- one rank only


def unsharded_bytes(model: nn.Module) -> int:
    return sum(unit._unit.unsharded_bytes for unit in FSDP.fsdp_modules(model))


def one_rank_looks(kind: str) -> tuple[int, int]:
    model, plain = nested(seeded(), **KINDS[kind]), seeded()
    outside = [tuple(p.shape) for p in model.parameters()]
    with timeline() as recorded, model.summon_full_params(writeback=False, rank0_only=True):
        found = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
        needed = unsharded_bytes(model)
        if dist.get_rank() == 0:
            assert found == [(name, tuple(p.shape)) for name, p in plain.named_parameters()]
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(mine, theirs)
            edit(model)
        else:
            assert [shape for _, shape in found] == outside
            assert needed == 0
        with pytest.raises(SummonContextError, match="inside it"):  # on all ranks alike
            model(my_part(whole_batch()))
    assert unsharded_bytes(model) == 0
    assert_equal_weights(model, plain)
    assert_sharded(model)
    return needed, recorded.bytes_sent()


@pytest.mark.parametrize("kind", KINDS)
def test_with_rank0_only_the_others_need_no_memory_and_send_only_their_shard(kind):
    elements = sum(p.numel() for p in seeded().parameters())
    (needed, sent), *others = run_ranks(3, one_rank_looks, kind)
    assert needed >= 8 * elements
    assert sent == 0
    for other_needed, other_sent in others:
        assert other_needed == 0
        assert other_sent == (0 if kind == "copied" else needed // 3)


def one_rank_writes(arguments: dict) -> None:
    model, plain = nested(seeded(), **arguments), seeded()
    versions = [unit._unit.generations() for unit in FSDP.fsdp_modules(model)]
    with model.summon_full_params(rank0_only=True):
        pass
    assert [unit._unit.generations() for unit in FSDP.fsdp_modules(model)] == versions
    with model.summon_full_params(rank0_only=True, offload_to_cpu=True):
        if dist.get_rank() == 0:
            edit(model)
            model.head.requires_grad_(False)
            model.layers[0].requires_grad_(False)
    edit(plain)
    assert_equal_weights(model, plain)
    plain.layers[0].requires_grad_(False)
    frozen = {unit._unit.name for unit in FSDP.fsdp_modules(model) if frozen_whole(unit)}
    assert frozen == {"", "layers.0"}, frozen


def frozen_whole(unit: FSDP) -> bool:
    return not any(flat_param.requires_grad for flat_param in unit._unit.flat_params)


@pytest.mark.parametrize("kind", KINDS)
def test_with_rank0_only_and_writeback_all_ranks_take_over_what_one_wrote(kind):
    run_ranks(3, one_rank_writes, KINDS[kind])


def all_kinds_of_groups() -> FSDP:
    model = seeded()
    model.layers[0] = FSDP(model.layers[0], process_group="set2")
    model.layers[1] = FSDP(model.layers[1], process_group="self")
    model.layers[2] = FSDP(model.layers[2], ("set2", "mod2"), "HYBRID_SHARD")
    return FSDP(model)


def each_weight_is_seen_once() -> list[bool]:
    model, rank = all_kinds_of_groups(), dist.get_rank()
    parts = [model.layers[0], model.layers[1], model.layers[2], model.head]
    with model.summon_full_params(rank0_only=True), torch.no_grad():
        seen = []
        for part in parts:
            weight = part.weight if isinstance(part, nn.Linear) else part.module.linear.weight
            seen.append(isinstance(weight, nn.Parameter))
            if seen[-1]:
                weight.fill_(rank)
    weights = full_weights(model)
    values = [weights[f"layers.{i}.linear.weight"].unique().tolist() for i in range(3)]
    values.append(weights["head.weight"].unique().tolist())
    assert values == [[rank - rank % 2], [rank], [0], [0]]
    return seen


def test_with_mixed_groups_each_weight_is_seen_by_the_first_rank_that_has_it():
    assert run_ranks(4, each_weight_is_seen_once) == [
        [True, True, True, True],
        [False, True, False, False],
        [True, True, False, False],
        [False, True, False, False],
    ]


def as_other_devices_do() -> None:
    """Through the backend's own collectives, which is how other devices than the CPU do it."""
    collectives._point_to_point = lambda tensor: False
    model, plain = nested(seeded()), seeded()
    hybrid = FSDP(seeded(), ("set2", "mod2"), "HYBRID_SHARD")
    for one in (model, hybrid):
        with one.summon_full_params(rank0_only=True):
            if dist.get_rank() == 0:
                for mine, theirs in zip(one.parameters(), plain.parameters(), strict=True):
                    assert torch.equal(mine, theirs)
                edit(one)
    edit(plain)
    for one in (model, hybrid):
        with one.summon_full_params(writeback=False):
            for mine, theirs in zip(one.parameters(), plain.parameters(), strict=True):
                assert torch.equal(mine, theirs)


def test_rank0_only_works_through_the_backends_own_collectives():
    run_ranks(4, as_other_devices_do)


def state_dicts_on_the_rank_that_sees() -> None:
    model, plain = nested(seeded()), seeded()
    other = {name: value + 1 for name, value in plain.state_dict().items()}
    with model.summon_full_params(rank0_only=True, offload_to_cpu=True):
        if dist.get_rank() == 0:
            exported = model.state_dict()
            assert list(exported) == list(plain.state_dict())
            for name, value in plain.state_dict().items():
                assert torch.equal(exported[name], value)
            model.load_state_dict(other)
        else:
            with provokes(state_dict.refuse_unseen, SummonContextError, match="rank0_only"):
                model.state_dict()
            with provokes(FSDP.state_dict, SummonContextError, match="sees the parameters"):
                model.state_dict()
            with provokes(FSDP.load_state_dict, SummonContextError, match="load_state_dict"):
                model.load_state_dict(other)
            with provokes(loading.Loading.targets_registered, SummonContextError):
                model.load_state_dict(other)
            with provokes(state_dict.Exporting.values_registered, SummonContextError):
                model.state_dict()
    plain.load_state_dict(other)
    assert_equal_weights(model, plain)
    exported = model.state_dict()
    assert all(torch.equal(exported[name], value) for name, value in other.items())


def test_the_rank_that_sees_saves_and_loads_alone_and_all_get_what_it_loaded():
    run_ranks(2, state_dicts_on_the_rank_that_sees)


# ---------------------------------------------------------------- freezing inside


def freezing(use_orig_params: bool) -> None:
    model, plain = nested(seeded(), use_orig_params=use_orig_params), seeded()
    layer = model.layers[1]
    with model.summon_full_params(writeback=False):
        layer.requires_grad_(False)
    with model.summon_full_params(writeback=False):
        assert all(p.requires_grad for p in model.parameters())
    with model.summon_full_params():
        layer.requires_grad_(False)
    plain.layers[1].requires_grad_(False)
    for _ in range(2):  # frozen, and thawed again
        mean_square(plain(whole_batch())).backward()
        mean_square(model(my_part(whole_batch()))).backward()
        with model.summon_full_params(with_grads=True, writeback=False):
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert mine.requires_grad == theirs.requires_grad
                assert (mine.grad is None) == (theirs.grad is None)
                if theirs.grad is not None:
                    torch.testing.assert_close(mine.grad, theirs.grad)
        model.zero_grad()
        plain.zero_grad()
        with model.summon_full_params():
            layer.requires_grad_(True)
        plain.layers[1].requires_grad_(True)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_freezing_a_unit_inside_is_kept(use_orig_params):
    run_ranks(2, freezing, use_orig_params)


def freezing_one_parameter() -> None:
    model, plain = nested(seeded()), seeded()
    with (
        provokes(FSDP.summon_full_params, SummonContextError, match="only scale frozen") as caught,
        model.summon_full_params(),
    ):
        edit(model)
        model.layers[1].module.scale.requires_grad_(False)
    assert "unit 'layers.1'" in caught.message
    assert "use_orig_params=True" in caught.message
    with (
        provokes(edits.write_back, SummonContextError, match="frozen"),
        model.summon_full_params(),
    ):
        model.layers[1].module.scale.requires_grad_(False)
    assert_equal_weights(model, plain)
    mean_square(plain(whole_batch())).backward()
    mean_square(model(my_part(whole_batch()))).backward()
    assert_equal_gradients(model, plain)  # nothing was frozen

    alone = nested(seeded(), use_orig_params=True)
    with alone.summon_full_params():
        alone.layers[1].module.scale.requires_grad_(False)
    mean_square(alone(my_part(whole_batch()))).backward()
    with alone.summon_full_params(with_grads=True, writeback=False):
        named = dict(alone.named_parameters())
        assert named["layers.1.scale"].grad is None
        assert named["layers.1.linear.weight"].grad is not None

    with (
        provokes(
            votes.Ballot.count, SummonDisagreementError, match="requires_grad of 'layers.0.scale'"
        ),
        model.summon_full_params(),
    ):
        if dist.get_rank() == 1:
            model.layers[0].requires_grad_(False)
    assert all(p.requires_grad for p in model.parameters())


def test_freezing_one_parameter_of_a_flat_one_is_refused_and_kept_with_original_parameters():
    run_ranks(2, freezing_one_parameter)


# ---------------------------------------------------------------- what goes wrong


def one_rank_leaves_by_an_exception(rank0_only: bool) -> str:
    model, plain = nested(seeded()), seeded()
    shards = [p.detach().clone() for p in model.parameters()]
    first = dist.get_rank() == 0
    with (
        pytest.raises(ZeroDivisionError)
        if first
        else provokes(FSDP.summon_full_params, SilentRanksError, match="comparing what") as caught,
        model.summon_full_params(rank0_only=rank0_only),
    ):
        if first:
            edit_and_fail(model)
        elif not rank0_only:
            edit(model)
    assert_sharded(model)
    for found, before in zip(model.parameters(), shards, strict=True):
        assert torch.equal(found, before)
    assert [n for n, _ in model.head.named_parameters()] == []
    assert tuple(model.head.weight.shape) == tuple(plain.head.weight.shape)
    return type(caught.value).__name__


@pytest.mark.parametrize("rank0_only", [False, True])
def test_if_one_rank_raises_inside_the_others_get_an_error_and_all_are_as_before(rank0_only):
    started = time.monotonic()
    outcomes = run_ranks(2, one_rank_leaves_by_an_exception, rank0_only, dist_timeout=3)
    assert outcomes == ["ZeroDivisionError", "SilentRanksError"]
    assert time.monotonic() - started < 15


def only_one_rank_looks() -> None:
    model = nested(seeded())
    with model.summon_full_params():
        pass
    if dist.get_rank() == 1:
        return
    units = [unit._unit for unit in FSDP.fsdp_modules(model)]
    with provokes(FSDP.state_dict, SilentRanksError, match="unit 'root'"):
        model.state_dict()
    with provokes(exact.gather_exact, SilentRanksError, match="all-gather of full values"):
        exact.gather_exact(units[0])
    with (
        provokes(full_params.full_parameters, SilentRanksError),
        full_params.full_parameters(units, units[0].placement.groups, writeback=True),
    ):
        pass
    ballot = votes.Ballot()
    ballot.ask("whether anybody is there", True)
    with provokes(votes.Ballot.count, SilentRanksError, match="comparing ranks"):
        ballot.count(units, units[0].placement.groups)
    assert_sharded(model)
    assert not any(unit.summoned for unit in units)


def test_if_only_one_rank_looks_it_hears_so_within_the_time_limit():
    run_ranks(2, only_one_rank_looks, dist_timeout=3)


def from_inside_a_backward() -> None:
    model = nested(seeded())
    refused = []

    def look(gradient: torch.Tensor) -> None:
        with (
            provokes(full_params.full_parameters, SummonContextError, match="backward under way"),
            model.summon_full_params(),
        ):
            pass
        refused.append(True)

    output = model(my_part(whole_batch()))
    output.register_hook(look)
    mean_square(output).backward()
    assert refused == [True]


def test_inside_a_backward_it_is_refused():
    run_ranks(2, from_inside_a_backward)


def several_models_in_one_module() -> None:
    """A pair disagrees about its unit; another unit, over all ranks, must not be written either."""
    model = nn.ModuleList([seeded(), seeded()])
    model[0].layers[0] = FSDP(model[0].layers[0], process_group="set2")
    model[1].layers[0] = FSDP(model[1].layers[0])
    refused = False
    try:
        with FSDP.summon_full_params(model), torch.no_grad():
            model[1].layers[0].scale.fill_(5)
            if dist.get_rank() == 3:
                model[0].layers[0].scale.fill_(5)
    except SummonDisagreementError as error:
        refused = "unit 'root'" in str(error)
    assert refused
    with FSDP.summon_full_params(model, writeback=False):
        assert not (model[1].layers[0].scale == 5).any()


def test_edits_of_several_models_are_kept_together_or_not_at_all():
    run_ranks(4, several_models_in_one_module)


def a_replaced_parameter_leaves_no_trace() -> None:
    model, plain = nested(seeded(), use_orig_params=True), seeded()
    before = dict(model.named_parameters())
    new = torch.arange(5, dtype=torch.float64)
    with model.summon_full_params():
        model.layers[1].module.scale = nn.Parameter(new.clone())
    plain.layers[1].scale.data = new.clone()
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert_equal_weights(model, plain)


def test_original_parameters_stay_the_same_objects():
    run_ranks(2, a_replaced_parameter_leaves_no_trace)
