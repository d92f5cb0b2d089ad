"""Small units share messages: fewer of them, the same bytes, the same numbers to the last bit."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ModuleWrapPolicy, Timeline, errors, timeline
from fsdp_ref.options import as_bucket_cap, as_options
from fsdp_ref.recording import live_unsharded_bytes
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import (
    WIDTH,
    Layer,
    Stack,
    assert_equal_gradients,
    assert_equal_weights,
    assert_sharded,
    mean_square,
    my_part,
    seeded,
    whole_batch,
)

DEPTH = 24  # one eighth are three layers: buckets of two, as the largest counts twice
UNIT_BYTES = 8 * 36  # 35 elements, padded to 36 on two and three ranks
SMALL = ModuleWrapPolicy({Layer})


def deep() -> nn.Module:
    return seeded(lambda: Stack(DEPTH))


def sharded(model: nn.Module | None = None, **arguments) -> FSDP:
    return FSDP(model or deep(), auto_wrap_policy=SMALL, **arguments)


def backward(model: nn.Module) -> Timeline:
    with timeline() as recorded:
        mean_square(model(my_part(whole_batch()))).backward()
    return recorded


def messages(recorded: Timeline, operation: str) -> int:
    return sum(e.operation == operation and not e.together_with for e in recorded.events)


def train(model: nn.Module, steps: int = 3) -> list[Timeline]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    recorded = []
    for _ in range(steps):
        optimizer.zero_grad()
        recorded.append(backward(model))
        optimizer.step()
    return recorded


def bits(model: FSDP) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def step_with_buckets() -> None:
    model = sharded()
    first, second, third = train(model)
    assert messages(first, "all-gather") == messages(first, "reduce-scatter") + DEPTH  # none yet
    assert messages(second, "all-gather") == 1 + DEPTH  # the root, half as many twice
    assert messages(second, "reduce-scatter") == 1 + DEPTH // 2
    assert third.lines() == second.lines()
    assert not second.summary(model).differences  # unit by unit, what a step has to send
    assert first.bytes_sent() == second.bytes_sent()
    together = {e.unit: e.together_with for e in second.events if e.together_with}
    assert together["layers.1"] == "layers.0"  # in the forward; the other way round before it
    assert {e.phase for e in second.events if e.operation == "reduce-scatter"} == {"post_backward"}
    assert_sharded(model)


def test_messages_are_fewer_and_what_they_carry_is_what_a_step_has_to_send():
    for ranks in (2, 3):
        run_ranks(ranks, step_with_buckets)


ARGUMENTS = [
    {},
    {"sharding_strategy": "SHARD_GRAD_OP"},
    {"backward_prefetch": None},
    {"backward_prefetch": "POST", "forward_prefetch": True},
    {"use_orig_params": True},
    {"cpu_offload": True},
    {"mixed_precision": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}},
    {"mixed_precision": {"param_dtype": torch.float16, "reduce_dtype": torch.float32}},
    {"sharding_strategy": "HYBRID_SHARD", "process_group": ("self", None)},
    {"sharding_strategy": "NO_SHARD"},
]


def same_bits_with_and_without() -> None:
    plain = deep()
    for arguments in ARGUMENTS:
        alone, joined = sharded(bucket_cap_mb=0, **arguments), sharded(**arguments)
        apart, together = train(alone), train(joined)
        assert all(map(torch.equal, bits(alone), bits(joined))), arguments
        for one, other in itertools.pairwise((apart[-1], together[-1])):
            assert one.bytes_sent() == other.bytes_sent(), arguments
        fewer = messages(together[-1], "all-gather") < messages(apart[-1], "all-gather")
        assert fewer == (joined._unit.placement.shard.size > 1), arguments
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        mean_square(plain(whole_batch())).backward()
        optimizer.step()
    model = sharded()
    train(model)
    assert_equal_weights(model, plain)


def test_numbers_are_the_same_to_the_last_bit_under_all_arguments():
    run_ranks(2, same_bits_with_and_without)
    run_ranks(3, same_bits_with_and_without)


def memory() -> None:
    for arguments, units in (({}, 2), ({"bucket_cap_mb": 12 * UNIT_BYTES / 1e6}, 12)):
        model = sharded(**arguments)
        *_, recorded = train(model)
        root = 8 * (2 * WIDTH + 2)
        cap = max(UNIT_BYTES * DEPTH / 8, UNIT_BYTES * units)
        assert recorded.peak_unsharded_bytes <= root + 2 * cap
        assert recorded.peak_unsharded_bytes > root + 2 * UNIT_BYTES  # or nothing was shared
        assert recorded.events[-1].live_unsharded_bytes == 0


def test_memory_stays_below_the_root_and_twice_the_cap():
    for ranks in (2, 3):
        run_ranks(ranks, memory)


def caps() -> None:
    for cap, count in ((0, DEPTH), (1000, 1), (UNIT_BYTES * 5 / 1e6, 6)):
        model = sharded(bucket_cap_mb=cap)
        train(model, 2)
        assert messages(backward(model), "reduce-scatter") == 1 + count, cap


def test_the_cap_can_be_given():
    run_ranks(2, caps)


@pytest.mark.parametrize("cap", [-1, "25", True, float("nan")])
def test_a_cap_that_is_none_is_refused(cap):
    with provokes(as_bucket_cap, errors.OptionError, match="unit 'x', bucket_cap_mb"):
        as_bucket_cap(cap, "unit 'x'")
    with provokes(as_options, errors.OptionError, match="bucket_cap_mb"):
        as_options({"bucket_cap_mb": cap}, "unit 'x'")


class Wayward(nn.Module):
    """Layers in an order that a flag changes: some are left out, one comes twice, some repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(DEPTH)])
        self.head = nn.Linear(WIDTH, 2)
        self.way = "straight"

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "checkpointed":
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
        elif self.way == "segments":
            for index in range(0, DEPTH, 6):
                part = nn.Sequential(*self.layers[index : index + 6])
                x = checkpoint(part, x.requires_grad_(), use_reentrant=True)
        else:
            for layer in self.order():
                x = layer(x)
        return self.head(x)

    def order(self) -> list[nn.Module]:
        layers = list(self.layers)
        return {
            "straight": layers,
            "backwards": layers[::-1],
            "some": layers[::3],
            "twice": [*layers, *layers[:5]],
            "one by one twice": [layer for layer in layers for _ in range(2)],
        }[self.way]


