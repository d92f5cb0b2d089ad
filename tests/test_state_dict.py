"""State dicts have the plain model's names and values, and load at any number of ranks."""

import io
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import timeline
from tests.models import CASES
from tests.parity.training import OPTIMIZERS, my_part
from tests.parity.training import WRAPPINGS as CASE_WRAPPINGS
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import (
    Layer,
    assert_equal_gradients,
    assert_sharded,
    mean_square,
    nested,
    seeded,
    whole_batch,
)

ROUND_TRIPS = [
    (case, wrapping)
    for case in CASES
    for wrapping in ("one unit", "by class")
    if not (case == "dtypes" and wrapping == "by class")  # it names no classes
]


def trained(case_name: str, wrapping: str) -> tuple[FSDP, bytes]:
    """Train two steps and save. On ranks."""
    case = CASES[case_name]
    model = CASE_WRAPPINGS[wrapping](case.model(torch.float32), case)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for batch in case.batches(2, torch.float32):
        optimizer.zero_grad()
        mine = my_part(batch)
        case.loss(model(mine), mine).backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return model, file.getvalue()


def save(case_name: str, wrapping: str) -> bytes:
    return trained(case_name, wrapping)[1]


def load_and_save(case_name: str, wrapping: str, saved: bytes) -> tuple[bytes, float]:
    """Load into a model with other weights; save again, and compute a loss. On ranks."""
    case = CASES[case_name]
    model = CASE_WRAPPINGS[wrapping](case.model(torch.float32, seed=5), case)
    model.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    model.eval()
    batch = case.batches(1, torch.float32)[0]
    return file.getvalue(), case.loss(model(batch), batch).item()


def read(saved: bytes) -> dict[str, Tensor]:
    return torch.load(io.BytesIO(saved), weights_only=True)


@pytest.mark.parametrize(("case", "wrapping"), ROUND_TRIPS)
def test_a_saved_model_loads_into_the_plain_one_and_back_at_another_world_size(case, wrapping):
    saved = run_ranks(2, save, case, wrapping)
    plain = CASES[case].model(torch.float32, seed=9)
    assert list(read(saved[0])) == list(plain.state_dict())  # the order, too
    buffers = dict(plain.named_buffers())
    for name, value in read(saved[1]).items():
        if name not in buffers:  # batch statistics belong to each rank
            assert torch.equal(value, read(saved[0])[name]), name

    plain.load_state_dict(read(saved[0]))
    plain.eval()
    batch = CASES[case].batches(1, torch.float32)[0]
    loss = CASES[case].loss(plain(batch), batch).item()
    for world_size in (1, 3):
        for again, sharded_loss in run_ranks(world_size, load_and_save, case, wrapping, saved[0]):
            assert list(read(again)) == list(read(saved[0]))
            for name, value in read(again).items():
                assert torch.equal(value, read(saved[0])[name]), name
            assert sharded_loss == loss


def fresh_equals_plain() -> None:
    plain, model = seeded().state_dict(), nested(seeded()).state_dict()
    assert list(plain) == list(model)
    for name, value in plain.items():
        assert torch.equal(model[name], value), name
        assert type(model[name]) is Tensor
        assert not model[name].requires_grad
        # A view would drag the whole unit into the file.
        assert model[name].untyped_storage().nbytes() == value.numel() * value.element_size()


def test_values_equal_the_plain_ones_bit_for_bit_and_own_their_memory():
    run_ranks(3, fresh_equals_plain)


def export_is_a_read() -> None:
    """Saving between forward and backward, and after, changes nothing."""
    plain, model = seeded(), nested(seeded())
    mean_square(plain(whole_batch())).backward()
    loss = mean_square(model(my_part(whole_batch())))
    before = model.state_dict()
    loss.backward()
    assert_equal_gradients(model, plain)
    assert_sharded(model)
    with timeline() as recorded:
        after = model.state_dict()
    assert_sharded(model)
    gathered = recorded.lines("all-gather")
    assert sorted(gathered) == [
        f"all-gather {u}" for u in ("layers.0", "layers.1", "layers.2", "root")
    ]
    largest = max(event.live_unsharded_bytes for event in recorded.events)
    assert largest <= 8 * 36  # one unit at a time: 35 elements, padded to 36
    for name, value in before.items():
        assert torch.equal(value, after[name])
        value.fill_(7)  # the dict is the caller's
    assert not any((value == 7).all() for value in model.state_dict().values())


