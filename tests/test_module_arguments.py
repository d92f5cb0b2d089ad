"""Arguments for single modules: who may say them, who wins, and what each of them does.

The tests whose names begin with a row, such as `w9`, are about what Composer documents and its
code does not do.
"""

import copy
import inspect
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import wrap as torch_wrap

import fsdp_ref
from fsdp_ref import (
    CustomPolicy,
    ModuleWrapPolicy,
    composer_auto_wrap_policy,
    errors,
    fully_sharded,
    marks,
    or_policy,
    plan,
    recomputing,
    timeline,
    unit_arguments,
    wrapping,
)
from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref.inspection import strategy_of
from fsdp_ref.options import Offload, Prefetch
from fsdp_ref.precision import Precision, as_precision
from tests.parity.training import full_gradients
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.test_wrapping import Large, Small, Unit, apply, unit_names
from tests.toy import (
    Layer,
    Stack,
    assert_equal_gradients,
    assert_equal_weights,
    mean_square,
    my_part,
    seeded,
    whole_batch,
)

BF16, FP32 = torch.bfloat16, torch.float32


def select(*modules, arguments=True):
    """A rule that selects these modules, with these arguments."""
    return lambda module: arguments if any(module is one for one in modules) else False


def units_of(model):
    return {name: part._unit for name, part in model._named_units()}


# ---------------------------------------------------------------- who may say them


def by_policy(model, arguments):
    return CustomPolicy(select(model.layers[1], arguments=arguments))


def by_torchs_policy(model, arguments):
    return torch_wrap.CustomPolicy(select(model.layers[1], arguments=arguments))


def by_wrapper_config(model, arguments):
    model.layers[1].wrapper_config = arguments
    return fsdp_ref.config_auto_wrap_policy


def by_mark(model, arguments):
    model.layers[1]._fsdp_wrap = arguments
    return composer_auto_wrap_policy


def by_mark_of_the_class(model, arguments):
    class Marked(Layer):
        _fsdp_wrap = arguments

    model.layers[1].__class__ = Marked
    return composer_auto_wrap_policy


def by_the_root(model, arguments):
    model.fsdp_wrap_fn = select(model.layers[1], arguments=arguments)
    return composer_auto_wrap_policy


def by_mark_under_another_policy(model, arguments):
    model.layers[1]._fsdp_wrap = arguments
    return select(model.layers[1])


def by_the_root_under_another_policy(model, arguments):
    by_the_root(model, arguments)
    return select(model.layers[1])


VOICES = [
    *(by_policy, by_torchs_policy, by_wrapper_config, by_mark, by_mark_of_the_class),
    *(by_the_root, by_mark_under_another_policy, by_the_root_under_another_policy),
]

# Argument, value, and what the unit makes of it.
EFFECTS = [
    ("process_group", "self", lambda unit: unit.group.ranks == (dist.get_rank(),)),
    ("process_group", [[0], [1]], lambda unit: unit.group.ranks == (dist.get_rank(),)),
    ("sharding_strategy", "NO_SHARD", lambda unit: strategy_of(unit.placement) == "NO_SHARD"),
    (
        "sharding_strategy",
        ShardingStrategy.SHARD_GRAD_OP,
        lambda unit: not unit.placement.reshard_after_forward,
    ),
    ("cpu_offload", True, lambda unit: unit.options.offload == Offload(True)),
    ("cpu_offload", CPUOffload(True), lambda unit: unit.options.offload == Offload(True)),
    (
        "cpu_offload",
        {"offload_gradients": True},
        lambda unit: unit.options.offload == Offload(False, True),
    ),
    ("backward_prefetch", None, lambda unit: unit.options.backward_prefetch is Prefetch.NONE),
    ("backward_prefetch", "post", lambda u: u.options.backward_prefetch is Prefetch.BACKWARD_POST),
    (
        "backward_prefetch",
        BackwardPrefetch.BACKWARD_POST,
        lambda unit: unit.options.backward_prefetch is Prefetch.BACKWARD_POST,
    ),
    ("forward_prefetch", True, lambda unit: unit.options.forward_prefetch),
    ("use_orig_params", True, lambda unit: unit.options.use_orig_params),
    ("gradient_divisor", 8, lambda unit: unit.options.gradient_divisor == 8),
    ("mixed_precision", "PURE", lambda unit: unit.options.precision.reduce_dtype is BF16),
    ("mixed_precision", torch.float16, lambda u: u.options.precision.param_dtype is torch.float16),
    ("mixed_precision", {"param_dtype": BF16}, lambda u: u.options.precision == Precision(BF16)),
    (
        "mixed_precision",
        MixedPrecision(reduce_dtype=BF16),
        lambda unit: unit.options.precision.reduce_dtype is BF16,
    ),
    ("limit_all_gathers", False, lambda unit: True),
    ("sync_module_states", True, lambda unit: True),
    ("param_init_fn", nn.init.zeros_, lambda unit: True),
    ("device_id", torch.device("cpu"), lambda unit: True),
]


