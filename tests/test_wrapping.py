"""Policies decide about a whole tree first; only then is anything wrapped."""

import copy
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import wrap as torch_wrap

import fsdp_ref
from fsdp_ref import FullyShardedDataParallel, asking, errors, wrapping
from fsdp_ref.naming import current_unit_name
from tests.provoked import provokes
from tests.ranks import run_ranks


class Unit(nn.Module):
    """A wrapper that shards nothing, and remembers how it was called."""

    def __init__(self, module, process_group=None, *, auto_wrap_policy=None, colour="plain"):
        super().__init__()
        self.name_at_construction = current_unit_name()
        if auto_wrap_policy is not None:
            fsdp_ref.wrapping.apply_policy(module, auto_wrap_policy, Unit, {"colour": colour})
        self.module, self.process_group, self.colour = module, process_group, colour

    def forward(self, *args):
        return self.module(*args)


class Small(nn.Module):
    """Ten parameters."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10))

    def forward(self, x):
        return x + self.weight.sum()


class Large(Small):
    """Two hundred parameters."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(200))


class Deep(nn.Module):
    """Containers, a nested block, attention."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Large(), nn.Sequential(Small(), Large())])
        self.table = nn.ModuleDict({"a": Small(), "b": Large()})
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        return x


def small_and_large():
    return nn.Sequential(Small(), Large())


def unit_names(model, wrapper=Unit):
    """Names of the wrapped modules as the plain model says them."""
    wrapped = {"module", "_fsdp_wrapped_module"}
    return [
        ".".join(part for part in name.split(".") if part not in wrapped)
        for name, module in model.named_modules()
        if isinstance(module, wrapper)
    ]


def apply(model, policy, **defaults):
    fsdp_ref.wrapping.apply_policy(model, policy, Unit, defaults)
    return unit_names(model)


def structure(model):
    return [(name, type(module)) for name, module in model.named_modules()]


# By hand


def test_wrap_outside_of_the_context_returns_the_module_itself():
    layer = nn.Linear(2, 2)

    assert fsdp_ref.wrap(layer, process_group="self") is layer
    assert fsdp_ref.auto_wrap(layer, min_num_params=1) is layer


def test_all_wraps_inside_the_context_get_its_arguments_and_overrides_win():
    with fsdp_ref.enable_wrap(wrapper_cls=Unit, process_group="node", colour="red"):
        first = fsdp_ref.wrap(nn.Linear(2, 2))
        second = fsdp_ref.wrap(nn.Linear(2, 2), colour="blue")

    assert (first.process_group, first.colour) == ("node", "red")
    assert (second.process_group, second.colour) == ("node", "blue")
    assert first.name_at_construction is None


def test_the_context_ends_also_by_an_exception():
    with pytest.raises(ZeroDivisionError), fsdp_ref.enable_wrap(wrapper_cls=Unit):
        1 / 0  # noqa: B018

    assert isinstance(fsdp_ref.wrap(nn.Linear(2, 2)), nn.Linear)


def test_contexts_do_not_nest_and_the_outer_one_goes_on():
    with fsdp_ref.enable_wrap(wrapper_cls=Unit):
        with (
            provokes(fsdp_ref.enable_wrap, errors.WrapContextError, match="one around this one"),
            fsdp_ref.enable_wrap(wrapper_cls=Unit),
        ):
            pass
        assert isinstance(fsdp_ref.wrap(nn.Linear(2, 2)), Unit)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"wrapper_cls": None}, "a wrapper_cls to call"),
        ({"wrapper_cls": "FSDP"}, "found 'FSDP'"),
        ({"wrapper_cls": Unit, "processgroup": "self"}, "Did you mean 'process_group'"),
    ],
)
def test_a_context_that_could_never_wrap_is_refused_at_once(arguments, match):
    with (
        provokes(fsdp_ref.enable_wrap, errors.WrapContextError, match=match),
        fsdp_ref.enable_wrap(**arguments),
    ):
        pass


def test_an_argument_that_the_wrapper_does_not_take_is_refused_by_name():
    with fsdp_ref.enable_wrap(wrapper_cls=Unit):
        with provokes(fsdp_ref.wrap, errors.WrapContextError, match="mean 'colour'"):
            fsdp_ref.wrap(nn.Linear(2, 2), color="red")
        with provokes(fsdp_ref.auto_wrap, errors.WrapContextError, match="mean 'colour'"):
            fsdp_ref.auto_wrap(nn.Linear(2, 2), color="red")


def test_a_partial_serves_as_wrapper():
    red = functools.partial(Unit, colour="red")

    with fsdp_ref.enable_wrap(wrapper_cls=red):
        model = fsdp_ref.auto_wrap(small_and_large(), min_num_params=100)
        with provokes(fsdp_ref.auto_wrap, errors.AlreadyWrappedError):
            fsdp_ref.auto_wrap(model, min_num_params=100)

    assert model[1].colour == "red"


# By size


def test_auto_wrap_takes_the_large_child_and_leaves_the_remainder():
    model = small_and_large()

    with fsdp_ref.enable_wrap(wrapper_cls=Unit):
        returned = fsdp_ref.auto_wrap(model, min_num_params=100)

    assert returned is model
    assert unit_names(model) == ["1"]


def test_auto_wrap_wraps_the_root_only_if_enough_remains():
    with fsdp_ref.enable_wrap(wrapper_cls=Unit):
        model = fsdp_ref.auto_wrap(small_and_large(), min_num_params=10)

    assert unit_names(model) == ["0", "1"]  # nothing remains for the root
    with fsdp_ref.enable_wrap(wrapper_cls=Unit):
        whole = fsdp_ref.auto_wrap(small_and_large(), min_num_params=0)
    assert unit_names(whole) == ["", "0", "1"]


def test_the_threshold_is_inclusive():
    assert apply(small_and_large(), sized(200)) == ["1"]
    assert apply_silently(small_and_large(), sized(201)) == []


def sized(numel):
    return functools.partial(fsdp_ref.size_based_auto_wrap_policy, min_num_params=numel)


def apply_silently(model, policy, **defaults):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.PolicyMatchedNothingWarning)
        return apply(model, policy, **defaults)


def test_containers_are_looked_into_but_never_wrapped_and_attention_is_not_split():
    assert apply(Deep(), sized(100)) == ["layers.0", "layers.1.1", "table.b"]
    everything = apply(Deep(), fsdp_ref.always_wrap_policy)
    assert everything == [
        *["layers.0", "layers.1", "layers.1.0", "layers.1.1"],
        *["table.a", "table.b", "attention"],
    ]
    assert apply(Deep(), lambda module: True) == everything


def test_attention_can_be_a_unit_but_nothing_inside_it():
    by_class = fsdp_ref.ModuleWrapPolicy({nn.MultiheadAttention, nn.Linear})
    assert apply(Deep(), by_class) == ["attention"]
    assert apply(Deep(), torch_wrap.ModuleWrapPolicy(by_class.module_classes)) == ["attention"]


def test_force_leaf_and_exclude_replace_the_defaults():
    policy = functools.partial(sized(100), force_leaf_modules={nn.Sequential})
    assert apply(Deep(), policy) == ["layers.0", "table.b", "attention"]
    policy = functools.partial(sized(100), exclude_wrap_modules={Large})
    assert apply(Deep(), policy) == ["layers.1"]


@st.composite
def trees(draw, depth=0):
    """A random tree of linear layers, sequences and lists."""
    if depth == 3 or draw(st.booleans()):
        return nn.Linear(draw(st.integers(1, 6)), draw(st.integers(1, 6)))
    children = draw(st.lists(trees(depth + 1), max_size=3))
    container = draw(st.sampled_from([nn.Sequential, nn.ModuleList]))
    return container(children) if container is nn.ModuleList else container(*children)


def torch_units(model, policy):
    """What torch's own traversal wraps; it calls the wrapper it is given."""
    torch_wrap._recursive_wrap(
        model, policy, Unit, set(), set(), only_wrap_children=True, colour="plain"
    )
    return unit_names(model)


