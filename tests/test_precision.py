"""Mixed precision: what computes, travels and is kept in which dtype."""

import contextlib
import copy
import os
from dataclasses import dataclass, field, fields
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy

import fsdp_ref
from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors, timeline, wrapping
from fsdp_ref.precision import Precision, as_precision
from tests.models import part
from tests.provoked import provokes
from tests.ranks import run_ranks

BF16 = torch.bfloat16
LOW = {"param_dtype": BF16}


class Probe(nn.Module):
    """Two layers and a buffer; remembers the dtypes that its inner forward saw."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.second = nn.Linear(7, 3)
        self.register_buffer("shift", torch.full((3,), 1.0 / 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen = {}

    def forward(self, x, index=None):
        hidden = torch.tanh(self.first(x))
        out = self.second(hidden) + self.shift
        self.seen = {
            "input": x.dtype,
            "weight": self.second.weight.dtype,
            "buffer": self.shift.dtype,
            "output": out.dtype,
            "index": None if index is None else index.dtype,
        }
        return out


def probe():
    torch.manual_seed(0)
    return Probe()


def my_batch():
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    return part(whole, dist.get_rank(), dist.get_world_size())


def train(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(my_batch()).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def beside_torch(settings):
    ours = FSDP(probe(), mixed_precision=MixedPrecision(**settings))
    theirs = TorchFSDP(
        probe(), mixed_precision=MixedPrecision(**settings), device_id=torch.device("cpu")
    )
    assert train(ours) == pytest.approx(train(theirs), rel=1e-2)
    assert ours.module.seen == theirs.module.seen
    with TorchFSDP.summon_full_params(theirs, writeback=False):
        expected = {name: p.clone() for name, p in theirs.module.named_parameters()}
    exported = ours.state_dict()
    assert list(expected) == ["first.weight", "first.bias", "second.weight", "second.bias"]
    for name, value in expected.items():
        torch.testing.assert_close(exported[name], value, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {"param_dtype": BF16},
        {"param_dtype": BF16, "reduce_dtype": torch.float32},
        {"param_dtype": BF16, "buffer_dtype": BF16},
        {"reduce_dtype": BF16},
    ],
    ids=["parameters", "reduction apart", "buffers too", "reduction only"],
)
def test_it_trains_like_torchs_own_class(settings):
    run_ranks(2, beside_torch, settings)


def dtypes_and_bytes(settings):
    model = FSDP(probe(), mixed_precision=settings)
    with timeline() as recorded:
        model(my_batch(), index=torch.zeros(2, dtype=torch.int64)).float().sum().backward()
    sent = {event.operation: event.dtype for event in recorded.events if event.dtype}
    (flat_param,) = model.parameters()
    return model.module.seen, sent, recorded.bytes_sent("all-gather"), flat_param.grad.dtype


def test_only_what_is_gathered_and_reduced_changes_its_dtype():
    seen, sent, full_bytes, _ = run_ranks(2, dtypes_and_bytes, None)[0]
    assert set(seen.values()) == {torch.float32, torch.int64}
    seen, sent, low_bytes, grad = run_ranks(2, dtypes_and_bytes, LOW)[0]
    assert (seen["input"], seen["weight"], seen["index"]) == (BF16, BF16, torch.int64)
    assert seen["buffer"] == torch.float32  # buffers only when buffer_dtype says so
    assert sent["all-gather"] == sent["reduce-scatter"] == BF16
    assert grad == torch.float32
    assert 2 * low_bytes == full_bytes
    _, sent, _, _ = run_ranks(2, dtypes_and_bytes, {**LOW, "reduce_dtype": torch.float32})[0]
    assert sent["reduce-scatter"] == torch.float32


def exports_are_exact():
    plain = probe()
    model = FSDP(probe(), mixed_precision={**LOW, "buffer_dtype": BF16})
    with torch.no_grad():
        model(my_batch())
    assert model.module.seen["buffer"] == BF16
    for name, value in model.state_dict().items():
        reference = plain.state_dict()[name]
        assert value.dtype == reference.dtype
        if name != "shift":  # a buffer was rounded when it was cast
            assert torch.equal(value, reference), name
    with model.summon_full_params():
        for (name, mine), (_, theirs) in zip(
            model.named_parameters(), plain.named_parameters(), strict=True
        ):
            assert torch.equal(mine, theirs), name
            with torch.no_grad():
                mine.add_(2.0**-12)  # lost in bfloat16
    for name, parameter in plain.named_parameters():
        assert torch.equal(model.state_dict()[name], parameter + 2.0**-12), name


def test_exports_and_summoned_parameters_are_in_full_precision():
    run_ranks(2, exports_are_exact)


def memory_of_the_low_precision_shard():
    model = FSDP(probe(), mixed_precision=LOW)
    (flat_param,) = model.parameters()
    before = flat_param._fp16_shard
    model(my_batch()).float().sum().backward()
    shard = flat_param._fp16_shard
    return before, shard.dtype, shard.numel(), shard.untyped_storage().nbytes()


def test_the_low_precision_shard_holds_no_memory_between_gathers():
    before, dtype, numel, nbytes = run_ranks(2, memory_of_the_low_precision_shard)[0]
    assert before is None
    assert (dtype, nbytes) == (BF16, 0)
    assert numel > 0


def inputs(settings):
    model = probe()
    model.first = FSDP(model.first, mixed_precision={**LOW, **settings})
    model = FSDP(model, mixed_precision=settings)
    error = None
    try:
        model(my_batch())
    except RuntimeError as caught:
        error = str(caught)
    return error


def test_only_the_root_casts_inputs_unless_a_unit_is_told_to():
    assert "dtype" in run_ranks(2, inputs, {})[0]  # float32 reaches a bfloat16 layer
    assert "dtype" in run_ranks(2, inputs, {"cast_root_forward_inputs": False})[0]


def one_unit_in_full_precision():
    model = probe()
    second = model.second

    def policy(module):
        whole = {"param_dtype": torch.float32, "cast_forward_inputs": True}
        return {"mixed_precision": whole} if module is second else module is model.first

    model = FSDP(model, auto_wrap_policy=policy, mixed_precision=LOW)
    dtypes = {}
    model.second.module.register_forward_pre_hook(
        lambda module, args: dtypes.update(second=module.weight.dtype)
    )
    model(my_batch()).float().sum().backward()
    return dtypes


def test_a_policy_may_leave_one_unit_in_full_precision():
    assert run_ranks(2, one_unit_in_full_precision)[0] == {"second": torch.float32}


def clipping_and_accumulation():
    model, plain = FSDP(probe(), mixed_precision={"reduce_dtype": torch.float64}), probe()
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        model(my_batch()).square().mean().backward()
        plain(whole).square().mean().backward()
    true = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(model.clip_grad_norm_(0.1), true)


def test_gradients_add_up_and_are_clipped_in_the_parameters_own_dtype():
    run_ranks(2, clipping_and_accumulation)


# What the argument may be

FP16, FP32 = torch.float16, torch.float32


def three(given):
    precision = as_precision(given, "unit 'x'")
    return precision.param_dtype, precision.reduce_dtype, precision.buffer_dtype


@pytest.mark.parametrize(
    ("given", "dtypes"),
    [
        (None, (None, None, None)),
        (False, (None, None, None)),
        ("full", (FP32, FP32, FP32)),
        ("FULL", (FP32, FP32, FP32)),
        (BF16, (BF16, None, None)),
        ("bf16", (BF16, None, None)),
        ("Float16", (FP16, None, None)),
        ("default", (BF16, FP32, BF16)),
        ("DEFAULT", (BF16, FP32, BF16)),
        ("pure", (BF16, BF16, BF16)),
        (True, (FP16, FP16, FP16)),
        ({"param_dtype": "amp_bf16", "reduce_dtype": "fp32"}, (BF16, FP32, None)),
        (MixedPrecision(param_dtype=FP16, buffer_dtype=FP32), (FP16, None, FP32)),
        (MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32), (BF16, FP32, None)),
        (Precision(reduce_dtype=BF16), (None, BF16, None)),
    ],
)
def test_words_dtypes_and_the_classes_of_others_mean_what_the_table_says(given, dtypes):
    assert three(given) == dtypes


def test_every_setting_of_torchs_class_is_taken_over():
    ours = as_precision(MixedPrecision(), "unit 'x'")
    assert {field.name for field in fields(MixedPrecision)} <= {f.name for f in fields(Precision)}
    assert ours == Precision()  # the same defaults
    theirs = MixedPrecision(
        keep_low_precision_grads=True,
        cast_forward_inputs=True,
        cast_root_forward_inputs=False,
        _module_classes_to_ignore=[nn.LayerNorm],
    )
    assert as_precision(theirs, "unit 'x'") == Precision(
        keep_low_precision_grads=True,
        cast_forward_inputs=True,
        cast_root_forward_inputs=False,
        _module_classes_to_ignore=(nn.LayerNorm,),
    )


def test_the_output_dtype_of_torchs_second_class_is_taken_over():
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32)
    precision = as_precision(policy, "unit 'x'")
    assert (precision.output_dtype, precision.cast_forward_inputs) == (FP32, True)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"params_dtype": BF16}, "Did you mean 'param_dtype'"),
        ({"param_dtype": torch.int8}, "found param_dtype=torch.int8"),
        ({"param_dtype": torch.float8_e4m3fn}, "found param_dtype=torch.float8_e4m3fn"),
        ({"reduce_dtype": "bf61"}, "found reduce_dtype='bf61'"),
        ({"cast_forward_inputs": "no"}, "cast_forward_inputs='no'. It is True or False."),
        ({"_module_classes_to_ignore": ["BatchNorm"]}, "It takes classes of modules"),
        ({"_module_classes_to_ignore": int}, "It takes classes of modules"),
        ("defaults", "found 'defaults'. Did you mean 'default'"),
        ("somehow", "found 'somehow'. Torch's MixedPrecision works"),
        (16, "found 16. Did you mean 'fp16'"),
        (3, "found 3. Torch's MixedPrecision works"),
        (torch.int32, "found param_dtype=torch.int32"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(given, match):
    with provokes(as_precision, errors.PrecisionError, match=match):
        as_precision(given, "unit 'x'")


@pytest.mark.parametrize("value", ["1", "0", ""])
def test_torchs_variable_switches_on_full_precision_in_evaluation(monkeypatch, value):
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", value)
    on = value == "1"
    for given in (LOW, "pure", Precision(BF16), MixedPrecision(param_dtype=BF16)):
        precision = as_precision(given, "unit 'x'")
        assert precision.full_precision_in_eval is on
        assert precision.at(training=True) == precision
        assert precision.at(training=False) == (Precision() if on else precision)


# The arithmetic


@dataclass(frozen=True)
class Batch:
    """A container that only its author knows."""

    numbers: torch.Tensor
    index: torch.Tensor
    inner: list = field(default_factory=list)
    total: torch.Tensor = field(init=False, default=None)


def test_inputs_are_cast_in_containers_and_dataclasses_and_integers_never():
    x, index = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    given = Batch(x, index, [x.double(), "text"])
    sequence = nn.utils.rnn.pack_sequence([torch.ones(3)])
    precision = Precision(BF16, cast_forward_inputs=True)

    (tensor, batch), kwargs = precision.cast_inputs(
        (x, given), {"key": {"deep": (x,)}, "none": None, "packed": sequence}, is_root=False
    )

    assert tensor.dtype == batch.numbers.dtype == batch.inner[0].dtype == BF16
    assert batch.index is index
    assert kwargs["key"]["deep"][0].dtype == BF16
    assert kwargs["none"] is None
    assert kwargs["packed"].batch_sizes.dtype == torch.int64
    assert (given.numbers.dtype, given.inner[0].dtype) == (FP32, torch.float64)  # untouched


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, FP32),
        ({"cast_forward_outputs": True}, BF16),
        ({"output_dtype": FP16}, FP16),
        ({"output_dtype": FP16, "cast_forward_outputs": True}, FP16),
    ],
)
def test_outputs_are_cast_only_when_asked_to(settings, expected):
    given = ((torch.zeros(1, dtype=torch.int64), Batch(torch.ones(1, dtype=BF16), None)), {})
    output = {"loss": torch.ones(()), "count": torch.ones((), dtype=torch.int64)}

    cast = Precision(**settings).cast_outputs(output, like=given)

    assert (cast["loss"].dtype, cast["count"].dtype) == (expected, torch.int64)


def test_outputs_stay_when_no_input_says_a_dtype():
    output = torch.ones(2)
    assert Precision(cast_forward_outputs=True).cast_outputs(output, like=((), {})) is output


def test_gradients_are_kept_in_their_own_dtype_unless_asked_otherwise():
    low = {"param_dtype": BF16, "reduce_dtype": FP16}
    assert Precision(**low).kept_gradient_dtype(FP32) == FP32
    assert Precision(**low, keep_low_precision_grads=True).kept_gradient_dtype(FP32) == FP16


def refused_by_the_constructor():
    with provokes(fsdp_ref.FullyShardedDataParallel, errors.PrecisionError, match=r"\[rank"):
        fsdp_ref.FullyShardedDataParallel(probe(), mixed_precision={"param": BF16})


def test_the_constructor_refuses_it_on_every_rank():
    run_ranks(2, refused_by_the_constructor)


# Batch norm under a policy


class Normed(nn.Module):
    """A convolution and a batch norm, in a block that a policy selects, and a head."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4), nn.Conv1d(4, 4, 1))
        self.bare = nn.BatchNorm1d(4, affine=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.bare(self.block(x)).mean(-1))


