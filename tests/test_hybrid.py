"""Cut within a node, copied across nodes: copies start equal, stay equal, and each level pays."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ModuleWrapPolicy, errors, process_groups, strategies, timeline
from tests.parity.training import OPTIMIZERS, full_weights
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import (
    Layer,
    Stack,
    assert_equal_weights,
    mean_square,
    my_part,
    seeded,
    whole_batch,
)

POLICY = ModuleWrapPolicy({Layer})
TWO_NODES = {"LOCAL_WORLD_SIZE": "2"}
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def live_pair(*pair):
    """Every rank takes part in making every group, and keeps its own two."""
    made = [
        [(ranks, dist.new_group(ranks)) for ranks in process_groups.rank_lists(one)] for one in pair
    ]
    return [next(group for ranks, group in one if dist.get_rank() in ranks) for one in made]


def mesh_of(*shape, names=("replicate", "shard")):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def own_lists():
    rank = dist.get_rank()
    return [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]


# On four ranks of two nodes, all of these mean the same.
SPELLINGS = {
    "left out": dict,
    "words": lambda: {"process_group": ("node", "LOCAL_RANK_ACROSS_NODES")},
    "numbers": lambda: {"process_group": ["set2", "mod2"]},
    "lists": lambda: {"process_group": ([[0, 1], [2, 3]], [[3, 1], [2, 0]])},
    "list and word": lambda: {"process_group": ([[0, 1], [2, 3]], "mod2")},
    "own lists": lambda: {"process_group": own_lists()},
    "live": lambda: {"process_group": live_pair("node", "mod2")},
    "mesh": lambda: {"device_mesh": mesh_of(2, 2)},
    "mesh as group": lambda: {"process_group": mesh_of(2, 2)},
    "part of a mesh": lambda: {
        "device_mesh": mesh_of(1, 2, 2, names=("stage", "replicate", "shard"))["replicate", "shard"]
    },
    "two meshes": lambda: {"process_group": (mesh_of(2, 2)["shard"], mesh_of(2, 2)["replicate"])},
}


def shards_of_all_copies(model: FSDP) -> list[list[torch.Tensor]]:
    """Return for each flat parameter what the ranks that hold this shard have. Collective."""
    versions = []
    for unit in FSDP.fsdp_modules(model):
        copies = unit._unit.placement.replicate
        for flat_param in unit._unit.flat_params:
            held = [torch.empty_like(flat_param.data) for _ in copies.ranks]
            dist.all_gather(held, flat_param.data.contiguous(), group=copies.live)
            versions.append(held)
    return versions


def assert_copies_equal(model: FSDP) -> None:
    for held in shards_of_all_copies(model):
        assert all(torch.equal(held[0], other) for other in held[1:])


def levels(recorded, model: FSDP) -> tuple[int, int]:
    """Return the bytes that this rank sent inside its copy, and across the copies."""
    placement = model._unit.placement
    by_ranks = recorded.summary().bytes_by_ranks
    inside = by_ranks.pop(placement.shard.ranks)
    across = by_ranks.pop(placement.replicate.ranks)
    assert by_ranks == {}, "something else was sent"
    return inside, across


def expected_levels(model: FSDP) -> tuple[int, int]:
    """By hand: gathered twice but for the root, reduced once; shards all-reduced in a ring."""
    inside = across = 0
    placement = model._unit.placement
    for unit in FSDP.fsdp_modules(model):
        again = unit is not model and placement.reshard_after_forward
        for flat_param in unit._unit.flat_params:
            nbytes = flat_param.numel() * flat_param.element_size()
            inside += (3 if again else 2) * (placement.shard.size - 1) * nbytes
            across += 2 * (placement.copies - 1) * nbytes // placement.copies
    return inside, across


def train_beside_plain(strategy: str, arguments: dict, steps: int = 3) -> tuple[int, int]:
    """Every rank sees other data; return the bytes of one step on each level."""
    plain = seeded()
    model = FSDP(seeded(), sharding_strategy=strategy, auto_wrap_policy=POLICY, **arguments)
    one, other = (OPTIMIZERS["adamw"](m.parameters()) for m in (plain, model))
    for _ in range(steps):
        one.zero_grad()
        other.zero_grad()
        mean_square(plain(whole_batch())).backward()
        with timeline() as recorded:
            mean_square(model(my_part(whole_batch()))).backward()
        one.step()
        other.step()
        assert_copies_equal(model)
    assert_equal_weights(model, plain)
    return levels(recorded, model), expected_levels(model)


def every_spelling(strategy: str) -> dict[str, tuple]:
    return {
        name: train_beside_plain(strategy, arguments()) for name, arguments in SPELLINGS.items()
    }


@pytest.mark.parametrize("strategy", HYBRID)
def test_every_spelling_trains_alike_with_equal_copies_and_the_same_bytes_on_each_level(strategy):
    for by_spelling in run_ranks(4, every_spelling, strategy, env=TWO_NODES):
        assert list(by_spelling) == list(SPELLINGS)
        for name, (found, expected) in by_spelling.items():
            assert found == expected, name
            assert found == by_spelling["left out"][0], name


def on_a_larger_world(words: tuple[str, str]) -> tuple:
    return train_beside_plain("HYBRID_SHARD", {"process_group": words}, steps=2)


@pytest.mark.parametrize("words", [("set2", "mod2"), ("set3", "mod3"), ("mod2", "set2")])
def test_other_grids_train_alike_too(words):
    for found, expected in run_ranks(6, on_a_larger_world, words):
        assert found == expected


def bytes_of_strategies() -> list[dict[tuple[int, ...], int]]:
    found = []
    for arguments in ({"sharding_strategy": "HYBRID_SHARD"}, {}):
        model = FSDP(seeded(), auto_wrap_policy=POLICY, **arguments)
        with timeline() as recorded:
            mean_square(model(my_part(whole_batch()))).backward()
        found.append(recorded.summary(model).bytes_by_ranks)
    return found


def test_less_crosses_nodes_than_without_copies():
    """What leaves the node: under FULL_SHARD, from each rank, to half of the other ranks."""
    for rank, (hybrid, full) in enumerate(run_ranks(4, bytes_of_strategies, env=TWO_NODES)):
        assert list(full) == [(0, 1, 2, 3)]
        leaves_node = full[0, 1, 2, 3] * 2 / 3
        assert hybrid[rank % 2, rank % 2 + 2] < leaves_node / 2


# How copies start


def another_draw_in_the_second_copy(sync: bool) -> str:
    torch.manual_seed(dist.get_rank() // 2)
    model = FSDP(
        Stack().double(),
        sharding_strategy="HYBRID_SHARD",
        auto_wrap_policy=POLICY,
        sync_module_states=sync,
    )
    if sync:
        mean_square(model(my_part(whole_batch()))).backward()
        assert_copies_equal(model)
        return str({n: w.sum().item() for n, w in full_weights(model).items()})
    with provokes(FSDP.forward, errors.InitialWeightsDifferError) as caught:
        model(whole_batch())
    return caught.message


def test_copies_that_start_differently_are_refused_or_made_equal():
    for message in run_ranks(4, another_draw_in_the_second_copy, False, env=TWO_NODES):
        assert "FSDP206 unit" in message
        assert "the same initial weights on ranks" in message
    weights = run_ranks(4, another_draw_in_the_second_copy, True, env=TWO_NODES)
    torch.manual_seed(0)
    first = {n: w.sum().item() for n, w in Stack().double().named_parameters()}
    assert weights == [str(first)] * 4


# Pairs that are no grid


def crossed_lists() -> str:
    """Ranks 0 and 3 would be averaged, though they hold different shards."""
    rank = dist.get_rank()
    lists = [[0, 1], [2, 3]], [[0, 3], [1, 2]]
    with provokes(strategies.place, errors.GroupWordError, match="same position in each copy"):
        strategies.place("HYBRID_SHARD", lists, where="unit 'x'")
    mine = tuple(next(ranks for ranks in groups if rank in ranks) for groups in lists)
    live = live_pair(*lists)
    messages = []
    for pair in (mine, live):
        model = FSDP(seeded(), pair, "HYBRID_SHARD", auto_wrap_policy=POLICY)
        with provokes(process_groups.create, errors.RankDisagreementError) as caught:
            model(whole_batch())
        messages.append(caught.message)
    assert "rank 3 with `shard 1 of 2` in line 1 where rank 0 has `shard 0 of 2`" in messages[0]
    assert "FSDP203 process groups: unit 'root'" in messages[0]
    return messages[0].split("] ", 1)[1]


def test_ranks_that_would_average_different_shards_are_refused():
    run_ranks(4, crossed_lists)


def nodes_of_unequal_size() -> None:
    pair = [[0, 1, 2], [3]], [[0, 3], [1], [2]]
    with provokes(strategies.place, errors.GroupWordError, match=r"of \[0-2\], \[3\]"):
        strategies.place("HYBRID_SHARD", pair, where="unit 'x'")
    rank = dist.get_rank()
    mine = tuple(next(ranks for ranks in groups if rank in ranks) for groups in pair)
    model = FSDP(seeded(), mine, "HYBRID_SHARD")
    with provokes(process_groups.create, errors.RankDisagreementError, match="copies of one shard"):
        model(whole_batch())


def test_copies_cut_over_unequal_numbers_of_ranks_are_refused():
    run_ranks(4, nodes_of_unequal_size)


# One unit only


def hybrid_expert() -> tuple:
    """A policy gives one layer a pair; the rest is cut over everybody."""
    plain, model = seeded(), seeded()
    chosen = model.layers[1]

    def policy(module: nn.Module):
        if module is chosen:
            return {"process_group": ("node", "mod2"), "sharding_strategy": "HYBRID_SHARD"}
        return isinstance(module, Layer)

    model = FSDP(model, auto_wrap_policy=policy)
    with timeline() as recorded:
        mean_square(model(my_part(whole_batch()))).backward()
    mean_square(plain(whole_batch())).backward()
    norm = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert math.isclose(model.clip_grad_norm_(math.inf).item(), norm.item(), rel_tol=1e-12)
    summary = recorded.summary(model)
    assert summary.differences == ()
    return sorted(summary.bytes_by_ranks)


def test_one_unit_may_be_hybrid_in_a_model_that_is_not():
    for rank, ranks in enumerate(run_ranks(4, hybrid_expert, env=TWO_NODES)):
        inside, across = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
        assert ranks == sorted([inside, across, (0, 1, 2, 3)])