@settings(max_examples=60, deadline=None)
@given(trees(), st.integers(0, 60))
def test_the_size_policy_selects_what_torchs_selects(tree, threshold):
    theirs = torch_units(
        copy.deepcopy(tree),
        functools.partial(torch_wrap.size_based_auto_wrap_policy, min_num_params=threshold),
    )

    assert apply_silently(copy.deepcopy(tree), sized(threshold)) == theirs
    torchs_policy_on_ours = functools.partial(
        torch_wrap.size_based_auto_wrap_policy, min_num_params=threshold
    )
    assert apply_silently(copy.deepcopy(tree), torchs_policy_on_ours) == theirs


def test_a_fairscale_policy_is_called_in_fairscales_words():
    seen = []

    def policy(module, recurse, unwrapped_params, module_is_root, min_num_params=100):
        seen.append((type(module).__name__, recurse, unwrapped_params, module_is_root))
        return unwrapped_params >= min_num_params

    assert apply(small_and_large(), policy) == ["1"]
    assert seen == [
        ("Sequential", True, 210, True),
        ("Small", True, 10, False),
        ("Large", True, 200, False),
        ("Large", False, 200, False),
        ("Sequential", False, 10, True),
    ]
    fairscale = functools.partial(fsdp_ref.default_auto_wrap_policy, min_num_params=100)
    assert apply(small_and_large(), fairscale) == ["1"]
    with_root = functools.partial(fairscale, skip_params_check_for_root=True)
    with fsdp_ref.enable_wrap(wrapper_cls=Unit):
        assert unit_names(fsdp_ref.auto_wrap(small_and_large(), with_root)) == ["", "1"]