def normed():
    torch.manual_seed(0)
    return Normed()


def plain_name(name):
    return ".".join(part for part in name.split(".") if part != "_fsdp_wrapped_module")


def seen_by(model):
    """Note dtypes: what goes into each layer, its weight and statistics; what each unit returns."""
    seen = {}

    def note_layer(name, module, args):
        held = [getattr(module, attribute, None) for attribute in ("weight", "running_mean")]
        seen[name] = [args[0].dtype, *(None if one is None else one.dtype for one in held)]

    def note_unit(name, module, args, output):
        seen[f"unit {name}"] = [args[0].dtype, output.dtype]

    for name, module in model.named_modules():
        if isinstance(module, (FSDP, TorchFSDP)):
            module.register_forward_hook(partial(note_unit, plain_name(name)))
        elif isinstance(module, (nn.Conv1d, nn.BatchNorm1d, nn.Linear)):
            # Last of all hooks, so that it sees what torch's own hook has cast.
            module.register_forward_pre_hook(partial(note_layer, plain_name(name)))
    return seen


def images():
    whole = torch.randn(12, 2, 5, generator=torch.Generator().manual_seed(1))
    return part(whole, dist.get_rank(), dist.get_world_size())


def units_of(model, kind=FSDP):
    return [plain_name(name) for name, module in model.named_modules() if isinstance(module, kind)]


