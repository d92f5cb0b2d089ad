"""A state dict is loaded as into the plain model, hooks included: all of it or nothing."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import loading
from fsdp_ref.errors import LoadError, NotGatheredError
from tests.models import CASES
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import (
    Layer,
    assert_equal_weights,
    assert_sharded,
    mean_square,
    my_part,
    nested,
    seeded,
    whole_batch,
)


def other_state() -> dict[str, Tensor]:
    return {name: value + 1 for name, value in seeded().state_dict().items()}


# ---------------------------------------------------------------- what does not fit


def strictness(use_orig_params: bool) -> None:
    model, before = nested(seeded(), use_orig_params=use_orig_params), seeded().state_dict()
    state = other_state()
    del state["layers.1.scale"]
    state["layers.9.scale"] = torch.ones(5)
    with provokes(FSDP.load_state_dict, LoadError) as caught:
        model.load_state_dict(state)
    assert "missing keys ['layers.1.scale']; unexpected keys ['layers.9.scale']" in caught.message
    assert "unit '" in caught.message
    assert "strict=False" in caught.message
    with provokes(loading.Loading.refuse_misfits, LoadError, match="Nothing was loaded"):
        model.load_state_dict(state)
    assert_equal_weights(model, seeded())
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["layers.1.scale"]
    assert result.unexpected_keys == ["layers.9.scale"]
    loaded = model.state_dict()
    for name, value in before.items():
        expected = value if name == "layers.1.scale" else value + 1
        assert torch.equal(loaded[name], expected), name


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_missing_and_unexpected_keys_are_named_with_the_plain_names(use_orig_params):
    run_ranks(2, strictness, use_orig_params)


def wrong_shape() -> None:
    model, plain, called = nested(seeded()), seeded(), []
    hook = model.register_load_state_dict_post_hook(lambda *_: called.append("hook"))
    for strict in (True, False):
        state = other_state()
        state["layers.2.linear.weight"] = torch.zeros(4, 5)
        state["head.bias"] = "no tensor"
        with provokes(FSDP.load_state_dict, LoadError, match="layers.2.linear.weight") as caught:
            model.load_state_dict(state, strict=strict)
        assert "size mismatch" in caught.message
        assert "[4, 5]" in caught.message
        assert "[5, 5]" in caught.message
        assert "head.bias" in caught.message
        assert "_fsdp_wrapped_module" not in caught.message
        assert_equal_weights(model, plain)
        assert_sharded(model)
    assert called == []  # there is nothing afterwards
    hook.remove()
    del state["layers.0.scale"]
    with provokes(FSDP.load_state_dict, LoadError, match="missing keys .*scale.*size mismatch"):
        model.load_state_dict(state)
    model.load_state_dict(other_state())  # and nothing is left of the failures
    plain.load_state_dict(other_state())
    assert_equal_weights(model, plain)


def test_a_wrong_shape_is_named_and_nothing_is_loaded():
    run_ranks(2, wrong_shape)


class Counting(nn.Module):
    """Parameters in a unit, and a buffer, which torch's loader writes to at once."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.inner = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x))


def buffers_are_put_back(assign: bool) -> None:
    model = FSDP(Counting())
    model.module.register_parameter("late", nn.Parameter(torch.rand(2)))  # in no unit
    late = model.module.late
    before = {name: value.clone() for name, value in model.state_dict().items()}
    objects = dict(model.named_buffers())
    state = {name: value + 1 for name, value in before.items()}
    state["inner.weight"] = torch.zeros(2, 3)
    with pytest.raises(LoadError):
        model.load_state_dict(state, assign=assign)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(objects[name] is buffer for name, buffer in model.named_buffers())
    assert model.module.late is late
    state["inner.weight"] = torch.zeros(3, 3)
    model.load_state_dict(state, assign=assign)
    for name in ("count", "late", "inner.bias"):
        assert torch.equal(model.state_dict()[name], state[name]), name


@pytest.mark.parametrize("assign", [False, True])
def test_buffers_and_parameters_without_a_unit_are_put_back_if_anything_does_not_fit(assign):
    run_ranks(2, buffers_are_put_back, assign)


# ---------------------------------------------------------------- hooks


class Renamed(Layer):
    """A layer whose checkpoints once had another name for its scale."""

    def __init__(self) -> None:
        super().__init__()
        self._register_load_state_dict_pre_hook(self._rename)

    def _rename(self, state: dict, prefix: str, *_: object) -> None:
        if prefix + "gain" in state:
            state[prefix + "scale"] = state.pop(prefix + "gain")


