"""Parameters and modules that units leave alone, because the constructor was told to."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import CustomPolicy as TorchCustomPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

import fsdp_ref
from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors, originals, wrapping
from fsdp_ref.originals import NOTHING_IGNORED, Ignored, collect_originals, resolve_ignored
from tests.models import part
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.test_wrapping import small_and_large, structure

BF16 = torch.bfloat16


class Tower(nn.Module):
    """A module to leave alone: nested, with buffers."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.inner(x) * self.scale


class Model(nn.Module):
    """A tower between layers."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.tower = Tower()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.blocks(self.tower(self.stem(x))))


def model():
    torch.manual_seed(0)
    return Model()


def names(one, ignored):
    return [original.name for original in collect_originals(one, ignored)]


# What is meant


def test_a_module_is_ignored_with_everything_inside():
    one = model()

    for modules, states in (([one.tower], None), (None, [one.tower]), ({one.tower}, None)):
        ignored = resolve_ignored(one, modules, states, "here")
        assert ignored.modules == set(one.tower.modules())
        assert ignored.parameters == set(one.tower.parameters())
        assert not any(name.startswith("tower") for name in names(one, ignored))
    assert ignored.counted_numel(one) == 4 * 20 - 10
    assert ignored.counted_numel(one.tower) == 0


def test_parameters_are_ignored_one_by_one_also_beside_modules():
    one = model()
    ignored = resolve_ignored(one, None, iter([one.stem.weight, one.tower.inner]), "here")

    left_out = {"stem.weight"} | {f"tower.{name}" for name in dict(one.tower.named_parameters())}
    expected = [name for name, _ in one.named_parameters() if name not in left_out]
    assert [*expected[:1], "tower.scale", *expected[1:]] == names(one, ignored)


def test_a_tied_parameter_is_ignored_wherever_it_hangs():
    one = model()
    one.head.weight = nn.Parameter(torch.ones(2, 4))
    one.twin = nn.Linear(4, 2)
    one.twin.weight = one.head.weight
    ignored = resolve_ignored(one, [one.twin], None, "here")

    assert "head.weight" not in names(one, ignored)
    assert "head.bias" in names(one, ignored)


def test_nothing_is_ignored_by_default_and_what_lies_elsewhere_has_no_effect():
    one, other = model(), model()

    for modules, states in (
        (None, None),
        ([], None),
        ([other.tower], None),
        (None, [*other.parameters()]),
    ):
        ignored = resolve_ignored(one, modules, states, "here")
        assert not ignored
        assert names(one, ignored) == [name for name, _ in one.named_parameters()]


def test_what_an_enclosing_constructor_ignores_comes_on_top():
    one = model()
    outer = Ignored(frozenset({one.stem.weight, one.blocks[0].weight}))
    ignored = resolve_ignored(one.blocks, [one.blocks[1]], outer, "here")

    assert names(one.blocks, ignored) == ["0.bias"]
    assert one.stem.weight not in ignored.parameters


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (
            lambda m: ([m.tower], [m.tower]),
            "expected ignored_modules or ignored_states, found both",
        ),
        (lambda m: (m.blocks, None), "found ignored_modules=Sequential.*Put it into a list"),
        (lambda m: (None, m.stem.weight), "Put it into a list"),
        (lambda m: ("tower", None), "found ignored_modules='tower'"),
        (lambda m: (3, None), "found ignored_modules=3"),
        (lambda m: (["tower"], None), "found 'tower' in ignored_modules"),
        (lambda m: ([m.stem.weight], None), "in ignored_modules"),
        (lambda m: (None, [m.stem.weight.detach()]), "in ignored_states"),
        (lambda m: ([m], None), "found Model, the module that is wrapped"),
        (lambda m: ([nn.Sequential(m)], None), "found Model, the module that is wrapped"),
    ],
)
def test_what_cannot_be_ignored_is_refused(arguments, match):
    one = model()
    with provokes(resolve_ignored, errors.IgnoredStatesError, match=f"(?s){match}"):
        resolve_ignored(one, *arguments(one), "here")


def units_are_refused():
    one = model()
    stem = one.stem.weight
    one.stem = FSDP(one.stem)
    for modules, states, match in (
        ([one.stem], None, "found a unit around"),
        (None, [one.stem], "found a unit around"),
        (None, [*one.stem.parameters()], "sharded already"),
        (None, [stem], "sharded already"),
    ):
        with provokes(resolve_ignored, errors.IgnoredStatesError, match=match):
            resolve_ignored(one, modules, states, "here")


def test_units_and_what_they_have_sharded_cannot_be_ignored():
    run_ranks(2, units_are_refused)


# What it changes before anything is wrapped


def odd():
    one = small_and_large()
    one[0].index = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    one[0].phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    one[0].gain = nn.Parameter(torch.tensor(1.0))
    one[0].later = nn.UninitializedParameter()
    return one


def test_integer_complex_scalar_and_lazy_parameters_can_be_ignored_on_request():
    one = odd()
    states = [one[0].index, one[0].phase, one[0].gain, one[0].later]
    for left in states:
        ignored = resolve_ignored(one, None, [s for s in states if s is not left], "here")
        with pytest.raises(errors.FSDPError):
            originals.refuse_parameters(collect_originals(one, ignored), "here")
    ignored = resolve_ignored(one, None, states, "here")
    originals.refuse_parameters(collect_originals(one, ignored), "here")


def test_buffers_of_ignored_modules_stay_where_and_what_they_are():
    one = model()
    one.register_buffer("table", torch.ones(2))
    ignored = resolve_ignored(one, [one.tower.inner], None, "here")

    before = originals.cast_buffers(one, BF16, ignored)
    assert before == {"table": torch.float32}
    assert (one.table.dtype, one.tower.inner[1].running_mean.dtype) == (BF16, torch.float32)
    originals.restore_buffers(one, before, ignored)
    assert one.table.dtype == torch.float32
    originals.move_buffers(one, torch.device("meta"), ignored)
    assert one.table.is_meta
    assert not one.tower.inner[1].running_mean.is_meta


@pytest.mark.parametrize(
    "policy",
    [
        fsdp_ref.always_wrap_policy,
        fsdp_ref.ModuleWrapPolicy({nn.Linear, Tower}),
        TorchModuleWrapPolicy({nn.Linear, Tower}),
        lambda module: isinstance(module, (nn.Linear, Tower)),
        fsdp_ref.or_policy(TorchModuleWrapPolicy({nn.Linear}), fsdp_ref.ModuleWrapPolicy({Tower})),
        functools.partial(size_based_auto_wrap_policy, min_num_params=5),
    ],
)
def test_no_policy_makes_a_unit_of_or_inside_an_ignored_module(policy):
    one = model()
    ignored = resolve_ignored(one, [one.tower], None, "here")
    units = applied(one, policy, ignored)

    assert {"stem", "blocks.0", "blocks.1", "head"} <= set(units)
    assert not any(name.startswith("tower") for name in units)


def test_a_policy_is_not_asked_about_ignored_modules():
    for form in (lambda rule: rule, TorchCustomPolicy, fsdp_ref.or_policy):
        one, asked = model(), set()

        def rule(module, asked=asked):
            asked.add(module)
            return isinstance(module, nn.Linear)

        applied(one, form(rule), resolve_ignored(one, [one.tower], None, "here"))
        assert len(asked) >= 5
        assert not asked & set(one.tower.modules())


class Told(nn.Module):
    """A wrapper that remembers what it was told to ignore."""

    def __init__(self, module, ignored_modules=None, ignored_states=None):
        super().__init__()
        self.ignored = resolve_ignored(module, ignored_modules, ignored_states, "here")
        self.module = module

    def forward(self, x):
        return self.module(x)


def applied(one, policy, ignored):
    wrapping.apply_policy(one, policy, Told, {}, ignored)
    return {
        name.replace("module.", ""): module.ignored
        for name, module in one.named_modules()
        if isinstance(module, Told)
    }


def test_inner_units_are_told_and_may_ignore_more():
    one = model()
    weight, bias, head = one.blocks[0].weight, one.blocks[0].bias, one.head.bias

    def rule(module):
        if isinstance(module, nn.Sequential) and module is one.blocks:
            return {"ignored_states": [bias]}
        return module is one.head and {"ignored_modules": []}

    told = applied(one, rule, Ignored(frozenset({weight, head})))

    assert told["blocks"].parameters == {weight, bias}
    assert told["head"].parameters == {head}


def test_sizes_are_counted_without_ignored_parameters_as_in_torch():
    for numel in (1, 11, 200, 201):
        one, other = small_and_large(), small_and_large()
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=numel)
        theirs = set(
            torch_units_without(other, policy, [other[1].weight]),
        )
        ignored = resolve_ignored(one, None, [one[1].weight], "here")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", errors.PolicyMatchedNothingWarning)
            assert set(applied(one, policy, ignored)) == theirs


def torch_units_without(one, policy, parameters):
    from torch.distributed.fsdp.wrap import _recursive_wrap

    _recursive_wrap(one, policy, Told, set(), set(parameters), only_wrap_children=True)
    return [name for name, module in one.named_modules() if isinstance(module, Told)]


def test_a_tie_through_an_ignored_parameter_is_no_tie_to_keep():
    one = model()
    one.blocks[0].weight = one.head.weight = nn.Parameter(torch.ones(4, 4))
    policy = fsdp_ref.ModuleWrapPolicy({nn.Linear})
    before = structure(one)
    with provokes(wrapping.apply_policy, errors.TiedParametersError):
        applied(one, policy, NOTHING_IGNORED)
    assert structure(one) == before
    applied(one, policy, resolve_ignored(one, None, [one.head.weight], "here"))


def test_units_inside_an_ignored_module_do_not_forbid_a_policy():
    one = model()
    one.tower.inner[0] = Told(one.tower.inner[0])
    ignored = resolve_ignored(one, [one.tower], None, "here")

    assert "stem" in applied(one, fsdp_ref.ModuleWrapPolicy({nn.Linear}), ignored)


# The real class, on ranks


def batch():
    whole = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    return part(whole, dist.get_rank(), dist.get_world_size())


def gradients(one):
    one(batch()).square().mean().backward()
    return {name: p.grad.clone() for name, p in one.named_parameters() if p.grad is not None}


def ignored_beside_torch(nested):
    mine, theirs, local = model(), model(), model()
    policies = {}
    if nested:
        policies = {
            FSDP: {"auto_wrap_policy": fsdp_ref.ModuleWrapPolicy({nn.Sequential, Tower})},
            TorchFSDP: {"auto_wrap_policy": TorchModuleWrapPolicy({nn.Sequential, Tower})},
        }
    mine = FSDP(mine, ignored_modules=[mine.tower], **policies.get(FSDP, {}))
    theirs = TorchFSDP(
        theirs,
        ignored_modules=[theirs.tower],
        device_id=torch.device("cpu"),
        **policies.get(TorchFSDP, {}),
    )
    assert len(FSDP.fsdp_modules(mine)) == len(TorchFSDP.fsdp_modules(theirs)) == 1 + nested
    whole = mine.tower
    assert [tuple(p.shape) for p in whole.parameters()] == [
        tuple(p.shape) for p in model().tower.parameters()
    ]
    my_grads, their_grads, local_grads = map(gradients, (mine, theirs, local))
    for name, expected in local_grads.items():
        if name.startswith("tower."):  # whole, and this rank's own: nobody reduced them
            torch.testing.assert_close(my_grads[name], expected)
            their_name = f"_fsdp_wrapped_module.{name}"
            torch.testing.assert_close(their_grads[their_name], expected)
    exported = mine.state_dict()
    assert list(exported) == list(model().state_dict())
    for name, value in model().named_parameters():
        assert torch.equal(exported[name], value), name
    return my_grads["tower.scale"].tolist()


@pytest.mark.parametrize("nested", [False, True], ids=["one unit", "under a policy"])
def test_an_ignored_module_is_neither_sharded_nor_reduced_as_in_torch(nested):
    first, second = run_ranks(2, ignored_beside_torch, nested)

    assert first != second  # each rank has the gradient of its own part of the batch


def averaged_by_hand():
    plain, mine = model(), model()
    mine = FSDP(mine, ignored_states=[*mine.tower.parameters()])
    mine.eval(), plain.eval()  # batch norm would see another batch on each rank
    whole = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    plain(whole).square().mean().backward()
    mine(batch()).square().mean().backward()
    for parameter in mine.tower.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    for (name, mine_too), (_, expected) in zip(
        mine.tower.named_parameters(), plain.tower.named_parameters(), strict=True
    ):
        torch.testing.assert_close(mine_too.grad, expected.grad, msg=lambda t, name=name: name + t)


def test_gradients_of_ignored_parameters_are_right_once_they_are_averaged():
    run_ranks(2, averaged_by_hand)


def odd_parameters_stay():
    one = odd()
    del one[0].later
    with provokes(FSDP, errors.NonFloatingParameterError, match="ignored_states"):
        FSDP(one)
    with provokes(FSDP, errors.NonFloatingParameterError, match="'0.phase'"):
        FSDP(one, ignored_states=[one[0].index])
    with provokes(FSDP, errors.ScalarParameterError, match="ignored_states"):
        FSDP(one, ignored_states=[one[0].index, one[0].phase])
    whole = FSDP(one, ignored_states=[one[0].index, one[0].phase, one[0].gain])
    whole(torch.ones(2)).sum().backward()
    for name, dtype in (("index", torch.int64), ("phase", torch.complex64)):
        assert getattr(whole[0], name).dtype == dtype
        assert whole.state_dict()[f"0.{name}"].dtype == dtype
    with provokes(FSDP, errors.IgnoredStatesError, match="expected ignored_modules or"):
        FSDP(model(), ignored_modules=[], ignored_states=[])


def test_parameters_that_cannot_be_sharded_can_be_ignored():
    run_ranks(2, odd_parameters_stay)


def an_outer_unit_heeds_what_inner_ones_ignore():
    one = model()
    shared = one.blocks[0].weight
    one.head.weight = shared  # of the inner unit's module, and of the outer one's
    one.blocks = FSDP(one.blocks, ignored_states=[shared])
    whole = FSDP(one)
    assert whole.head.weight is whole.blocks[0].weight is shared
    assert shared.shape == (4, 4)
    in_context = model()
    with fsdp_ref.enable_wrap(wrapper_cls=FSDP, ignored_modules=[in_context.tower]):
        wrapped = fsdp_ref.auto_wrap(in_context, fsdp_ref.always_wrap_policy)
        fsdp_ref.wrap(nn.Linear(2, 2))  # the tower is not in here
    assert isinstance(wrapped, FSDP)
    assert isinstance(wrapped.tower, Tower)


def test_outer_units_and_contexts_heed_what_is_ignored():
    run_ranks(2, an_outer_unit_heeds_what_inner_ones_ignore)


def buffers_of_an_ignored_module():
    one = model()
    one.register_buffer("table", torch.ones(2))
    whole = FSDP(one, ignored_modules=[one.tower], mixed_precision={"buffer_dtype": BF16})
    whole(batch())
    assert whole.table.dtype == BF16
    assert whole.tower.inner[1].running_mean.dtype == torch.float32


def test_buffers_of_ignored_modules_keep_their_dtype():
    run_ranks(2, buffers_of_an_ignored_module)