POLICIES = {
    "class": (
        fsdp_ref.ModuleWrapPolicy({nn.Sequential}),
        TorchModuleWrapPolicy({nn.Sequential}),
    ),
    "torch's object": (TorchModuleWrapPolicy({nn.Sequential, nn.BatchNorm1d}),) * 2,
    "size": (partial(fsdp_ref.size_based_auto_wrap_policy, min_num_params=20),) * 2,
}


def train_on_images(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(images()).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def batch_norm_beside_torch(policy, settings):
    mine, theirs = POLICIES[policy]
    ours = FSDP(normed(), auto_wrap_policy=mine, mixed_precision=MixedPrecision(**settings))
    reference = TorchFSDP(
        normed(),
        auto_wrap_policy=theirs,
        mixed_precision=MixedPrecision(**settings),
        device_id=torch.device("cpu"),
    )
    assert set(units_of(ours)) == set(units_of(reference, TorchFSDP)) >= {"block.1", "bare"}
    my_dtypes, their_dtypes = seen_by(ours), seen_by(reference)
    assert train_on_images(ours) == pytest.approx(train_on_images(reference), rel=1e-2)
    assert my_dtypes == their_dtypes
    exported = ours.state_dict()
    with TorchFSDP.summon_full_params(reference, writeback=False):
        expected = dict(reference.state_dict())
    assert list(exported) == [plain_name(name) for name in expected]
    for name, value in expected.items():
        torch.testing.assert_close(exported[plain_name(name)], value, rtol=2e-2, atol=2e-3)
    return my_dtypes


@pytest.mark.parametrize("settings", [{}, {"buffer_dtype": BF16}], ids=["", "with buffers"])
@pytest.mark.parametrize("policy", POLICIES)
def test_batch_norm_is_a_unit_in_full_precision_under_a_policy_as_in_torch(policy, settings):
    seen = run_ranks(2, batch_norm_beside_torch, policy, {"param_dtype": BF16, **settings})[0]
    for norm in ("block.1", "bare"):
        assert seen[norm] == [FP32, None if norm == "bare" else FP32, FP32]
        assert seen[f"unit {norm}"] == [BF16, BF16]
    assert seen["block.2"] == seen["head"] == [BF16, BF16, None]


def who_is_exempt():
    def model(mixed_precision, policy=None, **configs):
        plain = normed()
        for name, config in configs.items():
            getattr(plain, name).wrapper_config = config
        return FSDP(
            plain,
            auto_wrap_policy=policy or fsdp_ref.ModuleWrapPolicy({nn.Sequential}),
            mixed_precision=mixed_precision,
        )

    assert units_of(model(None)) == units_of(model("full")) == ["", "block"]
    assert units_of(FSDP(normed(), mixed_precision=LOW)) == [""]
    nobody, linear = ({**LOW, "_module_classes_to_ignore": kinds} for kinds in ([], [nn.Linear]))
    assert units_of(model(nobody)) == ["", "block"]
    assert units_of(model(linear)) == ["", "block", "head"]

    double = {"param_dtype": torch.float64, "buffer_dtype": torch.float64}
    both = {"cast_forward_inputs": True, "cast_forward_outputs": True}
    exact = {"mixed_precision": {**double, **both}}

    def rule(module):
        return exact if isinstance(module, nn.BatchNorm1d) else isinstance(module, nn.Sequential)

    by_rule, by_config = model(LOW, rule), model(LOW, bare=exact)
    for one in (by_rule, by_config):
        assert units_of(one) == ["", "block", "block.1", "bare"]
        seen = seen_by(one)
        one(images())
        assert seen["bare"][0] == torch.float64
        assert seen["block.1"][0] == (torch.float64 if one is by_rule else FP32)
    with fsdp_ref.enable_wrap(wrapper_cls=FSDP, mixed_precision=LOW):
        under_auto_wrap = fsdp_ref.auto_wrap(normed(), min_num_params=20)
    assert "bare" in units_of(under_auto_wrap)


def test_who_is_exempt_depends_on_classes_and_policy_and_on_what_is_said_for_a_module():
    run_ranks(2, who_is_exempt)


def a_double_batch_norm():
    model = FSDP(
        normed().double(),
        auto_wrap_policy=fsdp_ref.ModuleWrapPolicy({nn.Sequential}),
        mixed_precision={"param_dtype": FP32},
    )
    seen = seen_by(model)
    model(images().double()).sum().backward()
    assert seen["block.1"] == [torch.float64] * 3
    assert seen["unit block.1"] == [FP32, FP32]


def test_an_exempt_module_computes_in_its_own_dtype_even_if_that_is_double():
    run_ranks(2, a_double_batch_norm)


def exemption_without_a_choice():
    with provokes(FSDP, errors.PolicyMatchedNothingWarning, match="found none"):
        FSDP(normed(), auto_wrap_policy=fsdp_ref.ModuleWrapPolicy({nn.Conv3d}), mixed_precision=LOW)


def test_an_exemption_does_not_hide_that_a_policy_selected_nothing():
    run_ranks(2, exemption_without_a_choice)


def a_wrong_word_from_a_policy():
    model = normed()

    def rule(module):
        if isinstance(module, nn.Linear):
            return {"mixed_precision": {"param_dtype": torch.int8}}
        return isinstance(module, nn.Conv1d)

    with provokes(wrapping.apply_policy, errors.PrecisionError, match="unit 'head'"):
        FSDP(model, auto_wrap_policy=rule)
    with (
        fsdp_ref.enable_wrap(wrapper_cls=FSDP, mixed_precision="lowest"),
        provokes(fsdp_ref.auto_wrap, errors.PrecisionError, match="'lowest'"),
    ):
        fsdp_ref.auto_wrap(model)
    assert units_of(model) == []


def test_a_wrong_precision_leaves_the_model_plain():
    run_ranks(2, a_wrong_word_from_a_policy)


# Together with autocast, and with dtypes that are mixed already


def under_autocast_beside_torch(settings):
    given = None if settings is None else MixedPrecision(**settings)
    ours = FSDP(probe(), mixed_precision=given)
    theirs = TorchFSDP(probe(), mixed_precision=given, device_id=torch.device("cpu"))
    losses = []
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=BF16):
                loss = model(my_batch()).float().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert {p.grad.dtype for p in model.parameters()} == {FP32}
    assert losses[:4] == pytest.approx(losses[4:], rel=1e-2)
    assert losses[3] < 0.8 * losses[0]  # it trains
    assert ours.module.seen == theirs.module.seen
    return ours.module.seen