def test_auto_wrap_follows_the_policy_of_the_context_unless_told_otherwise():
    by_class = fsdp_ref.ModuleWrapPolicy({Small})
    with fsdp_ref.enable_wrap(wrapper_cls=Unit, auto_wrap_policy=by_class):
        by_context = fsdp_ref.auto_wrap(small_and_large())
        by_size = fsdp_ref.auto_wrap(small_and_large(), min_num_params=100)
        by_argument = fsdp_ref.auto_wrap(small_and_large(), fsdp_ref.ModuleWrapPolicy([Large]))

    assert unit_names(by_context) == ["0", "1"]  # Large derives from Small
    assert unit_names(by_size) == ["1"]
    assert unit_names(by_argument) == ["1"]


def test_a_policy_and_a_threshold_together_are_refused():
    with (
        fsdp_ref.enable_wrap(wrapper_cls=Unit),
        provokes(fsdp_ref.auto_wrap, errors.PolicyError, match="found both"),
    ):
        fsdp_ref.auto_wrap(nn.Linear(2, 2), fsdp_ref.always_wrap_policy, min_num_params=1)


# By class and by rule


class A(Small):
    pass


class B(nn.Linear):
    pass


def test_every_instance_of_every_class_becomes_a_unit():
    model = nn.Sequential(A(), B(2, 2), nn.ModuleList([A(), B(2, 2)]), B(2, 2), nn.Linear(2, 2))

    assert apply(model, fsdp_ref.ModuleWrapPolicy({A, B})) == ["0", "1", "2.0", "2.1", "3"]


@pytest.mark.parametrize(
    "policy",
    [
        torch_wrap.ModuleWrapPolicy({Large}),
        torch_wrap.CustomPolicy(lambda module: isinstance(module, Large)),
        functools.partial(torch_wrap.transformer_auto_wrap_policy, transformer_layer_cls={Large}),
        functools.partial(
            torch_wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Large)
        ),
        functools.partial(
            torch_wrap._or_policy,
            policies=[
                functools.partial(
                    torch_wrap.lambda_auto_wrap_policy,
                    lambda_fn=lambda module: isinstance(module, Large),
                )
            ],
        ),
        lambda module: isinstance(module, Large),
        fsdp_ref.CustomPolicy(lambda module: isinstance(module, Large)),
        fsdp_ref.ModuleWrapPolicy([Large]),
    ],
)
def test_all_forms_of_policies_select_the_same_modules(policy):
    assert apply(Deep(), policy) == ["layers.0", "layers.1.1", "table.b"]


def test_torchs_always_wrap_policy_wraps_what_ours_does():
    assert apply(Deep(), torch_wrap.always_wrap_policy) == apply(
        Deep(), fsdp_ref.always_wrap_policy
    )


