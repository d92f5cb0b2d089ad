"""Sharding strategies: which ranks share and copy a unit, what is sent, and equal training."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

import fsdp_ref
from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ModuleWrapPolicy, errors, strategies, timeline
from tests.parity.training import OPTIMIZERS, full_weights
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import Layer, assert_equal_weights, mean_square, my_part, seeded, whole_batch

PAIR = ("set2", "mod2")
PLAIN = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
HYBRID = ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
POLICY = ModuleWrapPolicy({Layer})


def wrapped(**arguments):
    return FSDP(seeded(), auto_wrap_policy=POLICY, **arguments)


def train_beside_plain(optimizer_name, arguments):
    plain, model = seeded(), wrapped(**arguments)
    one = OPTIMIZERS[optimizer_name](plain.parameters())
    other = OPTIMIZERS[optimizer_name](model.parameters())
    for _ in range(3):
        one.zero_grad()
        other.zero_grad()
        mean_square(plain(whole_batch())).backward()
        mean_square(model(my_part(whole_batch()))).backward()
        true_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(model.clip_grad_norm_(0.1), true_norm)
        one.step()
        other.step()
    assert_equal_weights(model, plain)
    return {name: value.sum().item() for name, value in full_weights(model).items()}


@pytest.mark.parametrize("optimizer_name", ["sgd", "adamw"])
@pytest.mark.parametrize("strategy", PLAIN)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_strategy_trains_like_plain_pytorch(world_size, strategy, optimizer_name):
    run_ranks(world_size, train_beside_plain, optimizer_name, {"sharding_strategy": strategy})


@pytest.mark.parametrize("strategy", HYBRID)
def test_hybrid_strategies_train_like_plain_pytorch_and_copies_stay_equal(strategy):
    arguments = {"sharding_strategy": strategy, "process_group": PAIR}
    sums = run_ranks(4, train_beside_plain, "adamw", arguments)
    assert sums[0] == sums[1] == sums[2] == sums[3]


def hybrid_over_hosts():
    """Without a group: one host shares, ranks of equal local rank copy."""
    return train_beside_plain("sgd", {"sharding_strategy": "hybrid_shard"})


def test_hybrid_takes_hosts_by_default():
    run_ranks(4, hybrid_over_hosts, env={"LOCAL_WORLD_SIZE": "2"})


def from_mesh(shape, names, strategy):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = wrapped(sharding_strategy=strategy, device_mesh=mesh)
    placement = model._unit.placement
    copied = placement.replicate.ranks if placement.replicate else None
    train_beside_plain("sgd", {"sharding_strategy": strategy, "device_mesh": mesh})
    return placement.shard.ranks, copied


def test_a_mesh_says_who_shares_and_who_copies():
    assert run_ranks(2, from_mesh, (2,), ("shard",), "FULL_SHARD")[1] == ((0, 1), None)
    two = run_ranks(4, from_mesh, (2, 2), ("replicate", "shard"), "HYBRID_SHARD")
    assert two == [((0, 1), (0, 2)), ((0, 1), (1, 3)), ((2, 3), (0, 2)), ((2, 3), (1, 3))]


def events(arguments):
    model = wrapped(**arguments)
    with timeline() as recorded:
        loss = mean_square(model(my_part(whole_batch())))
        between = recorded.events[-1].live_unsharded_bytes
        loss.backward()
    count = {
        operation: len(recorded.lines(operation))
        for operation in ("all-gather", "reduce-scatter", "all-reduce")
    }
    return count, between, recorded.peak_unsharded_bytes


def test_what_is_kept_after_the_forward_is_not_gathered_again():
    # Three layers and the root; the root is never gathered twice.
    full, _, _ = run_ranks(2, events, {"sharding_strategy": "FULL_SHARD"})[0]
    kept, between, peak = run_ranks(2, events, {"sharding_strategy": "SHARD_GRAD_OP"})[0]
    assert (full["all-gather"], kept["all-gather"]) == (7, 4)
    assert between == peak  # all units are whole between forward and backward
    assert full["reduce-scatter"] == kept["reduce-scatter"] == 4


def test_copies_are_averaged_by_one_all_reduce_a_unit():
    single, _, _ = run_ranks(4, events, {"sharding_strategy": "FULL_SHARD"})[0]
    arguments = {"sharding_strategy": "HYBRID_SHARD", "process_group": PAIR}
    hybrid, _, _ = run_ranks(4, events, arguments)[0]
    assert single["all-reduce"] == 1  # the exchange at the end of the backward
    assert hybrid["all-reduce"] == 4 + 2  # one a unit, and the exchange over both groups


def different_edits():
    model = wrapped(sharding_strategy="HYBRID_SHARD", process_group=PAIR)
    before = full_weights(model)
    edit = float(dist.get_rank() // 2)  # equal within a copy, different between copies

    def write_something_else_in_each_copy():
        with model.summon_full_params():
            for parameter in model.parameters():
                parameter.data.fill_(edit)

    with pytest.raises(errors.SummonDisagreementError):
        write_something_else_in_each_copy()
    after = full_weights(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_edits_that_differ_between_copies_are_refused():
    run_ranks(4, different_edits)


def test_words_enums_and_none_name_a_strategy():
    for name in (*PLAIN, *HYBRID):
        assert strategies.strategy_name(ShardingStrategy[name], "unit 'x'") == name
        assert strategies.strategy_name(name.lower(), "unit 'x'") == name
    assert strategies.strategy_name(None, "unit 'x'") == "FULL_SHARD"


def refusals():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with provokes(
        strategies.strategy_name, errors.StrategyError, match="Did you mean 'FULL_SHARD'"
    ):
        strategies.strategy_name("full_shrad", "unit 'x'")
    with provokes(strategies.place, errors.StrategyError, match="one group for FULL_SHARD"):
        strategies.place("FULL_SHARD", ("self", "node"), where="unit 'x'")
    with provokes(strategies.place, errors.StrategyError, match="one group for NO_SHARD"):
        strategies.place("NO_SHARD", (None, "self"), where="unit 'x'")
    size = dist.get_world_size()
    meshes = [init_device_mesh("cpu", (1,) * more + (size,)) for more in (1, 2)]
    for arguments in ({"device_mesh": meshes[0]}, {"process_group": meshes[0]}):
        with provokes(strategies.place, errors.StrategyError, match="a pair of groups"):
            strategies.place(where="unit 'x'", **arguments)
    for strategy in ("FULL_SHARD", "HYBRID_SHARD"):
        with provokes(strategies.place, errors.StrategyError, match="found 3 dimensions"):
            strategies.place(strategy, where="unit 'x'", device_mesh=meshes[1])
    elsewhere = DeviceMesh("cpu", [[0]])
    if dist.get_rank() == 1:
        with provokes(strategies.place, errors.GroupMembershipError, match="mesh of the ranks"):
            strategies.place("HYBRID_SHARD", where="unit 'x'", device_mesh=elsewhere)
    with provokes(strategies.place, errors.GroupWordError, match="choose HYBRID_SHARD"):
        strategies.place("FULL_SHARD", ([0, 1], [0]), where="unit 'x'")
    with provokes(strategies.place, errors.StrategyError, match="found both"):
        strategies.place("FULL_SHARD", "self", where="unit 'x'", device_mesh=mesh)
    with provokes(strategies.place, errors.StrategyError, match="a pair of groups"):
        strategies.place("HYBRID_SHARD", "set1", where="unit 'x'")
    with provokes(strategies.place, errors.GroupWordError, match="share this rank only"):
        strategies.place("HYBRID_SHARD", ("set2", "set2"), where="unit 'x'")
    with provokes(strategies.place, errors.GroupWordError):
        strategies.place("FULL_SHARD", "set7", where="unit 'x'")
    with provokes(strategies.place, errors.GroupMembershipError):
        strategies.place("FULL_SHARD", [1 - dist.get_rank()], where="unit 'x'")
    with provokes(fsdp_ref.FullyShardedDataParallel, errors.StrategyError, match=r"\[rank"):
        fsdp_ref.FullyShardedDataParallel(seeded(), sharding_strategy="zero3")


def test_what_does_not_fit_is_refused_on_every_rank():
    run_ranks(2, refusals)


def per_unit():
    model = seeded()
    kept = model.layers[1]

    def policy(module):
        if module is kept:
            return {"sharding_strategy": "SHARD_GRAD_OP"}
        return isinstance(module, Layer)

    model = FSDP(model, auto_wrap_policy=policy)
    with timeline() as recorded:
        mean_square(model(my_part(whole_batch()))).backward()
    return recorded.lines("all-gather")


def test_a_policy_may_choose_another_strategy_for_one_unit():
    lines = run_ranks(2, per_unit)[0]
    assert lines.count("all-gather layers.0") == lines.count("all-gather layers.2") == 2
    assert lines.count("all-gather layers.1") == 1