@pytest.mark.parametrize(
    "settings",
    [None, {"param_dtype": BF16}, {"param_dtype": BF16, "buffer_dtype": BF16}],
    ids=["autocast alone", "both", "both and buffers"],
)
def test_autocast_and_mixed_precision_together_give_torchs_dtypes_and_numbers(settings):
    seen = run_ranks(2, under_autocast_beside_torch, settings)[0]
    assert seen["weight"] == (FP32 if settings is None else BF16)
    assert seen["output"] == (BF16 if settings and "buffer_dtype" in settings else FP32)


def one_autocast_around_all_steps():
    model, plain = FSDP(probe()), probe()
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    losses = []
    for one, x in ((model, my_batch()), (plain, whole)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        with torch.autocast("cpu", dtype=BF16):
            for _ in range(3):
                optimizer.zero_grad()
                loss = one(x).float().square().mean()
                loss.backward()
                optimizer.step()
                if one is plain:
                    torch.clear_autocast_cache()  # a plain model would compute with old weights
                losses.append(loss.item())
    mine = torch.tensor(losses[:3])
    dist.all_reduce(mine)
    torch.testing.assert_close(mine / 2, torch.tensor(losses[3:]), rtol=1e-2, atol=0)


def test_an_autocast_that_stays_open_over_steps_never_computes_with_old_weights():
    run_ranks(2, one_autocast_around_all_steps)


class SideInputs(Probe):
    """Notes the dtypes of all its inputs."""

    def forward(self, x, side, index):
        self.inputs = (x.dtype, side.dtype, index.dtype)
        return super().forward(x.to(self.first.weight.dtype))


def inputs_beside_torch(settings):
    torch.manual_seed(0)
    plain = SideInputs()
    given = MixedPrecision(param_dtype=BF16, **settings)
    found = []
    for wrap in (FSDP, partial(TorchFSDP, device_id=torch.device("cpu"))):
        model = wrap(copy.deepcopy(plain), mixed_precision=given)
        model(my_batch(), side=torch.ones(2), index=torch.zeros(2, dtype=torch.int64))
        inner = copy.deepcopy(plain)
        inner.first = wrap(inner.first, mixed_precision=given)
        dtypes = []
        inner.first.module.register_forward_pre_hook(
            lambda module, args, dtypes=dtypes: dtypes.append(args[0].dtype)
        )
        whole = wrap(nn.Sequential(nn.Identity(), inner.first), mixed_precision=given)
        with contextlib.suppress(RuntimeError):  # float32 into a bfloat16 layer
            whole(my_batch())
        found.append((model.module.inputs, *dtypes))
    ours, theirs = found
    assert ours == theirs
    return ours


@pytest.mark.parametrize("every", [False, True], ids=["", "every unit casts"])
@pytest.mark.parametrize("root", [False, True], ids=["root does not cast", "root casts"])
def test_which_inputs_are_cast_is_torchs_choice_too(root, every):
    settings = {"cast_root_forward_inputs": root, "cast_forward_inputs": every}
    dtype = BF16 if root or every else FP32
    for found in run_ranks(2, inputs_beside_torch, settings):
        assert found == ((dtype, dtype, torch.int64), dtype)


class Several(nn.Module):
    """Parameters of two dtypes beside each other, and buffers of three."""

    def __init__(self):
        super().__init__()
        self.singly = nn.Linear(6, 5)
        self.exactly = nn.Linear(5, 3, dtype=torch.float64)
        self.register_buffer("low", torch.ones(3, dtype=FP16))
        self.register_buffer("exact", torch.ones(3, dtype=torch.float64))
        self.register_buffer("count", torch.ones(3, dtype=torch.int64))

    def forward(self, x):
        hidden = torch.tanh(self.singly(x.to(self.singly.weight.dtype)))
        out = self.exactly(hidden.to(self.exactly.weight.dtype))
        self.seen = {name: buffer.dtype for name, buffer in self.named_buffers()}
        self.seen["weights"] = {self.singly.weight.dtype, self.exactly.weight.dtype}
        return out * self.low * self.exact


def mixed_dtypes_in_a_unit(settings):
    torch.manual_seed(0)
    plain = Several()
    model = FSDP(copy.deepcopy(plain), mixed_precision=settings)
    losses = []
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    for one, x in ((model, my_batch()), (plain, whole)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = one(x).double().square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert [(p.dtype, p.grad.dtype) for p in model.parameters()] == [
        *[(FP32, FP32), (torch.float64, torch.float64)]
    ]
    tolerance = 2e-2 if settings else 1e-6
    for name, value in plain.state_dict().items():
        found = model.state_dict()[name]
        assert found.dtype == value.dtype, name
        torch.testing.assert_close(found, value, rtol=tolerance, atol=tolerance)
    return model.module.seen


def test_dtypes_mix_in_a_unit_and_each_parameter_is_updated_in_its_own():
    seen = run_ranks(2, mixed_dtypes_in_a_unit, None)[0]
    assert seen["weights"] == {FP32, torch.float64}
    seen = run_ranks(2, mixed_dtypes_in_a_unit, {"param_dtype": BF16, "buffer_dtype": FP32})[0]
    assert seen["weights"] == {BF16}
    assert (seen["low"], seen["exact"], seen["count"]) == (FP32, FP32, torch.int64)


# What a root schedule and a flat parameter have to heed


def gradients_kept_low():
    found = []
    for wrap in (FSDP, partial(TorchFSDP, device_id=torch.device("cpu"))):
        settings = MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True)
        model = wrap(probe(), mixed_precision=settings)
        dtypes = []
        for _ in range(2):
            model(my_batch()).float().square().mean().backward()
            dtypes.append({p.grad.dtype for p in model.parameters()})
        found.append((dtypes, [p.grad.float() for p in model.parameters()]))
    (ours, my_grads), (theirs, their_grads) = found
    assert ours == theirs == [{BF16}] * 2
    for mine, other in zip(my_grads, their_grads, strict=True):
        torch.testing.assert_close(mine, other[: mine.numel()], rtol=3e-2, atol=3e-3)


def test_low_precision_gradients_can_be_kept_as_in_torch():
    run_ranks(2, gradients_kept_low)


def evaluation():
    found = []
    low = MixedPrecision(param_dtype=BF16, buffer_dtype=BF16)
    for wrap in (FSDP, partial(TorchFSDP, device_id=torch.device("cpu"))):
        model, dtypes = wrap(probe(), mixed_precision=low), []
        for training in (True, False, True):
            model.train(training)
            model(my_batch())
            seen = model.module.seen
            dtypes.append((seen["input"], seen["weight"], seen["buffer"]))
        found.append(dtypes)
    assert found[0] == found[1]
    if os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") != "1":
        return found[0]
    settings = {"param_dtype": BF16, "full_precision_in_eval": True}
    del os.environ["FSDP_USE_FULL_PREC_IN_EVAL"]
    model, plain = FSDP(probe(), mixed_precision=settings).eval(), probe()
    assert torch.equal(model(my_batch()), plain(my_batch()))
    return found[0]


def test_evaluation_is_in_full_precision_when_asked_for_as_in_torch():
    assert run_ranks(2, evaluation)[0] == [(BF16, BF16, BF16)] * 3
    found = run_ranks(2, evaluation, env={"FSDP_USE_FULL_PREC_IN_EVAL": "1"})[0]
    assert found == [(BF16,) * 3, (FP32,) * 3, (BF16,) * 3]