@pytest.mark.parametrize(
    ("make", "defaults"),
    [
        (fsdp_ref.CustomPolicy, {}),
        (lambda rule: rule, {}),
        (fsdp_ref.CustomPolicy, True),
        (torch_wrap.CustomPolicy, True),  # torch reads an empty dict as False
    ],
)
def test_a_dict_overrides_arguments_of_that_unit_only(make, defaults):
    def rule(module):
        if type(module) is Large:
            return {"process_group": "self"}
        return defaults if type(module) is Small else False

    model = small_and_large()

    assert apply(model, make(rule), process_group="node", colour="red") == ["0", "1"]
    assert [(unit.process_group, unit.colour) for unit in model] == [
        ("node", "red"),
        ("self", "red"),
    ]


def test_a_unit_is_told_its_name_also_below_another_constructor():
    model = nn.Sequential(nn.Sequential(Large(), Small()), Large())

    def rule(module):
        return isinstance(module, Large)

    apply(model, rule)
    assert model[0][0].name_at_construction == "0.0"
    assert current_unit_name() is None
    outer = nn.ModuleDict({"part": nn.Sequential(Large())})
    with fsdp_ref.naming.unit_name_scope("encoder"):
        apply(outer, rule)
    assert outer["part"][0].name_at_construction == "encoder.part.0"


def test_a_module_that_hangs_in_two_places_becomes_one_unit_in_both():
    shared = Large()
    model = nn.Sequential(shared, nn.Sequential(shared), Small())

    apply(model, fsdp_ref.ModuleWrapPolicy({Large}))

    assert model[0] is model[1][0]
    assert isinstance(model[0], Unit)
    assert model[0].module is shared


def test_a_policy_that_selects_nothing_is_warned_about():
    with provokes(wrapping.apply_policy, errors.PolicyMatchedNothingWarning, match="found none"):
        wrapping.apply_policy(small_and_large(), fsdp_ref.ModuleWrapPolicy({B}), Unit, {})
    with (
        fsdp_ref.enable_wrap(wrapper_cls=Unit),
        provokes(fsdp_ref.auto_wrap, errors.PolicyMatchedNothingWarning, match="Policy\\(B\\)"),
    ):
        fsdp_ref.auto_wrap(small_and_large(), fsdp_ref.ModuleWrapPolicy({B}))


def test_a_remainder_is_no_reason_for_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fsdp_ref.enable_wrap(wrapper_cls=Unit):
            fsdp_ref.auto_wrap(small_and_large())
        apply(Large(), fsdp_ref.ModuleWrapPolicy({Large}))  # selects the root alone


def test_a_class_does_not_wrap_its_own_module_twice():
    wrapped = []

    def remember(module):
        wrapped.append(module)
        return Unit(module)

    wrapping.apply_policy(nn.Sequential(nn.Linear(2, 2)), fsdp_ref.always_wrap_policy, remember, {})

    assert [type(module) for module in wrapped] == [nn.Linear]


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (lambda module: None, "found None"),
        (lambda module: "self", "found 'self'"),
        (lambda module: 1, "found 1"),
        (lambda module, recurse, nonwrapped_numel: None, "found None"),
        (lambda module: {"processgroup": "self"}, "Did you mean 'process_group'"),
        (lambda module: {"auto_wrap_policy": None}, "found 'auto_wrap_policy'"),
        (lambda module: {"module": None}, "found 'module'"),
        ({Large}, "ModuleWrapPolicy"),
        (Large, "ModuleWrapPolicy"),
        (None, "a function of a module"),
    ],
)
def test_a_wrong_policy_or_answer_is_refused_and_the_model_stays_plain(policy, match):
    model = small_and_large()
    before = structure(model)

    with provokes(wrapping.apply_policy, errors.PolicyError, match=match):
        wrapping.apply_policy(model, policy, Unit, {})

    assert structure(model) == before


def test_what_is_no_policy_is_not_asked():
    with provokes(asking.answers_of, errors.PolicyError, match="policy object"):
        list(asking.answers_of(small_and_large(), "Large", {}))


def test_auto_wrap_refuses_the_same_answers():
    with (
        fsdp_ref.enable_wrap(wrapper_cls=Unit),
        provokes(fsdp_ref.auto_wrap, errors.PolicyError, match="unit '0' \\(Small\\)"),
    ):
        fsdp_ref.auto_wrap(small_and_large(), lambda module: None)