WAYS = ["straight", "backwards", "some", "twice", "one by one twice", "checkpointed", "segments"]


def wayward() -> None:
    for cap in (None, 1.0):
        model, plain = sharded(seeded(Wayward), bucket_cap_mb=cap), seeded(Wayward)
        backward(model)
        for way in WAYS:
            model.zero_grad()
            plain.zero_grad()
            model.module.way = plain.way = way
            backward(model)
            mean_square(plain(whole_batch())).backward()
            assert live_unsharded_bytes() == 0  # also of those that came along and were not needed
            assert_equal_gradients(model, plain)
            assert_sharded(model)


def reduced_at_once() -> None:
    model = sharded(seeded(Wayward), bucket_cap_mb=UNIT_BYTES * 7 / 1e6)  # six share a message
    backward(model)
    model.module.way = "some"  # two of six
    lines = backward(model).lines("reduce-scatter", "reshard")
    assert lines.index("reduce-scatter layers.18") < lines.index(
        "reshard layers.12", len(lines) // 2
    )


def test_units_do_not_wait_for_neighbours_that_did_not_run():
    run_ranks(2, reduced_at_once)


def test_orders_that_buckets_do_not_know():
    for ranks in (2, 3):
        run_ranks(ranks, wayward)


def accumulated() -> None:
    """Some gradients from before, inside no_sync, of units that the last backward leaves out."""
    model, plain = sharded(seeded(Wayward)), seeded(Wayward)
    backward(model)
    model.zero_grad()
    with model.no_sync():
        backward(model)
    mean_square(plain(whole_batch())).backward()
    model.module.way = plain.way = "some"
    backward(model)
    mean_square(plain(whole_batch())).backward()
    assert_equal_gradients(model, plain)
    assert_sharded(model)


def test_what_was_kept_from_no_sync_leaves_too():
    for ranks in (2, 3):
        run_ranks(ranks, accumulated)


