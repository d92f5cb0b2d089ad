"""Each policy by name: torch's and FairScale's signatures, and any combination of them."""

import copy
import functools
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import wrap as torch_wrap

import fsdp_ref
from fsdp_ref import FullyShardedDataParallel, asking, errors, marks, policies, wrapping
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.test_wrapping import (
    Deep,
    Large,
    Small,
    Unit,
    apply,
    apply_silently,
    sized,
    small_and_large,
    torch_units,
    trees,
    unit_names,
)


class Other(Unit):
    """Another wrapper."""


def is_large(module):
    return isinstance(module, Large)


def is_linear(module):
    return isinstance(module, nn.Linear)


def torchs(name, **arguments):
    return functools.partial(getattr(torch_wrap, name), **arguments)


def ours(name, **arguments):
    return functools.partial(getattr(policies, name), **arguments)


# By class and by rule, in torch's words


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("lambda_auto_wrap_policy", {"lambda_fn": is_large}),
        ("transformer_auto_wrap_policy", {"transformer_layer_cls": {Large}}),
        ("size_based_auto_wrap_policy", {"min_num_params": 100}),
        ("_or_policy", {"policies": [ours("lambda_auto_wrap_policy", lambda_fn=is_large)]}),
        ("_or_policy", {"policies": [torchs("lambda_auto_wrap_policy", lambda_fn=is_large)]}),
        ("_or_policy", {"policies": [fsdp_ref.ModuleWrapPolicy({Large})]}),
        ("_or_policy", {"policies": [fsdp_ref.CustomPolicy(is_large)]}),
    ],
)
def test_a_function_of_torchs_name_selects_what_torchs_selects(name, arguments):
    expected = ["layers.0", "layers.1.1", "table.b"]

    assert torch_units(Deep(), torchs(name, **arguments)) == expected
    assert apply(Deep(), torchs(name, **arguments)) == expected
    assert apply(Deep(), ours(name, **arguments)) == expected
    assert torch_units(Deep(), ours(name, **arguments)) == expected


def test_all_of_torchs_public_names_can_be_imported_from_the_same_place():
    missing = [name for name in torch_wrap.__all__ if not hasattr(wrapping, name)]

    assert missing == []
    assert wrapping._or_policy is policies._or_policy


def test_a_rule_may_return_arguments():
    policy = ours("lambda_auto_wrap_policy", lambda_fn=lambda m: is_large(m) and {"colour": "red"})
    model = small_and_large()

    assert apply(model, policy, colour="blue") == ["1"]
    assert model[1].colour == "red"


@pytest.mark.parametrize("classes", [Large, {"Large"}, [], [Large()]])
def test_the_transformer_policy_takes_module_classes_only(classes):
    policy = ours("transformer_auto_wrap_policy", transformer_layer_cls=classes)
    with provokes(
        fsdp_ref.transformer_auto_wrap_policy, errors.PolicyError, match="a set of module classes"
    ):
        apply(Deep(), policy)


def test_the_transformer_policy_refuses_containers():
    policy = ours("transformer_auto_wrap_policy", transformer_layer_cls={nn.ModuleList})
    with provokes(
        fsdp_ref.transformer_auto_wrap_policy, errors.ContainerWithoutForwardError, match="List"
    ):
        apply(Deep(), policy)


def test_a_class_or_a_rule_that_selects_nothing_is_warned_about_under_auto_wrap_too():
    never = [
        ours("lambda_auto_wrap_policy", lambda_fn=lambda module: False),
        ours("transformer_auto_wrap_policy", transformer_layer_cls={nn.Conv2d}),
        fsdp_ref.config_auto_wrap_policy,
        fsdp_ref.or_policy(fsdp_ref.ModuleWrapPolicy({nn.Conv2d}), lambda module: False),
    ]
    with fsdp_ref.enable_wrap(wrapper_cls=Unit):
        for policy in never:
            with provokes(fsdp_ref.auto_wrap, errors.PolicyMatchedNothingWarning):
                fsdp_ref.auto_wrap(small_and_large(), policy)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # by size, everything may be too small
            fsdp_ref.auto_wrap(small_and_large(), fsdp_ref.or_policy(never[0], sized(10**6)))


def test_blocks_inside_checkpoint_wrappers_are_found():
    plain = nn.Sequential(Large(), Large(), Small())
    model = nn.Sequential(checkpoint_wrapper(Large()), checkpoint_wrapper(Large()), Small())

    for policy in (fsdp_ref.ModuleWrapPolicy({Large}), is_large):
        units = apply(copy.deepcopy(model), policy)
        assert len(units) == len(apply(copy.deepcopy(plain), policy)) == 2


# FairScale's


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, ["layers.0", "layers.1.1", "table.b"]),
        ({"force_leaf_modules": {nn.Sequential}}, ["layers.0", "table.b", "attention"]),
        ({"exclude_wrap_modules": {Large}}, ["layers.1"]),
    ],
)
def test_the_default_policy_keeps_leaves_whole_and_leaves_classes_out(arguments, expected):
    policy = functools.partial(fsdp_ref.default_auto_wrap_policy, min_num_params=100, **arguments)

    assert apply(Deep(), policy) == expected


