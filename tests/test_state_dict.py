"""State dicts have the plain model's names and values, and load at any number of ranks."""

import io

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


def strictness() -> None:
    model, before = nested(seeded()), seeded().state_dict()
    state = {name: value + 1 for name, value in before.items()}
    del state["layers.1.scale"]
    state["layers.9.scale"] = torch.ones(5)
    with provokes(FSDP.load_state_dict, RuntimeError) as caught:
        model.load_state_dict(state)
    assert "missing keys ['layers.1.scale']" in caught.message
    assert "unexpected keys ['layers.9.scale']" in caught.message
    assert "unit" in caught.message
    assert "strict=False" in caught.message
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["layers.1.scale"]
    assert result.unexpected_keys == ["layers.9.scale"]
    loaded = model.state_dict()
    for name, value in before.items():
        expected = value if name == "layers.1.scale" else value + 1
        assert torch.equal(loaded[name], expected), name


def test_missing_and_unexpected_keys_are_named_with_the_plain_names():
    run_ranks(2, strictness)


def wrong_shape() -> None:
    model, before = nested(seeded()), seeded().state_dict()
    state = dict(before)
    state["layers.2.linear.weight"] = torch.zeros(4, 5)
    with provokes(FSDP.load_state_dict, RuntimeError, match="layers.2.linear.weight") as caught:
        model.load_state_dict(state)
    assert "(5, 5)" in caught.message
    assert "(4, 5)" in caught.message


def test_a_wrong_shape_is_named():
    run_ranks(2, wrong_shape)


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