class Forked(nn.Module):
    """The inputs of a branch need a gradient on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(DEPTH)])

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum() * 0
        for index, layer in enumerate(self.layers):
            mine = (index + dist.get_rank()) % 3
            given = x.clone().requires_grad_() if mine == 0 else x
            y = layer(given)
            total = total + (y.square().mean() if mine != 1 else 0 * y.detach().sum())
        return total


def forked() -> None:
    gradients = []
    for cap in (0, None, 1.0):
        model = sharded(seeded(Forked), bucket_cap_mb=cap)
        for _ in range(3):
            model.zero_grad()
            model(my_part(whole_batch())).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        assert_sharded(model)
    for others in gradients[1:]:
        assert all(map(torch.equal, gradients[0], others))


def test_ranks_that_reach_different_units_in_a_backward():
    for ranks in (2, 3):
        run_ranks(ranks, forked)


def evaluated_then_stepped() -> None:
    model, plain = sharded(sharding_strategy="SHARD_GRAD_OP"), deep()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    x = my_part(whole_batch())
    for _ in range(3):
        for one, optimizer, batch in zip(
            (model, plain), optimizers, (x, whole_batch()), strict=True
        ):
            with torch.no_grad():
                one(batch)
            optimizer.zero_grad()
            mean_square(one(batch)).backward()
            optimizer.step()
        torch.testing.assert_close(model(x), plain(x))
    model.unshard(recurse=True)  # by hand: every unit for itself
    assert all(part._unit.state.name == "UNSHARDED" for part in FSDP.fsdp_modules(model))
    model.reshard()
    assert_sharded(model)


def test_weights_gathered_together_are_never_stale():
    run_ranks(2, evaluated_then_stepped)


class Breaking(Stack):
    """Fails in the middle of a bucket when asked to."""

    def __init__(self) -> None:
        super().__init__(DEPTH)
        self.breaks = False

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if self.breaks and index == 4:
                raise ValueError("broken")
        return self.head(x)


def broken_forward() -> None:
    model, plain = sharded(seeded(Breaking)), seeded(Breaking)
    backward(model)
    model.zero_grad()
    model.module.breaks = True
    with pytest.raises(ValueError, match="broken"), timeline() as recorded:
        model(my_part(whole_batch()))
    model.module.breaks = False
    assert_sharded(model)
    assert recorded.peak_unsharded_bytes > 0
    backward(model)
    mean_square(plain(whole_batch())).backward()
    assert_equal_gradients(model, plain)


def test_an_exception_in_the_middle_of_a_bucket_leaves_nothing_behind():
    run_ranks(2, broken_forward)


def frozen_and_copied() -> None:
    """Flat parameters of several kinds, freezing in between, and a copy of the model."""
    plain = deep()
    for index, layer in enumerate(plain.layers):
        layer.linear.requires_grad_(index % 4 != 0)
        layer.scale.requires_grad_(index % 5 != 0)
        layer.register_parameter("spare", nn.Parameter(torch.ones(3)))
    model = sharded(copy.deepcopy(plain))
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        backward(model)
        mean_square(plain(whole_batch())).backward()
        assert_equal_gradients(model, plain)
    twin = copy.deepcopy(model)
    for one in (twin, model):
        for _ in range(2):
            one.zero_grad()
            backward(one)
        assert_equal_gradients(one, plain)


def test_units_of_several_kinds_freezing_and_copies():
    for ranks in (2, 3):
        run_ranks(ranks, frozen_and_copied)


def with_a_hook() -> None:
    calls = []

    def hook(state: list[int], gradient: Tensor, shard: Tensor | None = None) -> None:
        state.append(gradient.numel())
        output = gradient if shard is None else shard
        total = gradient.clone()
        dist.all_reduce(total)
        output.copy_(total.chunk(dist.get_world_size())[dist.get_rank()])

    model = sharded()
    backward(model)
    model.register_comm_hook(calls, hook)
    backward(model)
    assert len(calls) == 1 + DEPTH


def test_a_hook_registered_later_gets_every_unit():
    run_ranks(2, with_a_hook)


def groups() -> None:
    """Neighbours in other groups do not share messages; those in one group do."""
    model = deep()
    words = itertools.cycle(["set2", "set2", "set2", "mod2", "mod2", None])
    given = {id(layer): word for layer, word in zip(model.layers, words, strict=False)}
    model = FSDP(
        model,
        auto_wrap_policy=lambda m: {"process_group": given[id(m)]} if id(m) in given else False,
        bucket_cap_mb=1,
    )
    train(model, 1)
    recorded = backward(model)
    for event in recorded.events:
        if event.together_with:
            sender = next(e for e in recorded.events if e.unit == event.together_with)
            assert sender.group == event.group
    assert messages(recorded, "reduce-scatter") == 1 + DEPTH // 2  # three kinds for six layers
    assert not recorded.summary(model).differences


def test_only_units_of_one_group_share_messages():
    run_ranks(4, groups)
