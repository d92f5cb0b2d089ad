"""Initial weights are the same on every rank: sent, drawn alike, or refused."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchPolicy

from fsdp_ref import (
    CustomPolicy,
    ModuleWrapPolicy,
    auto_wrap,
    collectives,
    errors,
    initialize,
    strategies,
    timeline,
)
from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref.rank_group import RankGroup
from tests.parity.training import full_weights
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.test_deferred import Block, Silent, Tied, everything, on_meta
from tests.toy import (
    Layer,
    Stack,
    assert_equal_weights,
    mean_square,
    my_part,
    nested,
    one_unit,
    three_deep,
    whole_batch,
)

# ---------------------------------------------------------------- broadcast of plain modules


def equal_everywhere(values: dict[str, Tensor]) -> bool:
    mine = [value.tolist() for value in values.values()]
    every: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return all(other == every[0] for other in every)


def odd_model(seed: int) -> nn.Module:
    """Buffers, dtypes and layouts that are not the usual ones, and a tie."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), Tied())
    model[0].weight = nn.Parameter(torch.randn(3, 2).t())
    model[1].running_mean.normal_()
    model[1].num_batches_tracked.fill_(seed)
    model.register_buffer("mask", torch.rand(3) > 0.5)
    model.register_buffer("low", torch.randn(2, dtype=torch.bfloat16))
    model.register_buffer("rotation", torch.randn(2, dtype=torch.complex64))
    model.register_buffer("nothing", torch.empty(0))
    model.register_buffer("one", torch.randn(1, 2)[:, 1])  # contiguous, with a stride of 2
    return model


def send_odd_model(strategy: str, group: object, source: int) -> None:
    model = odd_model(seed=7 + dist.get_rank())
    expected = odd_model(seed=7 + source)
    placement = strategies.place(strategy, group, where="unit 'model'")
    objects = everything(model)
    with timeline() as recorded:
        initialize.broadcast_initial(model, placement, name="model")
    for name, value in everything(model).items():
        assert value is objects[name], "values are written in place"
        assert torch.equal(value, everything(expected)[name]), name
    assert model[2].head.weight is model[2].embedding.weight
    sent = torch.tensor(recorded.bytes_sent("broadcast"))
    dist.all_reduce(sent)
    receivers = dist.get_world_size() - 1
    total = sum(value.nbytes for value in {id(v): v for v in everything(model).values()}.values())
    assert sent.item() == receivers * total, "every rank receives once"


def test_all_ranks_get_the_values_of_the_first_one_by_live_groups_and_without():
    for ranks in (2, 3, 4):
        run_ranks(ranks, send_odd_model, "FULL_SHARD", None, 0)  # the default group is live
        run_ranks(ranks, send_odd_model, "NO_SHARD", None, 0)
        run_ranks(ranks, send_odd_model, "FULL_SHARD", list(range(ranks)), 0)  # not created
    run_ranks(4, send_odd_model, "HYBRID_SHARD", ("set2", "mod2"), 0)
    run_ranks(1, send_odd_model, "FULL_SHARD", None, 0)