@pytest.mark.parametrize("classes", [[], Large, ["Large"], [Large()], {int}, 3])
def test_a_class_policy_takes_module_classes_only(classes):
    with provokes(fsdp_ref.ModuleWrapPolicy, errors.PolicyError, match="a set of module classes"):
        fsdp_ref.ModuleWrapPolicy(classes)


def test_a_class_policy_refuses_containers():
    with provokes(
        fsdp_ref.ModuleWrapPolicy, errors.ContainerWithoutForwardError, match="ModuleList"
    ):
        fsdp_ref.ModuleWrapPolicy({Large, nn.ModuleList})


# Refusals


def test_units_inside_are_refused_by_name_and_nothing_changes():
    model = nn.Sequential(Large(), nn.Sequential(Unit(Small())))
    before = structure(model)

    with provokes(wrapping.apply_policy, errors.AlreadyWrappedError, match="the unit '1.0'"):
        wrapping.apply_policy(model, fsdp_ref.ModuleWrapPolicy({Large}), Unit, {})
    with (
        fsdp_ref.enable_wrap(wrapper_cls=Unit),
        provokes(fsdp_ref.auto_wrap, errors.AlreadyWrappedError, match="a unit"),
    ):
        fsdp_ref.auto_wrap(Unit(Small()))

    assert structure(model) == before


class Tied(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.body = nn.ModuleDict({"one": nn.Linear(3, 3)})
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x):
        return self.head(self.body["one"](self.emb(x)))


def refusal_of_the_tie(*classes):
    model = Tied()
    before = structure(model)
    with provokes(wrapping.apply_policy, errors.TiedParametersError) as caught:
        wrapping.apply_policy(model, fsdp_ref.ModuleWrapPolicy(classes), Unit, {})
    assert structure(model) == before
    return caught.message


def test_one_half_of_a_tie_as_a_unit_is_refused_with_both_names():
    message = refusal_of_the_tie(nn.Embedding)

    assert "'emb.weight' in unit 'emb' and 'head.weight' in the enclosing unit" in message
    assert message.endswith(
        "Let the policy leave out 'emb', so that both belong to the enclosing unit."
    )


def test_both_halves_of_a_tie_as_units_are_refused_with_both_names():
    message = refusal_of_the_tie(nn.Embedding, nn.Linear)

    assert "'emb.weight' in unit 'emb' and 'head.weight' in unit 'head'" in message
    assert "leave out 'emb' and 'head', so that both belong to the enclosing unit" in message


def test_the_advised_regrouping_works():
    model = Tied()

    assert apply(model, lambda module: isinstance(module, nn.Linear) and module is not model.head)
    assert unit_names(model) == ["body.one"]


def test_the_regrouping_names_the_nearest_unit_around_both():
    class Decoder(Tied):
        pass

    model = nn.Sequential(Decoder())
    with provokes(wrapping.apply_policy, errors.TiedParametersError) as caught:
        wrapping.apply_policy(model, fsdp_ref.ModuleWrapPolicy({Decoder, nn.Embedding}), Unit, {})

    assert "leave out '0.emb', so that both belong to unit '0'" in caught.message


def test_a_tied_bias_is_the_same_case():
    model = nn.Sequential(B(2, 2), nn.Linear(3, 2))
    model[1].bias = model[0].bias

    with provokes(wrapping.apply_policy, errors.TiedParametersError, match=r"'0.bias'.*'1.bias'"):
        wrapping.apply_policy(model, fsdp_ref.ModuleWrapPolicy({B}), Unit, {})


def test_auto_wrap_refuses_to_cut_a_tie():
    with (
        fsdp_ref.enable_wrap(wrapper_cls=Unit),
        provokes(fsdp_ref.auto_wrap, errors.TiedParametersError),
    ):
        fsdp_ref.auto_wrap(Tied(), fsdp_ref.ModuleWrapPolicy({nn.Embedding}))


def test_a_tie_inside_one_unit_is_fine():
    assert apply(nn.Sequential(Tied()), fsdp_ref.ModuleWrapPolicy({Tied})) == ["0"]


# The real wrapper, on ranks


def managed(model):
    """Elements of the parameters that each unit holds, by the name of the unit."""
    return {
        name: sum(flat._orig_size.numel() for flat in unit._unit.flat_params)
        for name, unit in zip(
            unit_names(model, FullyShardedDataParallel),
            FullyShardedDataParallel.fsdp_modules(model),
            strict=True,
        )
    }


