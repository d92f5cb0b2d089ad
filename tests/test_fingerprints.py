"""Weights that ranks did not cut from the same draw never enter a forward."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ModuleWrapPolicy, errors, fingerprints
from fsdp_ref.fingerprints import FlatState, compare_initial_weights, find_objections, fingerprint
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import Layer, Stack, nested, one_unit

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)


# ---------------------------------------------------------------- one fingerprint


@given(
    st.lists(st.integers(0, 5), min_size=0, max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 3),
    st.integers(0, 2**31),
)
def test_equal_values_have_equal_fingerprints_wherever_they_lie(shape, dtype, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2, shape, generator=generator).to(dtype)
    numel = values.numel()
    somewhere = torch.zeros(numel + offset, dtype=dtype)[offset:].view(shape).copy_(values)
    strided = torch.zeros([*shape, 2], dtype=dtype)[..., 0].copy_(values)
    assert fingerprint(values).shape == (2,)
    assert torch.equal(fingerprint(values), fingerprint(somewhere))
    assert torch.equal(fingerprint(values), fingerprint(strided))
    if numel:
        other = values.clone()
        at = seed % numel
        other.view(-1)[at] = (values.view(-1)[at] == 0).to(dtype)
        assert not torch.equal(fingerprint(values), fingerprint(other))


def test_draws_of_two_seeds_differ_in_both_numbers_also_in_low_precision():
    for dtype in (torch.float32, torch.bfloat16):
        seen: list[set[int]] = [set(), set()]
        for seed in range(50):
            torch.manual_seed(seed)
            for numbers, number in zip(seen, fingerprint(torch.randn(33).to(dtype)), strict=True):
                numbers.add(int(number))
        assert [len(numbers) for numbers in seen] == [50, 50]


# ---------------------------------------------------------------- judging


def state(
    whole: object, shard: int = 0, *, written: bool = False, varied: bool = False, **groups: object
) -> FlatState:
    members = groups.get("groups", [[0, 1, 2]])
    return FlatState("unit 'x'", {"w": whole}, [shard, shard], written, varied, members)


def verdicts(*states: FlatState) -> list[str]:
    found = find_objections({rank: [one] for rank, one in enumerate(states)})
    return [type(error).__name__ + str(error) for error in found]


def test_the_minority_is_named_and_where_it_differs():
    same, other, meta = [[1, 1], False], [[2, 2], False], [[1, 1], True]
    assert verdicts(state(same), state(same), state(same)) == []
    (text,) = verdicts(state(same), state(other), state(same))
    assert "'w' with other values on rank 1 than on ranks 0, 2. " in text
    assert "seed all ranks alike" in text
    assert "sync_module_states=True" in text
    (text,) = verdicts(state(same), state(meta), state(meta))
    assert "'w' on meta on ranks 1, 2 and with values on rank 0. Give sync_module_states" in text
    (text,) = verdicts(state(None), state(same), state(same))
    assert "'w' loaded or written since on rank 0 and not on ranks 1, 2. " in text
    assert verdicts(state(None), state(None), state(None)) == []
    assert verdicts(state(meta), state(meta), state(meta)) == []


def test_equal_shards_are_refused_only_if_they_were_written_and_vary():
    def three(**how: object) -> list[str]:
        return verdicts(*(state([[1, 1], False], 7, **how) for _ in range(3)))

    assert three() == []
    assert three(written=True) == []  # constant, or very small
    (text,) = three(written=True, varied=True)
    assert text.startswith("IdenticalShardsError")
    assert "the same numbers in the shards of 'w' on ranks 0 to 2" in text
    drawn = [state([[rank, 0], False], rank, written=True, varied=True) for rank in range(3)]
    assert verdicts(*drawn) == []  # each rank with numbers of its own: as good as any draw


def test_copies_that_were_written_must_be_equal():
    alone = [[[rank], [0, 1, 2]] for rank in range(3)]
    equal = [state([[1, 1], False], 7, written=True, varied=True, groups=g) for g in alone]
    assert verdicts(*equal) == []
    odd = [*equal[:2], state([[1, 1], False], 8, written=True, varied=True, groups=alone[2])]
    (text,) = verdicts(*odd)
    assert "'w' written after wrapping, with other values on rank 2 than on ranks 0, 1" in text


# ---------------------------------------------------------------- on ranks


def build(seed: int) -> Stack:
    torch.manual_seed(seed)
    return Stack()


def step(model: FSDP) -> Tensor:
    return model(torch.ones(2, 5)).sum()


def wrap_by_policy(model: nn.Module, **arguments: object) -> FSDP:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Layer}), **arguments)


def refused(model: FSDP, match: str) -> str:
    with provokes(FSDP.forward, errors.InitialWeightsDifferError, match=match) as caught:
        step(model)
    return caught.message


def different_seeds(strategy: str, group: object, odd: int) -> str:
    rank = dist.get_rank()
    model = build(seed=int(rank == odd))
    model = wrap_by_policy(model, sharding_strategy=strategy, process_group=group)
    message = refused(model, "FSDP206")
    again = refused(model, "FSDP206")
    assert again == message, "nothing is let through the second time"
    return message


@pytest.mark.parametrize(
    ("ranks", "strategy", "group"),
    [
        (2, "FULL_SHARD", None),
        (3, "SHARD_GRAD_OP", None),
        (3, "NO_SHARD", None),
        (4, "HYBRID_SHARD", ("set2", "mod2")),
    ],
)
def test_ranks_with_seeds_of_their_own_are_refused_on_every_rank(ranks, strategy, group):
    odd = ranks - 1
    messages = run_ranks(ranks, different_seeds, strategy, group, odd)
    for rank, message in enumerate(messages):
        assert message.startswith(f"[rank {rank}] FSDP206 unit ")
        assert f"with other values on rank {odd}" in message
        assert "more parameters" in message


def one_parameter_differs() -> str:
    model = build(seed=0)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.layers[2].linear.bias[3] += 1e-7
    return refused(wrap_by_policy(model), "'linear.bias'")


def test_one_element_of_one_parameter_is_enough_and_is_named():
    for message in run_ranks(2, one_parameter_differs):
        assert "unit 'layers.2'" in message
        assert "'linear.bias' with other values on rank 1 than on rank 0. " in message


def equal_weights_of_all_kinds() -> None:
    for wrap in (nested, one_unit, wrap_by_policy):
        model = wrap(build(seed=0))
        step(model).backward()
        assert all(part._initial is None for part in FSDP.fsdp_modules(model)), "asked once"
    # Identical layers, as nn.TransformerEncoder makes them, give identical shards: that is fine.
    layer = build(seed=0).layers[0]
    shards = FSDP(nn.Sequential(copy.deepcopy(layer), copy.deepcopy(layer)))
    mine = next(shards.parameters()).detach()
    others = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(others, mine)
    assert torch.equal(*others)
    shards(torch.ones(2, 5))
    shards = FSDP(nn.Sequential(copy.deepcopy(layer), copy.deepcopy(layer)))
    shards.load_state_dict({name: v + 1 for name, v in shards.state_dict().items()})
    shards(torch.ones(2, 5))
    shards = FSDP(nn.Sequential(Layer(), Layer()))
    with shards.summon_full_params(), torch.no_grad():
        for own in shards.module:
            own.load_state_dict(layer.state_dict())
    shards(torch.ones(2, 5))
    # Weights of ones, and models that change their dtype, are no draw either.
    norm = FSDP(nn.LayerNorm(64))
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.fill_(2.0)
    norm(torch.ones(2, 64))
    FSDP(nn.Sequential(copy.deepcopy(layer), copy.deepcopy(layer))).double()(
        torch.ones(2, 5, dtype=torch.float64)
    )


def test_what_is_right_is_not_refused():
    run_ranks(2, equal_weights_of_all_kinds)


def experts_differ() -> None:
    model = build(seed=0)
    torch.manual_seed(dist.get_rank())
    model.layers[1] = FSDP(Layer(), process_group="self")
    torch.manual_seed(dist.get_rank() // 2)
    model.layers[2] = FSDP(Layer(), process_group="set2")
    step(FSDP(model)).backward()
    model = build(seed=0)
    torch.manual_seed(int(dist.get_rank() == 3))
    model.layers[2] = FSDP(Layer(), process_group="set2")
    message = refused(FSDP(model), "unit 'layers.2'")
    assert "on rank 3 than on rank 2" in message


def test_only_ranks_that_share_a_unit_have_to_agree_and_all_ranks_hear_of_it():
    run_ranks(4, experts_differ)


def after(cure: Callable[[FSDP], None]) -> None:
    model = wrap_by_policy(build(seed=dist.get_rank()))
    cure(model)
    step(model).backward()


def load(model: FSDP) -> None:
    model.load_state_dict(build(seed=3).state_dict())


def load_after_a_read(model: FSDP) -> None:
    model.state_dict()  # which checkpointing calls to learn the keys
    load(model)


def summon(model: FSDP) -> None:
    with model.summon_full_params(), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)


def reset(model: FSDP) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, Layer)):
            for parameter in module.parameters(recurse=False):
                nn.init.constant_(parameter, 0.25)

    model.apply(init)


def draw_own_numbers(model: FSDP) -> None:
    for parameter in model.parameters():
        parameter.data.normal_()  # with the rank's own seed


@pytest.mark.parametrize("cure", [load, load_after_a_read, summon, reset, draw_own_numbers])
def test_whole_values_given_before_the_first_forward_take_the_place_of_the_first_draw(cure):
    run_ranks(2, after, cure)


def load_on_one_rank() -> str:
    model = wrap_by_policy(build(seed=0))
    if dist.get_rank() == 0:
        load(model)
    return refused(model, "loaded or written since on rank 0 and")


def load_a_part() -> str:
    model = wrap_by_policy(build(seed=dist.get_rank()))
    part = {n: v for n, v in build(seed=3).state_dict().items() if "linear.weight" not in n}
    model.load_state_dict(part, strict=False)
    return refused(model, "'linear.weight' with other values")


def summon_one_unit() -> str:
    model = wrap_by_policy(build(seed=dist.get_rank()))
    with model.summon_full_params(), torch.no_grad():
        model.head.weight.fill_(1.0)
    return refused(model, "unit 'layers.0'")


def test_what_was_not_replaced_is_compared_all_the_same():
    run_ranks(2, load_on_one_rank)
    run_ranks(2, load_a_part)
    run_ranks(2, summon_one_unit)


def in_place(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.uniform_()


def by_data(parameter: nn.Parameter) -> None:
    parameter.data.uniform_()


def draw_on_shards(write: Callable[[nn.Parameter], None]) -> list[str]:
    model = wrap_by_policy(build(seed=0))
    torch.manual_seed(5)
    for parameter in model.parameters():
        write(parameter)
    with model.summon_full_params():
        looked_at = {name: value.sum() for name, value in model.named_parameters()}
    assert looked_at
    with provokes(FSDP.forward, errors.IdenticalShardsError, match="FSDP207") as caught:
        step(model)
    with model.summon_full_params(), torch.no_grad():
        torch.manual_seed(5)
        for parameter in model.parameters():
            parameter.uniform_()
    step(model).backward()
    units = [(part._unit, fingerprints.InitialWeights(part._unit, {})) for part in [model]]
    compare_initial_weights(units, model._unit.placement.groups)
    return [caught.message]


@pytest.mark.parametrize("write", [in_place, by_data])
def test_the_same_numbers_in_all_shards_are_refused_until_whole_weights_are_written(write):
    for (message,) in run_ranks(2, draw_on_shards, write):
        assert "unit 'layers.0'" in message
        assert "on ranks 0, 1" in message
        assert "summon_full_params" in message


def draw_with_options(arguments: dict[str, object]) -> None:
    model = FSDP(nn.Linear(8, 8, bias=False), **arguments)
    torch.manual_seed(3)
    for parameter in model.parameters():
        in_place(parameter)
    with provokes(FSDP.forward, errors.IdenticalShardsError, match="of 'weight' on ranks 0, 1"):
        model(torch.ones(1, 8))
    model.load_state_dict(nn.Linear(8, 8, bias=False).state_dict())
    model(torch.ones(1, 8)).sum().backward()


@pytest.mark.parametrize("arguments", [{"use_orig_params": True}, {"cpu_offload": True}])
def test_shards_that_the_user_sees_otherwise_are_compared_too(arguments):
    run_ranks(2, draw_with_options, arguments)


def draw_on_copies() -> str:
    model = FSDP(build(seed=0), sharding_strategy="NO_SHARD")
    torch.manual_seed(dist.get_rank())
    for parameter in model.parameters():
        in_place(parameter)
    return refused(model, "equal copies on ranks 0, 1")


def test_copies_with_numbers_of_their_own_are_refused():
    run_ranks(2, draw_on_copies)


def provoked_directly() -> None:
    rank = dist.get_rank()
    model = FSDP(nn.Linear(5, 5))
    model.state_dict()
    groups = model._unit.placement.groups
    own = {"weight": torch.tensor([rank, 0]), "bias": torch.tensor([0, 0])}
    initial = fingerprints.InitialWeights(model._unit, own)
    with provokes(compare_initial_weights, errors.InitialWeightsDifferError, match="'weight'"):
        compare_initial_weights([(model._unit, initial)], groups)
    model = FSDP(nn.Linear(9, 9))
    model.state_dict()
    for parameter in model.parameters():
        torch.manual_seed(0)
        in_place(parameter)
    with provokes(compare_initial_weights, errors.IdenticalShardsError, match="'weight', 'bias'"):
        compare_initial_weights([(model._unit, model._initial)], groups)
    if rank == 0:
        with provokes(compare_initial_weights, errors.SilentRanksError, match="rank 1 silent"):
            compare_initial_weights([(model._unit, model._initial)], groups)


def test_the_comparison_says_so_itself():
    run_ranks(2, provoked_directly, dist_timeout=3.0)


def count_passes() -> tuple[int, int]:
    torch.manual_seed(0)
    with torch.profiler.profile() as profile:
        model = FSDP(nn.Linear(5, 5))
        step(model)
    hashes = [event for event in profile.events() if event.name == "aten::hash_tensor"]
    to_host = [event for event in profile.events() if event.name == "aten::_local_scalar_dense"]
    return len(hashes), len(to_host)


def test_it_costs_one_pass_over_the_weights_and_one_over_the_shards_before_and_after():
    for hashes, _ in run_ranks(2, count_passes):
        assert hashes == 2 + 1 + 1
    for hashes, _ in run_ranks(1, count_passes):
        assert hashes == 0