def each_voice():
    said = 0
    for voice, (name, value, has_effect) in itertools.product(VOICES, EFFECTS):
        model = Stack()
        model = FSDP(model, auto_wrap_policy=voice(model, {name: value}))
        units = units_of(model)
        assert list(units) == ["", "layers.1"], (voice, name)
        assert has_effect(units["layers.1"]), (voice, name)
        others = [effect for other, v, effect in EFFECTS if (other, v) == (name, value)]
        assert name.startswith(("limit", "sync", "param", "device")) or not others[0](units[""])
        said += 1
    return said


def test_every_voice_may_say_every_argument_in_every_spelling_and_the_root_keeps_its_own():
    assert run_ranks(2, each_voice, timeout=120) == [len(VOICES) * len(EFFECTS)] * 2


# ---------------------------------------------------------------- who wins


def marked(module, order):
    """Say another colour by each voice; the name of the voice is the colour."""
    model = nn.Sequential(module)
    said = {name: {"colour": name} for name in order}
    if "root" in order:
        model.fsdp_wrap_fn = select(module, arguments=said["root"])
    if "_fsdp_wrap" in order:
        module._fsdp_wrap = said["_fsdp_wrap"]
    if "wrapper_config" in order:
        module.wrapper_config = said["wrapper_config"]
    policy = select(module, arguments=said.get("policy", True))
    defaults = said.get("constructor", {})
    return model, policy, defaults


WEAKEST_FIRST = ("nobody", "constructor", "policy", "root", "_fsdp_wrap", "wrapper_config")


@pytest.mark.parametrize(
    "voices",
    [v for n in range(1, 6) for v in itertools.combinations(WEAKEST_FIRST[1:], n)],
    ids=" ".join,
)
def test_the_voice_nearest_to_the_module_wins(voices):
    model, policy, defaults = marked(Large(), voices)
    assert apply(model, policy, **defaults) == ["0"]
    assert model[0].colour == voices[-1]
    if len(voices) > 1:  # the same for `or_policy`, and for auto_wrap with a context
        model, policy, defaults = marked(Large(), voices)
        with fsdp_ref.enable_wrap(wrapper_cls=Unit, **defaults):
            fsdp_ref.auto_wrap(model, or_policy(ModuleWrapPolicy({Large}), policy))
        assert model[0].colour == voices[-1]


def test_the_arguments_of_a_wrap_call_win_over_all_and_its_marks_over_the_context():
    for name, expected in (("_fsdp_wrap", "_fsdp_wrap"), ("wrapper_config", "wrapper_config")):
        module = Large()
        setattr(module, name, {"colour": name})
        with fsdp_ref.enable_wrap(wrapper_cls=Unit, colour="context"):
            assert fsdp_ref.wrap(copy.deepcopy(module)).colour == expected
            assert fsdp_ref.wrap(module, colour="call").colour == "call"


def test_arguments_that_do_not_contradict_add_up():
    module = Large()
    model = nn.Sequential(module)
    module._fsdp_wrap = {"colour": "red"}
    apply(model, select(module, arguments={"process_group": "self", "colour": "blue"}))
    assert (model[0].colour, model[0].process_group) == ("red", "self")


def mesh_and_group():
    mesh = init_device_mesh("cpu", (2,))
    model = Stack()
    alone = {"process_group": "self"}
    model = FSDP(model, auto_wrap_policy=select(model.layers[1], arguments=alone), device_mesh=mesh)
    assert units_of(model)["layers.1"].group.ranks == (dist.get_rank(),)
    assert units_of(model)[""].group.ranks == (0, 1)
    other = Stack()
    other = FSDP(
        other,
        "self",
        auto_wrap_policy=select(other.layers[1], arguments={"device_mesh": mesh}),
    )
    assert units_of(other)["layers.1"].group.ranks == (0, 1)
    assert units_of(other)[""].group.ranks == (dist.get_rank(),)
    both = {"device_mesh": mesh, "process_group": "self"}
    model = Stack()
    with provokes(FSDP, errors.StrategyError, match=r"unit 'layers\.1'.*found both"):
        FSDP(model, auto_wrap_policy=select(model.layers[1], arguments=both))


def test_a_group_of_one_unit_replaces_the_mesh_of_all_and_the_other_way_around():
    run_ranks(2, mesh_and_group)


# ---------------------------------------------------------------- who becomes a unit


def three():
    return nn.Sequential(Large(), Small(), Large())