class Custom(Layer):
    """A layer with a loader of its own."""

    def _load_from_state_dict(self, state: dict, prefix: str, *arguments: object) -> None:
        assert self.scale.shape == (5,)
        state[prefix + "scale"] = state.pop(prefix + "log_scale").exp()
        super()._load_from_state_dict(state, prefix, *arguments)


class OldModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Renamed(), Custom()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def old_checkpoints() -> None:
    plain, one_unit = seeded(OldModel), FSDP(seeded(OldModel))
    two_units = seeded(OldModel)
    two_units.first, two_units.second = FSDP(two_units.first), FSDP(two_units.second)
    state = {name: value + 1 for name, value in plain.state_dict().items()}
    state["first.gain"] = state.pop("first.scale")
    state["second.log_scale"] = state.pop("second.scale").log()
    plain.load_state_dict(state)
    for model in (one_unit, FSDP(two_units)):
        result = model.load_state_dict(state)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert_equal_weights(model, plain)
        assert sorted(state) == sorted(
            ["first.gain", "second.log_scale"]
            + [f"{a}.linear.{b}" for a in ("first", "second") for b in ("weight", "bias")]
        )  # the caller's dict is left alone


def test_hooks_and_loaders_of_inner_modules_translate_old_checkpoints():
    run_ranks(2, old_checkpoints)


def hooks_before_and_after() -> None:
    model, plain, seen = nested(seeded()), seeded(), []

    def before(module: nn.Module, state: dict, prefix: str, *_: object) -> None:
        seen.append(("before", prefix, sorted(key for key in state if key.startswith(prefix))))
        for key in [key for key in state if key.startswith(prefix + "old.")]:
            state[prefix + key.removeprefix(prefix + "old.")] = state.pop(key)

    def after(module: nn.Module, keys: tuple) -> None:
        seen.append(("after", list(keys.missing_keys), list(keys.unexpected_keys)))
        keys.missing_keys.clear()

    model.layers[1].register_load_state_dict_pre_hook(before)
    model.layers[1].register_load_state_dict_post_hook(after)
    state = other_state()
    state["layers.1.old.scale"] = state.pop("layers.1.scale")
    del state["layers.1.linear.bias"]
    model.load_state_dict(state)
    names = ["linear.weight", "old.scale"]
    assert seen == [
        ("before", "layers.1.", [f"layers.1.{name}" for name in names]),
        ("after", ["layers.1.linear.bias"], []),
    ]
    plain.load_state_dict(other_state())
    with torch.no_grad():
        plain.layers[1].linear.bias.copy_(seeded().layers[1].linear.bias)
    assert_equal_weights(model, plain)


def test_hooks_of_the_wrapper_run_before_and_after_with_plain_keys():
    run_ranks(2, hooks_before_and_after)


def a_hook_that_raises(around: bool) -> None:
    """Also where torch loads a model around the units, which does not come back to them."""
    inner = nested(seeded())
    model = nn.ModuleDict({"inner": inner}) if around else inner
    prefix = "inner." if around else ""
    state = {prefix + name: value for name, value in other_state().items()}

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    hook = inner.head.register_load_state_dict_post_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model.load_state_dict(state)
    hook.remove()
    if not around:
        assert_equal_weights(inner, seeded())
        assert_sharded(inner)
        mean_square(inner(my_part(whole_batch()))).backward()
    model.load_state_dict(state)
    plain = seeded()
    plain.load_state_dict(other_state())
    assert_equal_weights(inner, plain)
    mean_square(inner(my_part(whole_batch()))).backward()


@pytest.mark.parametrize("around", [False, True])
def test_after_a_hook_that_raised_the_model_can_be_loaded_and_trained(around):
    run_ranks(2, a_hook_that_raises, around)


# ---------------------------------------------------------------- as torch does


def units_inside_a_plain_model() -> None:
    plain, model = seeded(), seeded()
    model.layers[0], model.layers[2] = FSDP(model.layers[0]), FSDP(model.layers[2])
    state = other_state()
    del state["layers.2.scale"]
    with pytest.raises(RuntimeError, match=r'"layers\.2\.scale"'):
        model.load_state_dict(state)
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["layers.2.scale"]
    expected = {**plain.state_dict(), **state}
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_units_inside_a_model_that_is_not_a_unit_load_with_plain_names():
    run_ranks(2, units_inside_a_plain_model)