def send_in_halves() -> None:
    rank = dist.get_rank()
    model = odd_model(seed=rank)
    placement = strategies.place(None, "set2", where="unit 'model'")
    initialize.broadcast_initial(model, placement, name="model")
    expected = odd_model(seed=rank // 2 * 2)
    assert torch.equal(model[0].weight, expected[0].weight)


def test_a_unit_of_some_ranks_gets_the_values_of_the_first_of_these():
    run_ranks(4, send_in_halves)


def send_to_ranks_on_meta() -> None:
    calls: list[nn.Module] = []
    torch.manual_seed(3)
    first = dist.get_rank() == 0

    def build() -> nn.Sequential:
        return nn.Sequential(Block(), Silent())

    model = build() if first else on_meta(build)
    if first:
        nn.init.ones_(model[1].table)
    placement = strategies.place(None, where="unit 'model'")
    initialize.broadcast_initial(model, placement, calls.append, name="model")
    assert calls == [], "nothing is initialised, only sent"
    assert equal_everywhere(everything(model))
    assert (model[1].table == 1).all()
    # Half of it on meta on the first rank, too: that half is initialised, on every rank.
    model = nn.Sequential(on_meta(Block), build() if first else on_meta(build))
    if first:
        nn.init.ones_(model[1][1].table)
    initialize.broadcast_initial(model, placement, name="model")
    assert equal_everywhere(everything(model))
    assert (model[1][1].table == 1).all()


def test_ranks_on_meta_get_memory_and_then_the_values():
    run_ranks(3, send_to_ranks_on_meta)


def all_on_meta(strategy: str, group: object) -> tuple[list[float], float]:
    torch.manual_seed(dist.get_rank())
    model = on_meta(lambda: nn.Sequential(Block(), nn.Linear(2, 2)))
    placement = strategies.place(strategy, group, where="unit 'model'")
    initialize.broadcast_initial(model, placement, name="model")
    return everything(model)["0.scale"].tolist(), torch.rand(1).item()


def test_where_all_are_on_meta_every_rank_draws_and_the_first_draw_counts():
    found = run_ranks(4, all_on_meta, "HYBRID_SHARD", ("set2", "mod2"))
    assert all(weights == found[0][0] for weights, _ in found)
    assert len({after for _, after in found}) == 4  # the generators went on from their own seeds


def test_no_rank_sends_to_more_than_a_few_others_and_everybody_is_reached():
    for size in range(1, 34):
        reached = [0]
        for rank in range(size):
            group = RankGroup(tuple(range(size)), rank)
            targets = collectives._targets_in_tree(group)
            assert len(targets) <= size.bit_length()
            assert all(target & (target - 1) == rank for target in targets)
            reached += targets
        assert sorted(reached) == list(range(size))


# ---------------------------------------------------------------- broadcast: refusals


def disagree(strategy: str, group: object) -> str:
    odd = dist.get_rank() == dist.get_world_size() - 1
    placement = strategies.place(strategy, group, where="unit 'model'")
    with provokes(
        initialize.broadcast_initial, errors.RankDisagreementError, match="sync_module_states"
    ) as caught:
        initialize.broadcast_initial(nn.Linear(3, 4 if odd else 2), placement, name="model")
    other = nn.Linear(2, 2, dtype=torch.float64 if odd else None)
    with provokes(initialize.broadcast_initial, errors.RankDisagreementError, match="float64"):
        initialize.broadcast_initial(other, placement, name="model")
    with provokes(initialize.broadcast_initial, errors.RankDisagreementError, match="'b'"):
        initialize.broadcast_initial(nn.Linear(2, 2), placement, name="b" if odd else "a")
    return caught.message


def test_ranks_that_differ_in_structure_get_an_error_at_once():
    began = time.monotonic()
    messages = run_ranks(2, disagree, "FULL_SHARD", None)
    assert all("rank 1 with `parameter 'weight' (4, 3)" in text for text in messages)
    for text in run_ranks(4, disagree, "HYBRID_SHARD", ("set2", "mod2")):
        assert "rank 3 with `parameter 'weight' (4, 3)" in text
    assert time.monotonic() - began < 15, "nobody waited for a time limit"


def stay_silent() -> None:
    if dist.get_rank() == 1:
        return
    placement = strategies.place(None, where="unit 'model'")
    with provokes(initialize.broadcast_initial, errors.SilentRanksError, match="rank 1 silent"):
        initialize.broadcast_initial(nn.Linear(2, 2), placement, name="model")


def test_a_rank_that_does_not_take_part_is_named():
    run_ranks(2, stay_silent, dist_timeout=4.0)


def nothing_to_send() -> None:
    placement = strategies.place(None, where="unit 'model'")
    with provokes(initialize.broadcast_initial, errors.NoValuesError, match="'table' of Silent"):
        initialize.broadcast_initial(on_meta(Silent), placement, name="model")
    with provokes(initialize.broadcast_initial, errors.OptionError, match="param_init_fn"):
        initialize.broadcast_initial(on_meta(Block), placement, "normal", name="model")


def test_what_no_rank_has_values_for_is_refused_on_every_rank():
    run_ranks(2, nothing_to_send)


def lose_a_peer() -> str:
    group = RankGroup((0, 1), dist.get_rank())
    if dist.get_rank() == 1:
        return ""
    placement = strategies.place(None, [0, 1], where="unit 'model'")
    assert placement.shard.process_group is None
    with (
        provokes(collectives.explained, errors.SilentRanksError) as caught,
        collectives.explained("unit 'model', broadcast", [group]),
    ):
        collectives.broadcast([torch.ones(3)], RankGroup((1, 0), 1))
    return caught.message


def test_a_peer_that_is_lost_on_the_way_becomes_an_error_of_ours():
    message = run_ranks(2, lose_a_peer, dist_timeout=4.0)[0]
    assert re.search(r"unit 'model', broadcast.*\[0, 1\] to take part", message)


# ---------------------------------------------------------------- wrapped models


class Resettable(Layer):
    """A layer that can initialise what it holds."""

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale)