def test_a_module_that_says_no_is_left_out_by_every_policy():
    for policy in (
        ModuleWrapPolicy({Large}),
        CustomPolicy(lambda module: {"colour": "red"} if type(module) is Large else False),
        torch_wrap.ModuleWrapPolicy({Large}),
        composer_auto_wrap_policy,
        or_policy(composer_auto_wrap_policy, ModuleWrapPolicy({Large})),
        lambda module, recurse, nonwrapped_numel: recurse or type(module) is Large,
    ):
        model = three()
        model.fsdp_wrap_fn = lambda module: type(module) is Large
        model[0]._fsdp_wrap = False
        assert apply(model, policy) == ["2"], policy
    model = three()
    model[0]._fsdp_wrap = False
    with fsdp_ref.enable_wrap(wrapper_cls=Unit):
        assert type(fsdp_ref.wrap(model[0])) is Large
        assert type(fsdp_ref.wrap(model[2])) is Unit


def test_what_a_module_leaves_out_counts_for_the_module_around_it():
    def tree():
        return nn.Sequential(nn.Sequential(Large(), Small()), Large())

    def policy(module, recurse, nonwrapped_numel):
        return nonwrapped_numel >= 200

    assert apply(tree(), policy) == ["0.0", "1"]
    model = tree()
    model[0][0]._fsdp_wrap = False
    assert apply(model, policy) == ["0", "1"]


def test_under_composers_policy_the_mark_decides_and_then_the_root():
    model = three()
    model.fsdp_wrap_fn = lambda module: {} if type(module) is Small else False
    model[0]._fsdp_wrap = True
    assert apply(model, composer_auto_wrap_policy) == ["0", "1"]
    model = three()
    model[2]._fsdp_wrap = {}
    assert apply(model, composer_auto_wrap_policy) == ["2"]


def test_the_root_is_asked_about_the_modules_that_have_no_mark():
    asked, model = [], three()

    def fsdp_wrap_fn(module):
        asked.append(type(module))
        return False

    model.fsdp_wrap_fn = fsdp_wrap_fn
    model[0]._fsdp_wrap = False
    with pytest.warns(errors.PolicyMatchedNothingWarning, match="composer_auto_wrap_policy"):
        apply(model, composer_auto_wrap_policy)
    assert asked == [Small, Large, nn.Sequential]


def test_another_policy_takes_arguments_from_the_root_but_selects_by_itself():
    model = three()
    model.fsdp_wrap_fn = lambda module: {"colour": "red"} if type(module) is Small else False
    model[1]._fsdp_wrap = True
    assert apply(model, ModuleWrapPolicy({Large})) == ["0", "2"]
    assert apply(three(), ModuleWrapPolicy({Large, Small})) == ["0", "1", "2"]
    model = three()
    model.fsdp_wrap_fn = lambda module: {"colour": "red"} if type(module) is Small else False
    apply(model, ModuleWrapPolicy({Large, Small}))
    assert [unit.colour for unit in model] == ["plain", "red", "plain"]


def test_composers_policy_can_be_combined_and_called():
    model = three()
    model[1]._fsdp_wrap = {"colour": "red"}
    policy = or_policy(composer_auto_wrap_policy, ModuleWrapPolicy({Large}))
    assert apply(model, policy) == ["0", "1", "2"]
    module = Small()
    assert composer_auto_wrap_policy(module) is False
    assert composer_auto_wrap_policy(module, True, 0) is True
    module._fsdp_wrap = "yes"
    with provokes(composer_auto_wrap_policy, errors.PolicyError, match=r"Small.*'yes'"):
        composer_auto_wrap_policy(module)


def test_a_wrapper_around_a_marked_module_is_not_marked_itself():
    for attribute, policy in (
        ("_fsdp_wrap", composer_auto_wrap_policy),
        ("wrapper_config", fsdp_ref.config_auto_wrap_policy),
    ):
        inner = Large()
        setattr(inner, attribute, {"colour": "red"})
        model = nn.Sequential(checkpoint_wrapper(inner))
        assert apply(model, policy) == ["0._checkpoint_wrapped_module"]


def marks_without_a_policy():
    model = seeded()
    model.layers[0]._fsdp_wrap = model.layers[1]._activation_checkpointing = True
    model = FSDP(model)
    assert list(units_of(model)) == [""]
    assert "forward" not in vars(model.module.layers[1])