def versions_of_modules() -> None:
    """Batch norm forgives a missing counter in dicts from before it had one, and only there."""
    case = CASES["conv"]
    model, plain = FSDP(case.model(torch.float32)), case.model(torch.float32)
    state = plain.state_dict()
    counter = "blocks.0.norm.num_batches_tracked"
    del state[counter]
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        plain.load_state_dict(state)
    with pytest.raises(LoadError, match="num_batches_tracked"):
        model.load_state_dict(state)
    old = dict(state)  # without the note of versions
    plain.load_state_dict(old)
    model.load_state_dict(old)


def test_the_versions_of_modules_inside_are_found():
    run_ranks(2, versions_of_modules)


def inside_a_summon() -> None:
    model, plain = nested(seeded()), seeded()
    with model.summon_full_params():
        with pytest.raises(LoadError):
            model.load_state_dict({**other_state(), "head.bias": torch.zeros(7)})
        assert torch.equal(model.head.weight, plain.head.weight)
        model.load_state_dict(other_state())
        assert torch.equal(model.head.weight, plain.head.weight + 1)
    with model.summon_full_params(writeback=False):
        model.load_state_dict(plain.state_dict())
    plain.load_state_dict(other_state())
    assert_equal_weights(model, plain)


def test_a_load_inside_a_summon_is_an_edit_like_any_other():
    run_ranks(2, inside_a_summon)


class Curious(nn.Linear):
    """Looks at its weight while it is loaded."""

    def _load_from_state_dict(self, *arguments: object) -> None:
        self.found = repr(self.weight)
        with provokes(loading.LoadTarget.__torch_dispatch__, NotGatheredError, match="weight"):
            self.weight.norm()
        super()._load_from_state_dict(*arguments)


def targets_refuse_to_compute() -> None:
    model = FSDP(Curious(5, 2))
    model.load_state_dict(model.state_dict())
    assert model.module.found == "LoadTarget('weight', shape=(2, 5), dtype=torch.float32)"


def test_a_module_that_computes_with_a_weight_during_a_load_hears_why_it_cannot():
    run_ranks(1, targets_refuse_to_compute)


def hooks_see_what_was_loaded(around: bool) -> None:
    """Hooks for afterwards find the new values, on every module, also in a model around units."""
    inner, seen = nested(seeded()), []
    model = nn.ModuleDict({"inner": inner}) if around else inner

    def look(module: nn.Module, keys: tuple) -> None:
        with inner.summon_full_params(writeback=False):
            seen.append(inner.head.weight.clone())

    for part in (inner, inner.head, inner.layers[1], inner.layers[1].linear):
        part.register_load_state_dict_post_hook(look)
    prefix = "inner." if around else ""
    model.load_state_dict({prefix + name: value for name, value in other_state().items()})
    assert len(seen) == 4
    assert all(torch.equal(weight, other_state()["head.weight"]) for weight in seen)


@pytest.mark.parametrize("around", [False, True])
def test_hooks_for_afterwards_run_when_values_are_written(around):
    run_ranks(2, hooks_see_what_was_loaded, around)


def put_back(use_orig_params: bool, summoned: bool) -> None:
    """A hook that raises after everything was written undoes it, to the last bit."""
    model, plain = nested(seeded(), use_orig_params=use_orig_params), seeded()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    model.register_load_state_dict_post_hook(fail)
    around = model.summon_full_params() if summoned else nullcontext()
    with around, pytest.raises(ZeroDivisionError):
        model.load_state_dict(other_state())
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    assert_sharded(model)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("summoned", [False, True])
def test_a_hook_that_raises_afterwards_has_everything_put_back(use_orig_params, summoned):
    run_ranks(2, put_back, use_orig_params, summoned)


def frozen_and_half() -> None:
    """Values of another dtype are converted; requires_grad stays that of the model."""
    case = CASES["frozen"]
    plain, model = case.model(torch.float32), FSDP(case.model(torch.float32))
    state = {name: (value + 1).half() for name, value in plain.state_dict().items()}
    for assign in (False, True):
        model.load_state_dict(state, assign=assign)
        loaded = model.state_dict(keep_vars=True)
        for name, parameter in plain.named_parameters():
            assert torch.equal(loaded[name], state[name].float())
            assert loaded[name].requires_grad == parameter.requires_grad


def test_values_are_converted_and_requires_grad_is_left_alone():
    run_ranks(2, frozen_and_half)