def test_exporting_is_a_pure_read_of_one_unit_at_a_time():
    run_ranks(2, export_is_a_read)


def arguments() -> None:
    model, plain = nested(seeded()), seeded()
    given = {"epoch": 3}
    result = model.state_dict(destination=given, prefix="model.")
    assert result is given
    assert list(result) == ["epoch", *plain.state_dict(prefix="model.")]
    kept = model.state_dict(keep_vars=True)
    assert all(value.requires_grad for value in kept.values())
    inner = model.layers[1].state_dict()
    assert list(inner) == ["scale", "linear.weight", "linear.bias"]
    assert torch.equal(inner["scale"], plain.layers[1].scale)


def test_prefix_destination_and_keep_vars_work_as_in_torch():
    run_ranks(2, arguments)


def loading_after_evaluation() -> None:
    plain, model = seeded(), nested(seeded())
    other = {name: value * 1.5 for name, value in plain.state_dict().items()}
    with torch.no_grad():
        model(my_part(whole_batch()))
    model.load_state_dict(other)
    plain.load_state_dict(other)
    with torch.no_grad():
        found, expected = model(whole_batch()), plain(whole_batch())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    mean_square(plain(whole_batch())).backward()
    mean_square(model(my_part(whole_batch()))).backward()
    assert_equal_gradients(model, plain)


def test_loading_leaves_no_stale_weights():
    run_ranks(2, loading_after_evaluation)


def optimizer_goes_on_after_loading() -> None:
    """Flat parameters are kept: an optimizer built before the load trains what was loaded."""
    plain, model = seeded(), nested(seeded())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    other = {name: value * 1.5 for name, value in plain.state_dict().items()}
    for assign in (False, True):
        model.load_state_dict(other, assign=assign)
        plain.load_state_dict(other)
        for optimizer in optimizers:
            optimizer.zero_grad()
        mean_square(plain(whole_batch())).backward()
        mean_square(model(my_part(whole_batch()))).backward()
        for optimizer in optimizers:
            optimizer.step()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-10, atol=1e-12)


def test_the_optimizer_keeps_working_after_a_load():
    run_ranks(2, optimizer_goes_on_after_loading)


def units_in_a_plain_model() -> None:
    plain, model = seeded(), seeded()
    model.layers[0], model.layers[2] = FSDP(model.layers[0]), FSDP(model.layers[2])
    state = model.state_dict()
    assert sorted(state) == sorted(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name
    other = {name: value * 2 for name, value in state.items()}
    model.load_state_dict(other)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other[name]), name


def test_units_inside_a_model_that_is_not_a_unit_save_and_load_too():
    run_ranks(2, units_in_a_plain_model)