def test_without_a_policy_nobody_reads_marks():
    run_ranks(1, marks_without_a_policy)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("voice", "called"),
    [
        (by_policy, "auto_wrap_policy"),
        (by_wrapper_config, "wrapper_config"),
        (by_mark, "_fsdp_wrap"),
        (by_the_root, "fsdp_wrap_fn"),
    ],
)
@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("sharding_stategy", "sharding_strategy"),  # misspelt on purpose
        ("gradient_diviser", "gradient_divisor"),  # misspelt on purpose
    ],
)
def test_an_unknown_argument_names_the_module_the_voice_and_the_nearest_one(
    voice, called, wrong, nearest
):
    model = Stack()
    policy = voice(model, {wrong: "FULL_SHARD"})
    pattern = rf"unit 'layers\.1' \(Layer\), {called}: .*found '{wrong}'.*Did you mean '{nearest}'"
    with provokes(wrapping.apply_policy, errors.PolicyError, match=pattern):
        wrapping.apply_policy(model, policy, FSDP, {})
    with provokes(plan.plan_units, errors.PolicyError, match=pattern):
        plan.plan_units(model, policy, FSDP, {})
    assert FSDP.fsdp_modules(model) == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("auto_wrap_policy", "looks inside"),
        ("module", "that the unit wraps"),
        ("bucket_cap_mb", "outermost"),
    ],
)
def test_arguments_that_cannot_differ_are_refused_by_name(name, why):
    with provokes(unit_arguments.refuse_shared, errors.PolicyError, match=rf"'{name}'.*{why}"):
        unit_arguments.refuse_shared({name: None}, "here")
    model = three()
    policy = select(model[0], arguments={name: None})
    with provokes(wrapping.apply_policy, errors.PolicyError, match="may differ from unit to unit"):
        apply(model, policy)
    with provokes(unit_arguments.own_overrides, errors.PolicyError, match="here, me: "):
        unit_arguments.own_overrides([("me", {name: None})], Unit, "here")


@pytest.mark.parametrize("wrong", ["yes", 1, None, [], 0])
def test_a_mark_or_an_answer_of_the_root_that_is_none_is_refused_by_name(wrong):
    model = three()
    model.fsdp_wrap_fn = lambda module: wrong
    with provokes(wrapping.apply_policy, errors.PolicyError, match=r"unit '0' .*fsdp_wrap_fn"):
        apply(model, composer_auto_wrap_policy)
    with provokes(plan.plan_units, errors.PolicyError, match=r"unit '0' .*fsdp_wrap_fn"):
        plan.plan_units(model, ModuleWrapPolicy({Large}), Unit, {})
    if wrong is not None:  # None is no mark
        model = three()
        model[2]._fsdp_wrap = wrong
        for policy in (composer_auto_wrap_policy, ModuleWrapPolicy({Large})):
            with provokes(wrapping.apply_policy, errors.PolicyError, match=r"'2'.*_fsdp_wrap"):
                apply(model, policy)
        with provokes(marks.wish_of, errors.PolicyError, match="here: .*_fsdp_wrap"):
            marks.wish_of(model[2], "here")
        with provokes(unit_arguments.marked_arguments, errors.PolicyError, match="_fsdp_wrap"):
            unit_arguments.marked_arguments(model[2], "here")
        with (
            fsdp_ref.enable_wrap(wrapper_cls=Unit),
            provokes(fsdp_ref.wrap, errors.PolicyError, match=r"wrap \(Large\): .*_fsdp_wrap"),
        ):
            fsdp_ref.wrap(model[2])
    assert unit_names(model) == []


@pytest.mark.parametrize("name", ["fsdp_wrap_fn", "activation_checkpointing_fn"])
def test_what_the_root_says_has_to_be_a_function(name):
    model = three()
    setattr(model, name, True)
    with provokes(wrapping.apply_policy, errors.PolicyError, match=rf"Sequential\.{name}"):
        apply(model, ModuleWrapPolicy({Large}))
    with provokes(marks.function_of, errors.PolicyError, match="a method that takes a module"):
        marks.function_of(model, name)
    says = {
        "fsdp_wrap_fn": marks.root_says_wrap,
        "activation_checkpointing_fn": marks.root_says_recompute,
    }[name]
    with provokes(says, errors.PolicyError, match="To say something about one module"):
        says(model)
    assert unit_names(model) == []


def refused_by_value():
    for name, value, error in (
        ("mixed_precision", "FUL", errors.PrecisionError),  # misspelt on purpose
        ("cpu_offload", "yes", errors.OptionError),
        ("backward_prefetch", "sometimes", errors.OptionError),
        ("gradient_divisor", 0, errors.OptionError),
        ("sharding_strategy", "FULL", errors.StrategyError),
        ("process_group", [0, 0], errors.GroupWordError),
    ):
        model = Stack()
        for policy in (by_policy(model, {name: value}), by_mark(model, {name: value})):
            with provokes(FSDP, error, match=r"unit 'layers\.1'"):
                FSDP(model, auto_wrap_policy=policy)
    assert FSDP.fsdp_modules(model) == []
    with provokes(unit_arguments.between_other_dtypes, errors.PrecisionError, match="here"):
        given = {"mixed_precision": "FUL"}  # misspelt on purpose
        unit_arguments.between_other_dtypes(given, {}, "here")


def test_a_wrong_value_names_the_module_before_anything_is_wrapped():
    run_ranks(1, refused_by_value)


# ---------------------------------------------------------------- rows of the table of facts