def resettable() -> Stack:
    model = Stack()
    model.layers = nn.ModuleList([Resettable() for _ in range(3)])
    return model.double()


def per_layer(model: nn.Module, **arguments: object) -> FSDP:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Resettable}), **arguments)


def train_and_compare(model: FSDP, plain: nn.Module) -> None:
    """Two steps of the sharded and of the plain model stay together. Collective."""
    batch = whole_batch()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        mean_square(model(my_part(batch))).backward()
        mean_square(plain(batch)).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_equal_weights(model, plain)


def from_meta_as_the_plain_model() -> None:
    for wrap in (FSDP, per_layer):
        for use_orig_params in (False, True):
            torch.manual_seed(2)
            model = wrap(on_meta(resettable), use_orig_params=use_orig_params)
            plain = resettable()
            plain.load_state_dict(model.state_dict())
            train_and_compare(model, plain)


def test_a_model_from_meta_trains_like_the_plain_model_with_its_weights():
    for ranks in (1, 2, 3):
        run_ranks(ranks, from_meta_as_the_plain_model)


def init_like_torch_says(module: nn.Module) -> None:
    module.to_empty(device=torch.device("cpu"), recurse=False)
    if isinstance(module, (nn.Linear, Resettable)):
        module.reset_parameters()


def same_numbers_as_torch() -> None:
    for by_class in (None, {Resettable}):
        torch.manual_seed(4)
        ours = FSDP(
            on_meta(resettable),
            auto_wrap_policy=by_class and ModuleWrapPolicy(by_class),
            param_init_fn=init_like_torch_says,
        )
        torch.manual_seed(4)
        theirs = TorchFSDP(
            on_meta(resettable),
            auto_wrap_policy=by_class and TorchPolicy(by_class),
            param_init_fn=init_like_torch_says,
            device_id=torch.device("cpu"),
        )
        expected, found = theirs.state_dict(), full_weights(ours)
        assert list(expected) == list(found)
        assert all(torch.equal(expected[name], value) for name, value in found.items())


def test_param_init_fn_gives_the_numbers_that_it_gives_in_torch():
    run_ranks(2, same_numbers_as_torch)


WRAPPINGS = {"one unit": one_unit, "nested": nested, "three deep": three_deep}