class WithBuffers(nn.Module):
    """A persistent buffer, one that is not saved, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": int(self.count)}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.restored = state["version"]

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(x)


def buffers_and_extra_state() -> None:
    plain, model = WithBuffers().double(), FSDP(WithBuffers().double())
    model(my_part(whole_batch()))
    plain(whole_batch())
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert state["count"].item() == 1
    assert state["_extra_state"] == {"version": 1}
    other = FSDP(WithBuffers().double())
    other.load_state_dict(state)
    assert other.count.item() == 1
    assert other.restored == 1
    assert [name for name, _ in other.named_buffers()] == ["count", "scratch"]


def test_buffers_and_extra_state_travel_along():
    run_ranks(2, buffers_and_extra_state)


# ---------------------------------------------------------------- as on the plain model


class Recorder:
    """Hooks that note what they see and change the dict; the same on any model."""

    def __init__(self) -> None:
        self.seen: list[tuple] = []

    def before(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self.seen.append(("before", type(module).__name__, prefix, keep_vars))

    def after(self, module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
        mine = [key for key in state if key.startswith(prefix)]
        self.seen.append(("after", type(module).__name__, prefix, mine, dict(metadata)))
        if isinstance(module, nn.Linear):
            assert all(state[key].isfinite().all() for key in mine)
            state[prefix + "weight"] = state[prefix + "weight"].half()
            state[prefix + "norm"] = state[prefix + "weight"].norm()
            del state[prefix + "bias"]

    def watch(self, module: nn.Module) -> None:
        module.register_state_dict_pre_hook(self.before)
        module.register_state_dict_post_hook(partial(self.after))  # torch marks the object


def hooks_of_inner_modules(summoned: bool) -> None:
    plain, model, recorders = seeded(), seeded(), (Recorder(), Recorder())
    for one, recorder in zip((plain, model), recorders, strict=True):
        for part in (one, one.head, one.layers[1], one.layers[1].linear):
            recorder.watch(part)
    model = nested(model)
    expected = plain.state_dict(prefix="model.")
    with model.summon_full_params() if summoned else nullcontext():
        found = model.state_dict(prefix="model.")
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert found[name].dtype == value.dtype
    assert recorders[1].seen == recorders[0].seen
    assert found._metadata == expected._metadata


@pytest.mark.parametrize("summoned", [False, True])
def test_hooks_of_inner_modules_see_and_change_what_they_do_on_the_plain_model(summoned):
    run_ranks(2, hooks_of_inner_modules, summoned)


def hooks_of_the_wrapper() -> None:
    model, recorder = nested(seeded()), Recorder()
    for part in (model, model.layers[1]):
        recorder.watch(part)
    state = model.state_dict()
    inner = [key for key in state if key.startswith("layers.1.")]
    versions = {"version": 1}
    assert recorder.seen == [
        ("before", "FullyShardedDataParallel", "", False),
        ("before", "FullyShardedDataParallel", "layers.1.", False),
        ("after", "FullyShardedDataParallel", "layers.1.", inner, versions),
        ("after", "FullyShardedDataParallel", "", list(state), versions),
    ]
    model._register_state_dict_hook(lambda module, state, prefix, metadata: {"only": 1})
    assert model.state_dict() == {"only": 1}
    wrong = FSDP(nn.Linear(2, 2))
    wrong.register_state_dict_post_hook(lambda *_: {})
    with provokes(FSDP.state_dict, RuntimeError, match="in place"):
        wrong.state_dict()


def test_hooks_of_the_wrapper_run_with_the_units_own_prefix():
    run_ranks(2, hooks_of_the_wrapper)


class Abridged(Layer):
    """A module that has its own idea of its state dict."""

    def state_dict(self, *args, **kwargs) -> dict:
        result = super().state_dict(*args, **kwargs)
        return {key: value for key, value in result.items() if "scale" not in key}


def a_module_with_its_own_state_dict() -> None:
    plain = seeded(Abridged)
    assert list(FSDP(seeded(Abridged)).state_dict()) == list(plain.state_dict())


def test_a_state_dict_method_of_the_module_inside_is_respected():
    run_ranks(1, a_module_with_its_own_state_dict)


def types_and_memory() -> None:
    case = CASES["frozen"]
    plain, model = case.model(torch.float32), FSDP(case.model(torch.float32))
    kept, expected = model.state_dict(keep_vars=True), plain.state_dict(keep_vars=True)
    for name, value in expected.items():
        assert type(kept[name]) is type(value)
        assert kept[name].requires_grad == value.requires_grad, name
    tied = FSDP(CASES["tied"].model(torch.float32)).state_dict()
    assert tied["head.weight"].data_ptr() == tied["embedding.weight"].data_ptr()
    whole = FSDP(seeded())
    with whole.summon_full_params():
        inside = whole.state_dict()
        first = {name: value.clone() for name, value in inside.items()}
        with torch.no_grad():
            whole.head.weight.zero_()
        again = whole.state_dict()
    assert all(torch.equal(inside[name], value) for name, value in first.items())
    assert not again["head.weight"].any()


def test_values_have_the_plain_types_share_memory_if_tied_and_outlive_a_summon():
    run_ranks(2, types_and_memory)


def what_modules_find() -> None:
    model = nested(seeded(), sharding_strategy="SHARD_GRAD_OP")
    loss = mean_square(model(my_part(whole_batch())))
    linear = model.module.layers[0].module.linear
    weight = linear.weight
    model.state_dict()
    assert linear.weight is weight  # still whole, as the backward is to come
    loss.backward()
    assert linear.weight is not weight
    loss = mean_square(model(my_part(whole_batch())))
    model.load_state_dict(model.state_dict())
    assert linear.weight is not weight  # dropped, because what was gathered is stale


def test_modules_find_after_an_export_what_they_found_before():
    run_ranks(2, what_modules_find)