class Recorder(nn.Module):
    """A linear layer that remembers in which dtypes it computed."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("shift", torch.zeros(5))

    def forward(self, x):
        self.seen = (x.dtype, self.linear.weight.dtype, self.shift.dtype)
        return torch.tanh(self.linear(x)) + self.shift


def recorders(**arguments):
    model = nn.Sequential(Recorder(), Recorder(), Recorder())
    arguments = {"auto_wrap_policy": composer_auto_wrap_policy, **arguments}
    model[0]._fsdp_wrap = model[2]._fsdp_wrap = True
    return model, arguments


def composers_example():
    """The dict of Composer's page: it raises there."""
    model, arguments = recorders()
    model[1]._fsdp_wrap = {
        "process_group": "node",
        "sharding_strategy": "FULL_SHARD",
        "mixed_precision": "FULL",
        "cpu_offload": False,
        "backward_prefetch": "BACKWARD_PRE",
    }
    model = FSDP(model, mixed_precision="PURE", **arguments)
    output = model(torch.randn(4, 5))
    output.sum().backward()
    assert output.dtype is BF16
    assert model[0].seen == model[2].seen == (BF16, BF16, BF16)
    assert model[1].seen == (FP32, FP32, FP32)
    gradient = {n: u.flat_params[0].gradient_dtype for n, u in units_of(model).items() if n}
    assert gradient == {"0": BF16, "1": FP32, "2": BF16}
    assert units_of(model)["1"].group.ranks == (0, 1)  # one node


def full_forces_float32():
    """Also where the weights are low, and for the whole model; leaving it out forces nothing."""
    for low in (BF16, torch.float64):
        model, arguments = recorders()
        model[1]._fsdp_wrap = {"mixed_precision": "full"}
        model = FSDP(model.to(low), **arguments)
        assert model(torch.randn(4, 5, dtype=low)).dtype is low
        assert [part.seen[1] for part in model] == [low, FP32, low]
        assert {p.dtype for p in model.parameters()} == {low}  # the shard keeps its own
        model, arguments = recorders()
        model = FSDP(model.to(low), mixed_precision="FULL", **arguments)
        assert model(torch.randn(4, 5, dtype=low)).dtype is FP32
        assert [part.seen for part in model] == [(FP32, FP32, FP32)] * 3
        model, arguments = recorders()
        model = FSDP(model.to(low), **arguments)
        model(torch.randn(4, 5, dtype=low))
        assert [part.seen for part in model] == [(low, low, low)] * 3


def a_low_unit_among_high_ones():
    for word in ("PURE", "default", BF16, torch.float16, "fp16"):
        model, arguments = recorders()
        model[1]._fsdp_wrap = {"mixed_precision": word}
        model = FSDP(model, **arguments)
        output = model(torch.randn(4, 5))
        output.sum().backward()
        low = as_precision(word, "here").param_dtype
        assert [part.seen[:2] for part in model] == [(FP32, FP32), (low, low), (FP32, FP32)]
        assert output.dtype is FP32


def test_w9_w11_a_word_for_the_precision_of_one_module_works_and_full_means_float32():
    for check in (composers_example, full_forces_float32, a_low_unit_among_high_ones):
        run_ranks(2, check)


def test_w9_a_word_that_says_what_all_units_have_changes_nothing():
    same = unit_arguments.between_other_dtypes
    for word, common in (("PURE", "pure"), ("bf16", BF16), ("full", "FULL")):
        overrides = {"mixed_precision": word}
        assert same(overrides, {"mixed_precision": common}, "here") is overrides
    for no_word in ({}, {"mixed_precision": None}, {"mixed_precision": {"param_dtype": BF16}},
                    {"mixed_precision": MixedPrecision(param_dtype=BF16)}):  # fmt: skip
        assert same(no_word, {"mixed_precision": "full"}, "here") is no_word
    cast = same({"mixed_precision": "pure"}, {}, "here")["mixed_precision"]
    assert (cast.cast_forward_inputs, cast.cast_forward_outputs) == (True, True)


def offload_of_one_module():
    for value in (True, CPUOffload(offload_params=True), {"offload_params": True}):
        model = seeded()
        model = FSDP(model, auto_wrap_policy=by_mark(model, {"cpu_offload": value}))
        assert units_of(model)["layers.1"].options.offload.offload_params
        assert not units_of(model)[""].options.offload.offload_params
        mean_square(model(my_part(whole_batch()))).backward()
        plain = seeded()
        mean_square(plain(whole_batch())).backward()
        assert_equal_gradients(model, plain)
    model = seeded()
    off = by_mark(model, {"cpu_offload": False})
    model = FSDP(model, auto_wrap_policy=off, cpu_offload=True)
    assert not units_of(model)["layers.1"].options.offload.offload_params
    assert units_of(model)[""].options.offload.offload_params


def test_w10_offload_of_one_module_is_a_bool_an_object_or_a_dict():
    run_ranks(2, offload_of_one_module)