def test_the_sets_hang_on_the_functions_as_in_torch_and_fairscale():
    for policy in (fsdp_ref.default_auto_wrap_policy, fsdp_ref.size_based_auto_wrap_policy):
        assert torch_wrap.size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES == (
            policy.EXCLUDE_WRAP_MODULES
        )
        assert {nn.MultiheadAttention} == policy.FORCE_LEAF_MODULES


def tagged():
    """Two of three modules say themselves how they want to be wrapped."""
    model = nn.Sequential(Large(), Large(), Small())
    model[1].wrapper_config = {"colour": "red"}
    model[2].wrapper_config = {}
    return model


def test_a_config_selects_the_modules_that_carry_one_with_its_arguments():
    model = tagged()

    assert apply(model, fsdp_ref.config_auto_wrap_policy, colour="blue") == ["1", "2"]
    assert [model[index].colour for index in (1, 2)] == ["red", "blue"]
    assert model[1].module.wrapper_config == {"colour": "red"}


def test_every_policy_and_wrap_heed_a_config():
    model = tagged()
    assert apply(model, fsdp_ref.ModuleWrapPolicy({Small}), colour="blue") == ["0", "1", "2"]
    assert [unit.colour for unit in model] == ["blue", "red", "blue"]
    by_hand = tagged()
    with fsdp_ref.enable_wrap(wrapper_cls=Unit, colour="blue", process_group="node"):
        wrapped = [fsdp_ref.wrap(module) for module in by_hand]
        last_word = fsdp_ref.wrap(tagged()[1], colour="green")
    assert [unit.colour for unit in wrapped] == ["blue", "red", "blue"]
    assert (last_word.colour, last_word.process_group) == ("green", "node")


def test_a_config_may_name_another_wrapper():
    model = tagged()
    model[1].wrapper_config = {"wrapper_cls": Other}

    assert apply(model, fsdp_ref.config_auto_wrap_policy) == ["1", "2"]
    assert [type(module).__name__ for module in model] == ["Large", "Other", "Unit"]
    with fsdp_ref.enable_wrap(wrapper_cls=Unit):
        module = Small()
        module.wrapper_config = {"wrapper_cls": Other}
        assert type(fsdp_ref.wrap(module)) is Other


def test_a_config_that_is_no_dict_or_names_an_unknown_argument_is_refused():
    model = tagged()
    model[2].wrapper_config = {"color": "red"}
    with provokes(wrapping.apply_policy, errors.PolicyError, match="mean 'colour'"):
        apply(model, fsdp_ref.config_auto_wrap_policy)
    model[2].wrapper_config = "red"
    with provokes(wrapping.apply_policy, errors.PolicyError, match="unit '2'.*found 'red'"):
        apply(model, fsdp_ref.config_auto_wrap_policy)
    with provokes(marks.config_of, errors.PolicyError, match="a dict of arguments"):
        marks.config_of(model[2], "here")
    with (
        fsdp_ref.enable_wrap(wrapper_cls=Unit),
        provokes(fsdp_ref.wrap, errors.PolicyError, match="a dict of arguments"),
    ):
        fsdp_ref.wrap(model[2])
    assert unit_names(model) == []


# Everything


def train_attention():
    def train(model):
        x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return model.state_dict()

    class Attentive(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.attention(x, x, x)[0])

    torch.manual_seed(0)
    plain = Attentive()
    sharded = FullyShardedDataParallel(
        copy.deepcopy(plain), auto_wrap_policy=fsdp_ref.always_wrap_policy
    )
    assert unit_names(sharded, FullyShardedDataParallel) == ["", "attention", "head"]
    expected, found = train(plain), train(sharded)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: name + text)


def test_attention_is_left_whole_inside_a_policy_that_selects_everything_and_trains():
    run_ranks(2, train_attention)


# Another wrapper for one call


def test_a_wrapper_named_in_the_call_is_used_without_a_context():
    model = fsdp_ref.auto_wrap(small_and_large(), min_num_params=100, wrapper_cls=Unit)
    assert unit_names(model) == ["1"]
    unit = fsdp_ref.wrap(Small(), wrapper_cls=Unit, colour="red")
    assert (type(unit), unit.colour) == (Unit, "red")


def test_a_wrapper_named_in_the_call_wins_over_the_contexts():
    with fsdp_ref.enable_wrap(wrapper_cls=Unit, colour="red"):
        model = fsdp_ref.auto_wrap(small_and_large(), is_large, wrapper_cls=Other)
        unit = fsdp_ref.wrap(Small(), wrapper_cls=Other)
    assert [type(module).__name__ for module in (*model, unit)] == ["Small", "Other", "Other"]
    assert model[1].colour == unit.colour == "red"