def units_of_the_founding_example():
    with fsdp_ref.enable_wrap(wrapper_cls=FullyShardedDataParallel):
        model = fsdp_ref.wrap(fsdp_ref.auto_wrap(small_and_large(), min_num_params=100))
    return managed(model)


def test_the_remainder_belongs_to_the_enclosing_unit():
    assert run_ranks(2, units_of_the_founding_example) == [{"": 10, "1": 200}] * 2


def managed_under_a_policy():
    model = FullyShardedDataParallel(Deep(), auto_wrap_policy=fsdp_ref.ModuleWrapPolicy({Large}))
    return managed(model), sum(parameter.numel() for parameter in Deep().parameters())


def test_excluded_is_not_unsharded():
    units, total = run_ranks(2, managed_under_a_policy)[0]

    assert units == {"": total - 600, "layers.0": 200, "layers.1.1": 200, "table.b": 200}


def experts_alone():
    def rule(module):
        return {"process_group": "self"} if isinstance(module, Large) else type(module) is B

    model = FullyShardedDataParallel(
        nn.Sequential(Large(), B(4, 4), Large(), nn.Linear(4, 4)), auto_wrap_policy=rule
    )
    return [
        (unit._unit.group.size, unit._unit.flat_params[0].numel())
        for unit in FullyShardedDataParallel.fsdp_modules(model)
    ]


def test_a_dict_changes_the_group_of_experts_only():
    for units in run_ranks(4, experts_alone):
        assert units == [(4, 5), (1, 200), (4, 5), (1, 200)]


def gradients_with_and_without_an_outer_unit():
    def gradient_of_small(outer):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        with fsdp_ref.enable_wrap(wrapper_cls=FullyShardedDataParallel):
            model = fsdp_ref.auto_wrap(model, min_num_params=10)
            model = fsdp_ref.wrap(model) if outer else model
        model(torch.full((1, 3), float(dist.get_rank() + 1))).sum().backward()
        unit = model if outer else model[1]
        small = next(unit.parameters()) if outer else unit.weight
        return small.grad.flatten().tolist()

    return gradient_of_small(outer=False), gradient_of_small(outer=True)


def test_what_no_unit_holds_is_not_averaged():
    (alone_0, shard_0), (alone_1, shard_1) = run_ranks(2, gradients_with_and_without_an_outer_unit)

    assert alone_0 == [4.0] * 9  # rank 0's own gradient: three ones and a bias
    assert alone_1 == [7.0] * 9
    assert (shard_0 + shard_1)[:9] == [5.5] * 9


def wrap_a_wrapped_model():
    torch.manual_seed(0)
    policy = fsdp_ref.ModuleWrapPolicy({nn.Linear})
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)), auto_wrap_policy=policy
    )
    x = torch.ones(2, 3)
    before = model(x)
    with provokes(FullyShardedDataParallel, errors.AlreadyWrappedError, match="'0|unit"):
        FullyShardedDataParallel(nn.Sequential(model), auto_wrap_policy=policy)
    return torch.equal(before, model(x))


def test_wrapping_a_wrapped_model_raises_and_the_first_one_still_works():
    assert run_ranks(2, wrap_a_wrapped_model) == [True, True]


def a_word_that_does_not_divide():
    model = nn.Sequential(Large(), Small())
    before = structure(model)
    with provokes(FullyShardedDataParallel, errors.GroupWordError, match="unit '1'.*found 3"):
        FullyShardedDataParallel(
            model,
            auto_wrap_policy=lambda m: {"process_group": "set3"} if type(m) is Small else True,
        )
    return structure(model) == before


def test_a_wrong_word_from_a_policy_leaves_the_model_plain():
    assert run_ranks(2, a_word_that_does_not_divide) == [True, True]


def tie_under_the_real_class():
    model = Tied()
    with provokes(FullyShardedDataParallel, errors.TiedParametersError, match="head.weight"):
        FullyShardedDataParallel(model, auto_wrap_policy=fsdp_ref.ModuleWrapPolicy({nn.Embedding}))
    return model.emb.weight is model.head.weight


def test_a_cut_tie_is_refused_before_sharding():
    assert run_ranks(2, tie_under_the_real_class) == [True, True]