def every_strategy_for_one_module():
    node = {"process_group": ("set2", "mod2")}
    for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        for spelt in (name, name.lower(), ShardingStrategy[name]):
            model = seeded()
            said = {"sharding_strategy": spelt, **(node if "HYBRID" in name else {})}
            model = FSDP(model, auto_wrap_policy=by_mark(model, said))
            assert strategy_of(units_of(model)["layers.1"].placement) == name
            assert strategy_of(units_of(model)[""].placement) == "FULL_SHARD"
            mean_square(model(my_part(whole_batch()))).backward()
            plain = seeded()
            mean_square(plain(whole_batch())).backward()
            assert_equal_gradients(model, plain)


def hybrid_without_a_group():
    """One node and across nodes, from the number of ranks per node; torch's class wants groups."""
    model = Stack()
    model = FSDP(model, auto_wrap_policy=by_mark(model, {"sharding_strategy": "HYBRID_SHARD"}))
    return [group.ranks for group in units_of(model)["layers.1"].placement.groups]


def test_w12_five_strategies_for_one_module_and_hybrid_without_naming_groups():
    run_ranks(4, every_strategy_for_one_module)
    across = run_ranks(4, hybrid_without_a_group, env={"LOCAL_WORLD_SIZE": "2"})
    assert across == [[(0, 1), (0, 2)], [(0, 1), (1, 3)], [(2, 3), (0, 2)], [(2, 3), (1, 3)]]


def test_w12_defaults_are_those_that_are_documented():
    defaults = {p.name: p.default for p in inspect.signature(FSDP).parameters.values()}
    assert defaults["limit_all_gathers"] is True
    assert defaults["forward_prefetch"] is False
    assert defaults["process_group"] is defaults["sharding_strategy"] is None


def gathers(model):
    with timeline() as seen:
        mean_square(model(my_part(whole_batch()))).backward()
    return seen.lines("all-gather")


def recomputed_layers(**more):
    model = seeded()
    for layer in model.layers:
        layer._activation_checkpointing = True
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Layer}), **more)