def test_a_wrapper_that_does_not_take_the_contexts_arguments_is_refused():
    def bare(module):
        return Unit(module)

    with fsdp_ref.enable_wrap(wrapper_cls=Unit, colour="red"):
        with provokes(fsdp_ref.wrap, errors.WrapContextError, match="takes none"):
            fsdp_ref.wrap(Small(), wrapper_cls=bare)
        with provokes(fsdp_ref.auto_wrap, errors.WrapContextError, match="takes none"):
            fsdp_ref.auto_wrap(small_and_large(), wrapper_cls=bare)


# Combined


PARTS = {
    "class": fsdp_ref.ModuleWrapPolicy({nn.Sequential}),
    "rule": lambda module: isinstance(module, nn.Sequential),
    "custom": fsdp_ref.CustomPolicy(lambda module: isinstance(module, nn.Sequential)),
    "transformer": ours("transformer_auto_wrap_policy", transformer_layer_cls={nn.Sequential}),
    "torch's class": torch_wrap.ModuleWrapPolicy({nn.Sequential}),
    "torch's custom": torch_wrap.CustomPolicy(lambda module: isinstance(module, nn.Sequential)),
    "torch's function": torchs(
        "transformer_auto_wrap_policy", transformer_layer_cls={nn.Sequential}
    ),
    "combination": fsdp_ref.or_policy(fsdp_ref.ModuleWrapPolicy({nn.Sequential})),
}


@pytest.mark.parametrize("part", PARTS)
def test_policies_of_all_forms_can_be_combined(part):
    combined = fsdp_ref.or_policy(PARTS[part], is_large)
    in_torchs_words = ours("_or_policy", policies=[PARTS[part], is_large])

    expected = ["layers.0", "layers.1", "layers.1.1", "table.b"]
    assert apply(Deep(), combined) == expected
    assert apply(Deep(), in_torchs_words) == expected


def fairscales(module, recurse, unwrapped_params, module_is_root):
    return unwrapped_params >= 100


def test_fairscales_functions_can_be_combined_too():
    assert apply(Deep(), fsdp_ref.or_policy(fairscales, PARTS["class"])) == [
        *["layers.0", "layers.1", "layers.1.1", "table.b", "attention"]
    ]


@settings(max_examples=60, deadline=None)
@given(trees(), st.integers(0, 60), st.integers(1, 6))
def test_sizes_are_counted_without_what_the_other_policies_took_as_in_torch(tree, numel, width):
    def rule(module):
        return is_linear(module) and module.out_features == width

    def parts(library):
        return [
            functools.partial(library.lambda_auto_wrap_policy, lambda_fn=rule),
            functools.partial(library.size_based_auto_wrap_policy, min_num_params=numel),
        ]

    theirs = torch_units(copy.deepcopy(tree), torchs("_or_policy", policies=parts(torch_wrap)))
    assert apply_silently(copy.deepcopy(tree), fsdp_ref.or_policy(*parts(policies))) == theirs
    assert apply_silently(copy.deepcopy(tree), fsdp_ref.or_policy(rule, sized(numel))) == theirs


def test_arguments_add_up_and_the_earlier_policy_wins():
    model = small_and_large()
    policy = fsdp_ref.or_policy(
        is_large,
        lambda module: is_large(module) and {"colour": "red"},
        torch_wrap.CustomPolicy(
            lambda module: is_large(module) and {"colour": "blue", "process_group": "self"}
        ),
        fsdp_ref.ModuleWrapPolicy({Small}),
    )

    assert apply(model, policy, process_group="node", colour="grey") == ["0", "1"]
    assert [(unit.colour, unit.process_group) for unit in model] == [
        *[("grey", "node"), ("red", "self")]
    ]


def test_an_answer_that_is_none_is_refused_inside_a_combination_as_well():
    for other in (is_large, lambda module: False, lambda module: {"colour": "red"}):
        policy = fsdp_ref.or_policy(other, lambda module: None)
        with provokes(wrapping.apply_policy, errors.PolicyError, match="found None"):
            apply(small_and_large(), policy)
    with provokes(asking.one_form, errors.PolicyError, match="found 3"):
        apply(small_and_large(), fsdp_ref.or_policy(is_large, 3))


def test_each_module_is_asked_about_once():
    asked = []

    def rule(module):
        asked.append(module)
        return False

    shared = Large()
    model = nn.Sequential(shared, nn.Sequential(shared, Small()))
    for policy in (rule, fsdp_ref.or_policy(rule, is_large)):
        asked.clear()
        apply_silently(copy.deepcopy(model), policy)
        assert [type(module).__name__ for module in asked] == [
            *["Large", "Small", "Sequential", "Sequential"]
        ]
    asked.clear()
    apply_silently(
        copy.deepcopy(model), fsdp_ref.or_policy(torch_wrap.CustomPolicy(rule), is_large)
    )
    assert len(asked) == 4


def test_a_combination_names_its_parts():
    policy = fsdp_ref.or_policy(fsdp_ref.ModuleWrapPolicy({Large}), sized(3), is_large)

    assert repr(policy) == "ModuleWrapPolicy(Large) or size_based_auto_wrap_policy or is_large"