def seeded_weights(wrapping: str, strategy: str) -> dict[str, Tensor]:
    calls: list[nn.Module] = []
    model = on_meta(resettable)
    init = initialize.seeded(model, seed=11)
    torch.manual_seed(dist.get_rank())  # of no consequence
    before = torch.get_rng_state()

    def counting(module: nn.Module) -> None:
        calls.append(module)
        init(module)

    def wrap(module: nn.Module) -> FSDP:
        return FSDP(module, param_init_fn=counting, sharding_strategy=strategy)

    if wrapping == "policy":
        sharded = per_layer(model, param_init_fn=counting, sharding_strategy=strategy)
    elif wrapping == "one unit":
        sharded = wrap(model)
    else:
        for index, layer in enumerate(model.layers):
            layer.linear = wrap(layer.linear)
            model.layers[index] = wrap(layer)
        sharded = wrap(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(calls) == len(set(calls)), "every module once"
    assert not any(value.is_meta or value.isnan().any() for value in full_weights(sharded).values())
    sharded(my_part(whole_batch()))  # all ranks agree
    return full_weights(sharded)


def test_seeded_weights_are_the_same_bits_for_every_number_of_ranks_and_every_wrapping():
    expected = run_ranks(1, seeded_weights, "one unit", "FULL_SHARD")[0]
    assert expected["layers.0.linear.weight"].unique().numel() == 25
    for ranks, wrapping, strategy in [
        (1, "policy", "FULL_SHARD"),
        (2, "one unit", "FULL_SHARD"),
        (2, "policy", "NO_SHARD"),
        (3, "policy", "SHARD_GRAD_OP"),
        (3, "three deep", "FULL_SHARD"),
        (4, "one unit", "FULL_SHARD"),
        (4, "three deep", "NO_SHARD"),
    ]:
        for found in run_ranks(ranks, seeded_weights, wrapping, strategy):
            assert list(found) == list(expected)
            assert all(torch.equal(value, expected[name]) for name, value in found.items())


def memory_while_wrapping() -> tuple[int, int]:
    model = on_meta(resettable)
    largest = 0

    def watching(module: nn.Module) -> None:
        nonlocal largest
        init_like_torch_says(module)
        storages = {
            value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
            for value in model.parameters()
            if not value.is_meta
        }
        largest = max(largest, sum(storages.values()))

    whole = sum(value.nbytes for value in model.parameters())
    per_layer(model, param_init_fn=watching)
    return largest, whole


def test_no_more_than_one_whole_unit_is_in_memory_while_a_model_is_wrapped():
    one_layer = 35 * 8
    for largest, whole in run_ranks(4, memory_while_wrapping):
        shards = whole // 4 + 4 * 8
        assert one_layer < largest <= one_layer + shards < whole


# ---------------------------------------------------------------- sync_module_states


def send_from_the_first_rank(strategy: str, group: object) -> None:
    first = dist.get_rank() == 0
    torch.manual_seed(dist.get_rank())
    model = per_layer(
        resettable() if first else on_meta(resettable),
        sync_module_states=True,
        sharding_strategy=strategy,
        process_group=group,
    )
    torch.manual_seed(0)
    plain = resettable()
    for name, value in full_weights(model).items():
        assert torch.equal(value, plain.state_dict()[name]), name
    train_and_compare(model, plain)


def test_the_first_rank_may_hold_the_weights_while_the_others_are_on_meta():
    run_ranks(1, send_from_the_first_rank, "FULL_SHARD", None)
    run_ranks(3, send_from_the_first_rank, "FULL_SHARD", None)
    run_ranks(2, send_from_the_first_rank, "NO_SHARD", None)
    run_ranks(2, send_from_the_first_rank, "FULL_SHARD", [0, 1])
    run_ranks(4, send_from_the_first_rank, "HYBRID_SHARD", ("set2", "mod2"))


class WithBuffers(nn.Sequential):
    """Batch norm, whose running statistics are buffers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 4), nn.BatchNorm1d(4))


def send_buffers() -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = WithBuffers()
    model[1].running_mean.fill_(rank + 1.0)
    model = FSDP(model, sync_module_states=True)
    assert (model[1].running_mean == 1.0).all()
    model = WithBuffers()
    torch.manual_seed(0)
    nn.init.normal_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    model[1].running_mean.fill_(rank + 1.0)
    model = FSDP(model)
    model(torch.ones(3, 5))  # buffers may differ: they belong to each rank


def test_buffers_are_sent_along_and_otherwise_left_to_each_rank():
    run_ranks(2, send_buffers)


def half_on_meta() -> str:
    torch.manual_seed(0)
    model = resettable() if dist.get_rank() == 0 else on_meta(resettable)
    model = per_layer(model)
    with provokes(FSDP.forward, errors.InitialWeightsDifferError, match="sync_module_states=True"):
        model(my_part(whole_batch()))
    model.load_state_dict(resettable().state_dict())  # both ranks draw differently by now
    torch.manual_seed(1)
    model.load_state_dict(resettable().state_dict())
    model(my_part(whole_batch()))
    constant = nn.Linear(5, 5) if dist.get_rank() == 0 else on_meta(lambda: nn.Linear(5, 5))
    if dist.get_rank() == 0:
        nn.init.zeros_(constant.weight)
        nn.init.zeros_(constant.bias)

    def zeros(module: nn.Module) -> None:
        module.to_empty(device="cpu")
        nn.init.zeros_(module.weight)
        nn.init.zeros_(module.bias)

    model = FSDP(constant, param_init_fn=zeros)
    with provokes(FSDP.forward, errors.InitialWeightsDifferError) as caught:
        model(my_part(whole_batch()).float())
    return caught.message


def test_a_world_of_which_half_is_on_meta_is_refused_on_every_rank():
    for message in run_ranks(2, half_on_meta):
        assert "'weight' on meta on rank 1 and with values on rank 0" in message


# ---------------------------------------------------------------- refused by the constructor


def refused_by_the_constructor() -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 2), nn.Sequential(Silent()))

    policy = ModuleWrapPolicy({nn.Linear})
    model = on_meta(build)
    with provokes(FSDP, errors.NoValuesError, match=r"'1\.0\.table' of Silent"):
        FSDP(model, auto_wrap_policy=policy)
    assert type(model[0]) is nn.Linear, "nothing has changed"
    assert model[0].weight.is_meta
    with provokes(FSDP, errors.OptionError, match="param_init_fn"):
        FSDP(model, param_init_fn="normal")
    with provokes(auto_wrap, errors.NoValuesError, match="'table' of Silent"):
        auto_wrap(model, ModuleWrapPolicy({Silent, nn.Linear}), wrapper_cls=FSDP)
    assert type(model[0]) is nn.Linear
    with provokes(initialize.refuse_deferred, errors.NoValuesError, match="table"):
        initialize.refuse_deferred(model, None, where="here")
    with provokes(initialize.refuse_deferred, errors.OptionError, match="param_init_fn"):
        initialize.refuse_deferred(model, 3, where="here")
    tied = on_meta(lambda: nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)))
    tied[1].weight = tied[0].weight
    tied[0] = FSDP(tied[0])
    with provokes(FSDP, errors.TiedParametersError, match=r"'1\.weight' tied to 'weight'"):
        FSDP(tied)
    with provokes(FSDP, errors.TiedParametersError, match=r"'1\.weight' tied to 'weight'"):
        FSDP(tied, sync_module_states=True)


def test_what_nothing_could_initialise_is_refused_before_anything_is_wrapped():
    run_ranks(2, refused_by_the_constructor)


def initialised_as_its_policy_says() -> None:
    def ones(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        nn.init.ones_(module.table)

    def policy(module: nn.Module) -> bool | dict[str, object]:
        return {"param_init_fn": ones} if isinstance(module, Silent) else False

    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Silent()))
    model = FSDP(model, auto_wrap_policy=CustomPolicy(policy))
    assert (model.state_dict()["1.table"] == 1).all()
    left_alone = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Silent()))
    model = FSDP(left_alone, ignored_modules=[left_alone[1]])
    assert left_alone[1].table.is_meta
    assert not model.state_dict()["0.weight"].is_meta


def test_a_policy_may_say_how_a_unit_is_initialised_and_what_is_ignored_stays_on_meta():
    run_ranks(2, initialised_as_its_policy_says)


def disagree_in_the_constructor() -> None:
    odd = dist.get_rank() == 1
    with provokes(FSDP, errors.RankDisagreementError, match="sync_module_states"):
        FSDP(nn.Linear(2, 3 if odd else 2), sync_module_states=True)
    if not odd:
        with provokes(FSDP, errors.SilentRanksError, match="rank 1 silent"):
            FSDP(nn.Linear(2, 2), sync_module_states=True)


def test_ranks_that_do_not_sync_alike_get_an_error():
    run_ranks(2, disagree_in_the_constructor, dist_timeout=4.0)


def load_into_memory_from_meta(strict: bool) -> None:
    def only_memory(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)

    model = per_layer(on_meta(resettable), param_init_fn=only_memory)
    torch.manual_seed(8)
    plain = resettable()
    model.load_state_dict(plain.state_dict(), strict=strict)
    train_and_compare(model, plain)


@pytest.mark.parametrize("strict", [True, False])
def test_a_loaded_state_dict_is_an_initialisation_too(strict):
    run_ranks(2, load_into_memory_from_meta, strict)