def gathers_with_and_without():
    plain = FSDP(seeded(), auto_wrap_policy=ModuleWrapPolicy({Layer}))
    expected = gathers(plain)
    assert len(expected) == 2 * 3 + 1
    model = recomputed_layers()
    assert gathers(model) == expected
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    # Units inside of what is recomputed are called again, and gathered for it.
    plain = FSDP(seeded(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    model = seeded()
    for layer in model.layers:
        layer._activation_checkpointing = True
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    return len(gathers(plain)), len(gathers(model))


def test_w13_recomputing_costs_no_further_gather():
    assert run_ranks(2, gathers_with_and_without) == [(9, 12)] * 2


def a_layer_on_its_own():
    """Silent elsewhere: replicas drift, ranks clip by different norms."""
    model = seeded()
    model = FSDP(model, auto_wrap_policy=by_mark(model, {"process_group": "self"}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mean_square(model(my_part(whole_batch()))).backward()
    norm = model.clip_grad_norm_(1e-3).item()
    optimizer.step()
    report = fsdp_ref.agreement.check_replicas(model)
    return norm, {found.name for found in report.drifted}


def test_w14_a_layer_that_nobody_synchronises_is_clipped_alike_and_seen_to_drift():
    results = run_ranks(4, a_layer_on_its_own)
    assert all(result == results[0] for result in results)
    assert results[0][1] == {
        "layers.1.scale", "layers.1.linear.weight", "layers.1.linear.bias"
    }  # fmt: skip


# ---------------------------------------------------------------- mixtures train like the whole


MIXTURE = {
    "layers.0": {"use_orig_params": True, "sharding_strategy": "SHARD_GRAD_OP"},
    "layers.0.linear": {"cpu_offload": True, "backward_prefetch": None},
    "layers.1": {"sharding_strategy": "HYBRID_SHARD", "process_group": ("set2", "mod2")},
    "layers.1.linear": {"backward_prefetch": "post", "forward_prefetch": True},
    "layers.2": {"sharding_strategy": "NO_SHARD", "gradient_divisor": 4},
    "layers.2.linear": {"cpu_offload": {"offload_gradients": True}, "use_orig_params": True},
    "head": {"process_group": ("set4", "mod4"), "sharding_strategy": "HYBRID_SHARD"},
}


def train_a_mixture(**of_all):
    plain, model = seeded(), seeded()
    names = {module: name for name, module in model.named_modules()}
    model = FSDP(model, auto_wrap_policy=lambda m: MIXTURE.get(names.get(m), False), **of_all)
    assert set(units_of(model)) == {"", *MIXTURE}
    for one, batch in ((plain, whole_batch()), (model, my_part(whole_batch()))):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            mean_square(one(batch)).backward()
            optimizer.step()
    assert_equal_gradients(model, plain)
    assert_equal_weights(model, plain)
    assert fsdp_ref.agreement.check_replicas(model).ok


def train_mixtures():
    train_a_mixture()
    train_a_mixture(use_orig_params=True)
    train_a_mixture(cpu_offload=True, backward_prefetch=None)


def test_a_model_in_which_every_unit_has_other_arguments_trains_like_the_plain_one():
    run_ranks(4, train_mixtures, timeout=120)


# ---------------------------------------------------------------- nothing said, nothing changed


def trained(policy):
    model = seeded(lambda: Stack()).float()
    model = FSDP(model, auto_wrap_policy=policy(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    events = []
    for _ in range(2):
        with timeline() as seen:
            optimizer.zero_grad()
            mean_square(model(my_part(whole_batch()).float())).backward()
            model.clip_grad_norm_(0.1)
            optimizer.step()
        events += seen.events  # equal whenever they happened
    return events, [p.detach().clone() for p in model.parameters()]


def defaults_spelt_out():
    parameters = inspect.signature(FSDP).parameters.values()
    spelt = {p.name: p.default for p in parameters if p.name in fully_sharded.INHERITED}
    assert len(spelt) == len(fully_sharded.INHERITED)
    return {
        **spelt,
        "sharding_strategy": "FULL_SHARD",
        "cpu_offload": False,
        "mixed_precision": False,
        "process_group": list(range(dist.get_world_size())),
        "gradient_divisor": dist.get_world_size(),
    }


def each_way_to_say_nothing():
    spelt = defaults_spelt_out()

    def marked_layers(value):
        def policy(model):
            for layer in model.layers:
                layer._fsdp_wrap = value
            return composer_auto_wrap_policy

        return policy

    def by_root(value):
        def policy(model):
            model.fsdp_wrap_fn = lambda module: value if isinstance(module, Layer) else False
            return composer_auto_wrap_policy

        return policy

    def config(value):
        def policy(model):
            for layer in model.layers:
                layer.wrapper_config = value
            return fsdp_ref.config_auto_wrap_policy

        return policy

    def returned(value):
        return lambda model: CustomPolicy(lambda m: value if isinstance(m, Layer) else False)

    events, weights = trained(lambda model: ModuleWrapPolicy({Layer}))
    assert len(events) > 20
    ways = [say(value) for value in (True, {}, spelt) for say in (returned, marked_layers, by_root)]
    ways += [config({}), config(spelt), lambda model: lambda module: isinstance(module, Layer)]
    ways += [returned({"mixed_precision": "FULL"})]  # the model is float32 already
    for way in ways:
        other_events, other_weights = trained(way)
        assert other_events == events
        for mine, other in zip(weights, other_weights, strict=True):
            assert torch.equal(mine, other)
    return len(ways)


def test_true_an_empty_dict_and_the_defaults_spelt_out_change_neither_timeline_nor_weights():
    assert run_ranks(2, each_way_to_say_nothing, timeout=120) == [13, 13]


# ---------------------------------------------------------------- recomputing


class Counting(Layer):
    """Counts its forwards, and draws random numbers in them."""

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return nn.functional.dropout(super().forward(x), 0.5)


def counting():
    model = seeded()
    for index in range(3):
        model.layers[index].__class__ = Counting
    return model


def step(model):
    torch.manual_seed(3)
    mean_square(model(my_part(whole_batch()))).backward()
    return [p.grad for p in model.parameters()]


def calls(model):
    return [layer.calls for layer in model.layers]


def recompute_by_each_voice():
    policy = ModuleWrapPolicy({Counting})
    plain = FSDP(counting(), auto_wrap_policy=policy)
    expected = step(plain)
    assert calls(plain) == [1, 1, 1]

    def compare(model, times):
        for mine, other in zip(step(model), expected, strict=True):
            assert torch.equal(mine, other)  # dropout too
        assert calls(model) == times
        assert list(model.state_dict()) == list(plain.state_dict())
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        assert list(units_of(model)) == list(units_of(plain))

    model = counting()
    model.layers[1]._activation_checkpointing = True
    compare(FSDP(model, auto_wrap_policy=policy), [1, 2, 1])

    model = counting()
    model.activation_checkpointing_fn = lambda module: isinstance(module, Counting)
    model.layers[0]._activation_checkpointing = False
    compare(FSDP(model, auto_wrap_policy=policy), [1, 2, 2])

    model = counting()  # not a unit: a part of the root
    model.layers[2]._activation_checkpointing = True
    model = FSDP(model, auto_wrap_policy=lambda module: module is model.layers[0])
    mean_square(model(my_part(whole_batch()))).backward()
    assert calls(model) == [1, 1, 2]

    model = counting()
    for layer in model.layers:
        layer._activation_checkpointing = True
    with fsdp_ref.enable_wrap(wrapper_cls=FSDP):
        for index, layer in enumerate(model.layers):
            model.layers[index] = fsdp_ref.wrap(layer)
        model = fsdp_ref.wrap(model)
    compare(model, [2, 2, 2])
    with torch.no_grad():
        model(whole_batch())
    assert calls(model) == [3, 3, 3]

    model = counting()
    model.activation_checkpointing_fn = lambda module: isinstance(module, Counting)
    with fsdp_ref.enable_wrap(wrapper_cls=FSDP):
        compare(fsdp_ref.auto_wrap(model, or_policy(policy, ModuleWrapPolicy({Stack}))), [2, 2, 2])


def test_marks_and_the_root_say_whose_forward_runs_again_and_nothing_else_changes():
    run_ranks(2, recompute_by_each_voice)


def copies_recompute():
    model = recomputed_layers()
    expected = step(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        inner = copied.module.layers[0].module
        assert vars(inner)["forward"].module is inner
        for mine, other in zip(step(copied), expected, strict=True):
            assert torch.equal(mine, other)


def test_copies_recompute_too():
    run_ranks(1, copies_recompute)


def saved_elements(model):
    """Elements that the forward of a plain model keeps for its backward, weights aside."""
    kept, weights = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor):
        address = tensor.untyped_storage().data_ptr()
        if address not in weights:
            kept[address] = tensor.untyped_storage().nbytes() // tensor.itemsize
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(torch.randn(4, 8, requires_grad=True))
    return sum(kept.values()), output


def test_a_recomputed_module_keeps_its_inputs_only():
    deep = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)])
    before, _ = saved_elements(deep)
    recomputing.recompute(deep)
    recomputing.recompute(deep)
    assert vars(deep)["forward"].own is None  # the second call changes nothing
    after, output = saved_elements(deep)
    assert after < before / 2
    output.sum().backward()
    assert all(p.grad is not None for p in deep.parameters())


def test_a_forward_that_was_replaced_before_is_the_one_that_is_recomputed():
    layer, ran = nn.Linear(2, 2), []

    def forward(x):
        ran.append(1)
        return nn.functional.linear(x, layer.weight).tanh()

    layer.forward = forward
    recomputing.recompute(layer)
    layer(torch.ones(1, 2)).sum().backward()
    assert ran == [1, 1]


def test_marks_for_recomputing_are_checked_before_anything_is_wrapped():
    for wrong in ("yes", 1, {}):
        model = three()
        model[2]._activation_checkpointing = wrong
        with provokes(wrapping.apply_policy, errors.PolicyError, match=r"unit '2'.*_activation_ch"):
            apply(model, ModuleWrapPolicy({Large}))
        with provokes(marks.should_recompute, errors.PolicyError, match="no arguments"):
            marks.should_recompute(model[2], "here")
        with provokes(recomputing.marked_for_recomputing, errors.PolicyError, match="'2'"):
            recomputing.marked_for_recomputing(model)
        other = three()
        other.activation_checkpointing_fn = lambda module, answer=wrong: answer
        with provokes(wrapping.apply_policy, errors.PolicyError, match="activation_checkpointing_"):
            apply(other, ModuleWrapPolicy({Large}))
        assert unit_names(model) == unit_names(other) == []
    model = nn.Sequential(nn.ModuleList([Large()]))
    model[0]._activation_checkpointing = True
    with provokes(wrapping.apply_policy, errors.PolicyError, match=r"unit '0'.*Mark its elements"):
        apply(model, ModuleWrapPolicy({Large}))
    model[0]._activation_checkpointing = False
    assert apply(model, ModuleWrapPolicy({Large})) == ["0.0"]


def test_what_is_ignored_is_not_asked_about():
    model = three()
    model.activation_checkpointing_fn = lambda module: isinstance(module, Large)
    ignored = fsdp_ref.originals.resolve_ignored(model, [model[0]], None, "here")
    assert recomputing.marked_for_recomputing(model, ignored) == [model[2]]


def test_arguments_in_layers():
    layered = unit_arguments.layered
    assert layered({"a": 1, "b": 1}, {"b": 2}, {}) == {"a": 1, "b": 2}
    mesh, group = {"device_mesh": "mesh"}, {"process_group": "self"}
    assert layered(mesh, group) == group
    assert layered(group, mesh) == mesh
    assert layered(mesh, {"process_group": None}) == {"device_mesh": "mesh", "process_group": None}
    assert layered({**mesh, **group}) == {**mesh, **group}


def gradients_of_experts():
    """One dict with several arguments: an expert of this rank, divided by the world."""
    model = seeded()
    said = {"process_group": "self", "gradient_divisor": dist.get_world_size()}
    model = FSDP(model, auto_wrap_policy=by_mark(model, said))
    mean_square(model(my_part(whole_batch()))).backward()
    plain = seeded()
    mean_square(plain(my_part(whole_batch()))).backward()
    found = full_gradients(model)["layers.1.scale"] * dist.get_world_size()
    torch.testing.assert_close(found, plain.layers[1].scale.grad)


def test_a_dict_may_hold_several_arguments():
    run_ranks(2, gradients_of_experts)
