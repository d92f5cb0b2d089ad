"""Words become ranks by arithmetic; ranks become groups once, alike on every rank."""

import copy
import gc
import itertools
import pickle
import random
import re
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import collectives, errors, group_requests, process_groups, rank_words
from fsdp_ref.rank_group import RankGroup
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import (
    Layer,
    assert_equal_gradients,
    mean_square,
    my_part,
    nested,
    seeded,
    whole_batch,
)

# The arithmetic of words


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("self", [[0], [1], [2], [3]]),
        ("set1", [[0], [1], [2], [3]]),
        ("SELF", [[0], [1], [2], [3]]),
        ("set2", [[0, 1], [2, 3]]),
        ("Set4", [[0, 1, 2, 3]]),
        ("mod1", [[0, 1, 2, 3]]),
        ("mod2", [[0, 2], [1, 3]]),
        ("MOD4", [[0], [1], [2], [3]]),
        ("node", [[0, 1], [2, 3]]),
        ("local_rank_across_nodes", [[0, 2], [1, 3]]),
    ],
)
def test_words_on_four_ranks_of_two_hosts(word, expected):
    assert process_groups.rank_lists(word, world_size=4, local_world_size=2) == expected


@st.composite
def worlds_with_a_divisor(draw: st.DrawFn, largest: int = 4096) -> tuple[int, int]:
    number = draw(st.integers(1, largest))
    return number * draw(st.integers(1, largest // number)), number


@given(worlds_with_a_divisor(), st.sampled_from(["set", "mod"]))
def test_every_rank_is_in_exactly_one_group_of_equal_size(world_and_number, kind):
    world_size, number = world_and_number

    lists = process_groups.rank_lists(f"{kind}{number}", world_size)

    assert sorted(rank for ranks in lists for rank in ranks) == list(range(world_size))
    assert {len(ranks) for ranks in lists} == {number if kind == "set" else world_size // number}
    assert len(lists) == (world_size // number if kind == "set" else number)
    for ranks in lists:
        if kind == "set":
            assert ranks == list(range(ranks[0], ranks[0] + number))
        else:
            assert {rank % number for rank in ranks} == {ranks[0] % number}
    word = "node" if kind == "set" else "local_rank_across_nodes"
    assert process_groups.rank_lists(word.upper(), world_size, number) == lists


@given(st.integers(1, 4096), st.integers(-4096, 5000), st.sampled_from(["set", "mod"]))
def test_any_number_makes_groups_or_is_refused(world_size, number, kind):
    if number > 0 and world_size % number == 0:
        assert len(process_groups.rank_lists(f"{kind}{number}", world_size)) >= 1
    else:
        with provokes(process_groups.rank_lists, errors.GroupWordError, match=f"found {number}"):
            process_groups.rank_lists(f"{kind}{number}", world_size)


@pytest.mark.parametrize("word", ["set3", "set0", "mod0", "mod8", "set5", "set-2", "MOD-1"])
def test_a_number_that_does_not_divide_the_world_is_refused(word):
    with provokes(process_groups.rank_lists, errors.GroupWordError, match="Divisors are 1, 2, 4"):
        process_groups.rank_lists(word, world_size=4)


@pytest.mark.parametrize(
    "word", ["", "set", "set--1", "set2x", "set+2", "expert", "mod 2", "node2"]
)
def test_an_unknown_word_is_refused_and_the_words_are_listed(word):
    with provokes(process_groups.rank_lists, errors.GroupWordError, match="local_rank_across"):
        process_groups.rank_lists(word, world_size=4)


def test_node_without_a_local_world_size_says_who_would_set_it(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    with provokes(process_groups.rank_lists, errors.GroupWordError, match="torchrun"):
        process_groups.rank_lists("node", world_size=4)


def test_the_local_world_size_of_the_launcher_is_the_default(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")

    assert process_groups.rank_lists("node", world_size=6) == [[0, 1, 2], [3, 4, 5]]


def test_a_table_needs_no_processes():
    assert process_groups.table("node", 4, 2) == "node on 4 ranks: 2 groups of 2\n  0 1\n  2 3"
    assert process_groups.table("self", 1) == "self on 1 rank: 1 group of 1\n  0"
    lists = "lists on 4 ranks: 2 groups of 1 to 3\n  0\n  1 2 3"
    assert process_groups.table([[3, 2, 1], [0]], 4) == lists
    assert process_groups.table(("node", "local_rank_across_nodes"), 4, 2) == (
        "cut within node on 4 ranks: 2 groups of 2\n  0 1\n  2 3\n"
        "copied across local_rank_across_nodes on 4 ranks: 2 groups of 2\n  0 2\n  1 3"
    )
    pair = process_groups.table([[[0, 1], [2, 3]], "mod2"], 4)
    assert pair.splitlines()[0] == "cut within lists on 4 ranks: 2 groups of 2"


def test_a_table_of_what_makes_no_groups_is_refused():
    for wrong in ("set3", [[0, 1], [2]], ("set2", "set2"), ("set2", "set3"), ["set2"], [0, 1]):
        with provokes(process_groups.table, errors.GroupWordError):
            process_groups.table(wrong, 4)


def test_the_world_size_of_the_launcher_is_the_default(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", " 3 ")
    monkeypatch.setenv("RANK", "4")

    assert process_groups.rank_lists("node") == [[0, 1, 2], [3, 4, 5]]
    assert process_groups.table("mod3").splitlines()[0] == "mod3 on 6 ranks: 3 groups of 2"
    group = process_groups.resolve("mod2", where="unit 'x'")
    assert (group.ranks, group.rank, group.process_group) == ((0, 2, 4), 2, None)


def test_sizes_that_nobody_knows_or_that_are_no_numbers_are_said(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with provokes(process_groups.rank_lists, errors.GroupWordError, match="Give world_size"):
        process_groups.rank_lists("self")
    with provokes(process_groups.resolve, errors.GroupMembershipError, match="init_process"):
        process_groups.resolve("self", where="unit 'x'")
    for wrong in ("", "two", "0", "-2", "2.0"):
        monkeypatch.setenv("WORLD_SIZE", wrong)
        with provokes(rank_words.from_environment, errors.GroupWordError, match="WORLD_SIZE"):
            process_groups.rank_lists("self")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    with provokes(process_groups.rank_lists, errors.GroupWordError, match="LOCAL_WORLD_SIZE"):
        process_groups.rank_lists("node", 4)
    with provokes(rank_words.word_lists, errors.GroupWordError, match="at least one rank"):
        rank_words.word_lists("set1", 0)


# Lists of lists


@st.composite
def partitions(draw: st.DrawFn) -> list[list[int]]:
    """All ranks of a world, shuffled and cut into groups of any sizes."""
    world_size = draw(st.integers(1, 4096))
    chance = random.Random(draw(st.integers(0, 2**32)))
    ranks = chance.sample(range(world_size), world_size)
    cuts = sorted(chance.sample(range(1, world_size), chance.randrange(min(world_size, 40))))
    return [ranks[a:b] for a, b in itertools.pairwise([0, *cuts, world_size])]


@given(partitions())
def test_lists_that_cover_the_world_are_groups_whatever_their_sizes(lists):
    world_size = sum(map(len, lists))

    checked = process_groups.rank_lists(lists, world_size)

    assert checked == sorted(map(sorted, lists))
    assert process_groups.rank_lists(checked, world_size) == checked


@given(partitions(), st.data())
def test_lists_with_a_gap_an_overlap_or_a_stranger_are_refused(lists, data):
    world_size = sum(map(len, lists))
    at = data.draw(st.integers(0, len(lists) - 1))
    rank = lists[at][-1]
    short = [[r for r in ranks if r != rank] for ranks in lists]
    wrongs = [
        ([ranks for ranks in short if ranks] or [[]], f"ranks {rank} in none|a list of ranks"),
        ([*lists, [rank]], f"ranks {rank} in more than one"),
        ([*lists, [world_size]], "each at most once"),
        ([[*ranks, rank] if rank in ranks else ranks for ranks in lists], "each at most once"),
        ([[-1], *lists], "each at most once"),
        ([[True], *lists], "as whole numbers"),
    ]
    for wrong, match in wrongs:
        with provokes(rank_words.checked_lists, errors.GroupWordError, match=match):
            rank_words.checked_lists(wrong, world_size, "unit 'x'")


@given(st.lists(st.integers(0, 4095), unique=True, min_size=1))
def test_spelling_ranks_in_runs_loses_nothing(ranks):
    spelt = rank_words.spell_ranks(sorted(ranks))
    assert rank_words.read_ranks(spelt) == tuple(sorted(ranks))


def test_many_lists_are_spelt_briefly():
    assert rank_words.spell_lists([[rank] for rank in range(9)]) == "[0], [1], [2], [3] and 5 more"


# Grids


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**32))
def test_rows_and_columns_of_any_grid_are_a_pair_and_nothing_else_is(rows, columns, seed):
    ranks = random.Random(seed).sample(range(rows * columns), rows * columns)
    shards = [sorted(ranks[at * columns : (at + 1) * columns]) for at in range(rows)]
    copies = [[shard[at] for shard in shards] for at in range(columns)]
    rank_words.refuse_no_grid(shards, copies, "unit 'x'")
    if rows > 1 and columns > 1:  # in one copy, two ranks change places
        copies[0][0], copies[1][0] = copies[1][0], copies[0][0]
        with provokes(rank_words.refuse_no_grid, errors.GroupWordError, match="same position"):
            rank_words.refuse_no_grid(shards, copies, "unit 'x'")


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 8))
def test_blocks_within_and_equal_remainders_across_are_always_a_grid(copies, size, per_block):
    """`setK` within and `mod` of any multiple of K across; two such grids may lie side by side."""
    if copies * size * per_block <= 4096:
        world = copies * size * per_block
        shards = rank_words.word_lists(f"set{size}", world)
        across = rank_words.word_lists(f"mod{size * per_block}", world)
        rank_words.refuse_no_grid(shards, across, "unit 'x'")


# An argument becomes ranks


def resolved_on_each_rank() -> dict[str, tuple[tuple[int, ...], int]]:
    rank = dist.get_rank()
    spellings = ["self", "node", "local_rank_across_nodes", "set4", None, [rank, (rank + 2) % 4]]
    groups = [process_groups.resolve(spelling, where="unit 'x'") for spelling in spellings]
    assert [group.process_group is None for group in groups] == [True] * 4 + [False, True]
    return {
        str(spelling): (group.ranks, group.rank)
        for spelling, group in zip([*spellings[:5], "list"], groups, strict=True)
    }


def test_each_rank_finds_its_own_group_and_its_place_in_it():
    on_each_rank = run_ranks(4, resolved_on_each_rank, env={"LOCAL_WORLD_SIZE": "2"})

    everyone = (0, 1, 2, 3)
    for rank, found in enumerate(on_each_rank):
        pair, across = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
        assert found == {
            "self": ((rank,), 0),
            "node": (pair, rank % 2),
            "local_rank_across_nodes": (across, rank // 2),
            "set4": (everyone, rank),
            "None": (everyone, rank),
            "list": (across, rank // 2),
        }


def test_a_world_can_be_imagined_without_processes():
    group = process_groups.resolve("mod4", where="unit 'x'", world_size=8)

    assert (group.ranks, group.rank, group.process_group) == ((0, 4), 0, None)


def test_no_process_group_at_all_is_said():
    with provokes(process_groups.resolve, errors.GroupMembershipError, match="init_process_group"):
        process_groups.resolve(None, where="unit 'x'")
    with provokes(process_groups.create, errors.GroupMembershipError, match="init_process_group"):
        process_groups.create([])


@pytest.mark.parametrize(
    ("spelling", "match"),
    [
        ([0, 0], "each at most once"),
        ([0, 4], "ranks from 0 to 3"),
        ([-1, 0], "ranks from 0 to 3"),
        ([], "a list of ranks"),
        ([[0, 1], [2]], "ranks 3 in none"),
        ([[0, 1], [1, 2, 3]], "ranks 1 in more than one.*HYBRID_SHARD"),
        ([[0, 1], [2, 3, 4]], "ranks from 0 to 3"),
        ([[0, 1], []], "a list of ranks"),
        ([[0, 1], [2, "3"]], "as whole numbers"),
        ([0, "1"], "as whole numbers"),
        ([0, True], "as whole numbers"),
        ([0, 1.0], "as whole numbers"),
        ({0, 1}, "a list of ranks"),
        ("set0", "divides the world size 4, found 0"),
        ("mod-2", "divides the world size 4, found -2"),
        (3, "a list of ranks"),
        ("set3", "divides the world size 4"),
    ],
)
def test_a_wrong_argument_is_refused(spelling, match):
    with provokes(process_groups.resolve, errors.GroupWordError, match=match):
        process_groups.resolve(spelling, where="unit 'x'", world_size=4)


def test_a_list_without_this_rank_names_unit_rank_and_list():
    with provokes(process_groups.resolve, errors.GroupMembershipError) as caught:
        process_groups.resolve([1, 2], where="unit 'layers.0'", world_size=4)

    assert "FSDP202 unit 'layers.0'" in caught.message
    assert "a process group that rank 0 is in" in caught.message
    assert "[1, 2]" in caught.message


def live_groups() -> None:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    mine = process_groups.resolve(pairs[1 if rank == 2 else 0], where="unit 'x'")
    assert mine.live is pairs[1 if rank == 2 else 0]
    assert mine.ranks == ((1, 2) if rank == 2 else (0, 1))
    if rank != 1:
        foreign = pairs[0 if rank == 2 else 1]
        with provokes(process_groups.resolve, errors.GroupMembershipError, match="rank \\d is in"):
            process_groups.resolve(foreign, where="unit 'x'")
    dist.destroy_process_group(pairs[0])
    if rank == 0:
        with provokes(process_groups.resolve, errors.GroupMembershipError, match="destroyed"):
            process_groups.resolve(pairs[0], where="unit 'x'")


def test_a_live_group_is_used_as_it_is_unless_this_rank_is_outside():
    run_ranks(3, live_groups)


# Requests of all ranks, by arithmetic


def requests_of(lists_per_unit: list[list[list[int]]]) -> list[str]:
    """Return what each rank of a world asks for, with one partition of it for each unit."""
    owners = [{rank: tuple(ranks) for ranks in lists for rank in ranks} for lists in lists_per_unit]
    groups = [[RankGroup(of[rank], of[rank].index(rank)) for of in owners] for rank in owners[0]]
    return [group_requests.request(own) for own in groups]


@given(worlds_with_a_divisor(128), st.booleans())
@example((4096, 64), False)
@settings(deadline=None)
def test_requests_of_any_world_are_united_and_one_rank_that_differs_is_found(world, many):
    world_size, number = world
    units = [process_groups.rank_lists(f"{kind}{number}", world_size) for kind in ("set", "mod")]
    units *= 5 if many else 1

    requests = requests_of(units)

    expected = {tuple(ranks) for lists in units for ranks in lists}
    assert {key.ranks for key in group_requests.union(requests)} == expected
    lengths = {len(request) for request in requests_of(units[:2])}
    assert max(map(len, requests)) <= max(lengths) + 4 * len(units)  # each group is spelt once
    if number not in (1, world_size):  # or everybody, or nobody, has to do with the last rank
        other = requests_of([process_groups.rank_lists("self", world_size)] * len(units))
        with provokes(group_requests.union, group_requests.Misfit):
            group_requests.union([*requests[:-1], other[-1]])


# Ranks become live groups


def sums_over(spellings: list) -> list[float]:
    groups = [process_groups.resolve(spelling, where="unit") for spelling in spellings]
    process_groups.create(groups)
    sums = []
    for group in groups:
        value = torch.tensor(float(10 ** dist.get_rank()))
        dist.all_reduce(value, group=group.live)
        assert dist.get_process_group_ranks(group.live) == list(group.ranks)
        assert dist.get_rank(group.live) == group.rank
        sums.append(value.item())
    return sums


def test_created_groups_reduce_over_the_ranks_that_the_words_say():
    sums = run_ranks(4, sums_over, ["mod2", None, "self", "set2", "set4"])

    assert sums == [
        [101, 1111, 1, 11, 1111],
        [1010, 1111, 10, 11, 1111],
        [101, 1111, 100, 1100, 1111],
        [1010, 1111, 1000, 1100, 1111],
    ]


def test_a_world_of_one_rank_needs_no_new_group():
    assert run_ranks(1, sums_over, ["self", None, [0], "mod1"]) == [[1, 1, 1, 1]]


def which_share_a_group() -> tuple[bool, bool, bool, int]:
    rank = dist.get_rank()
    pair = [0, 1] if rank < 2 else [2, 3]
    spellings = ["set2", "node", pair, "set4", "mod1"]
    groups = [process_groups.resolve(spelling, where="unit") for spelling in spellings]
    process_groups.create(groups[:1])
    process_groups.create(groups)
    again = process_groups.resolve("set2", where="unit")
    process_groups.create([again])
    return (
        groups[0].live is groups[1].live is groups[2].live is again.live,
        groups[3].live is groups[4].live is dist.group.WORLD,
        groups[0].live is groups[3].live,
        dist.distributed_c10d._world.group_count,
    )


def test_equal_sets_share_one_group_however_spelt_and_all_ranks_are_the_default_group():
    outcomes = run_ranks(4, which_share_a_group, env={"LOCAL_WORLD_SIZE": "2"})

    assert outcomes == [(True, True, False, 3)] * 4  # the default group and two pairs


def create_with_unequal_numbers_of_new_sets() -> float:
    """Rank 0 lives alone, so it asks for other sets than the others do."""
    rank = dist.get_rank()
    group = process_groups.resolve([0] if rank == 0 else [1, 2], where="unit")
    process_groups.create([group])
    value = torch.tensor(1.0)
    dist.all_reduce(value, group=dist.new_group())  # breaks if a rank made one group too many
    return value.item()


def test_all_ranks_make_all_groups_so_that_the_next_group_works():
    assert run_ranks(3, create_with_unequal_numbers_of_new_sets) == [3, 3, 3]


def created_twice(folder: str) -> bool:
    rank = dist.get_rank()
    first = process_groups.resolve("self", where="unit")
    process_groups.create([first])
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/second", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    second = process_groups.resolve("self", where="unit")
    process_groups.create([second])
    dist.all_reduce(torch.ones(1), group=second.live)
    return first.process_group is second.process_group


def test_destroying_the_default_group_drops_its_cache(tmp_path):
    assert run_ranks(2, created_twice, str(tmp_path)) == [False, False]


def step_in_small_groups() -> tuple[float, weakref.ref, weakref.ref]:
    model = model_with("set2")
    mean_square(model(my_part(whole_batch()))).backward()
    small = model.layers[1].process_group
    return model.clip_grad_norm_(1.0).item(), weakref.ref(dist.group.WORLD), weakref.ref(small)


def train_destroy_and_train_again() -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    store, norms = dist.distributed_c10d._get_default_store(), []
    for number in range(3):
        norm, world, small = step_in_small_groups()
        norms.append(norm)
        assert dist.group.WORLD in process_groups._caches
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        assert world() is None, "something still holds the destroyed default group"
        assert small() is None, "something still holds a group that was made for it"
        assert len(process_groups._caches) == 0
        again = dist.PrefixStore(f"again/{number}", store)
        dist.init_process_group("gloo", store=again, rank=rank, world_size=size)
    return norms


def test_groups_end_with_the_default_group_and_are_made_again_after_it():
    per_rank = run_ranks(4, train_destroy_and_train_again)
    assert per_rank == [[per_rank[0][0]] * 3] * 4


# The units of a model ask


def names_in_the_order_of_creation() -> list[str]:
    """Each rank reads the groups of its units in another order, before the first forward."""
    rank = dist.get_rank()
    model = seeded()
    for index, word in enumerate(("mod2", "set2", "self")):
        model.layers[index] = FSDP(model.layers[index], process_group=word)
    model = FSDP(model)
    before = dist.distributed_c10d._world.group_count
    reading = [*model.layers, model]
    for unit in reading[rank:] + reading[:rank]:
        assert rank in dist.get_process_group_ranks(unit.process_group)
        assert dist.distributed_c10d._world.group_count == before + 8
    value = torch.tensor(1.0)
    dist.all_reduce(value, group=dist.new_group())
    assert value.item() == 4
    cache = process_groups._caches[dist.group.WORLD]
    mean_square(model(my_part(whole_batch()))).backward()
    return [" ".join(map(str, key.ranks)) for key in cache]


def test_reading_any_process_group_first_makes_all_groups_in_sorted_order_on_all_ranks():
    order = ["0", "0 1", "0 2", "1", "1 3", "2", "2 3", "3"]
    assert run_ranks(4, names_in_the_order_of_creation) == [order] * 4


def model_with(word: object) -> FSDP:
    model = seeded()
    model.layers[1] = FSDP(model.layers[1], process_group=word)
    return FSDP(model)


def asked_on_some_ranks_only(how: str) -> tuple[str, float]:
    """Ranks 0 and 3 use the model; rank 1 fails before, and rank 2 does something else."""
    rank = dist.get_rank()
    dist.barrier()
    if rank == 1:
        with provokes(FSDP, errors.GroupWordError, match="divides the world size 4"):
            model_with("set3")
    if rank in (1, 2):
        return "", 0.0
    model, start = model_with("set2"), time.monotonic()
    with provokes(process_groups.create, errors.SilentRanksError) as caught:
        model.process_group if how == "read" else model(whole_batch())
    return caught.message, time.monotonic() - start


@pytest.mark.parametrize("how", ["read", "call"])
def test_ranks_that_do_not_ask_are_named_on_every_rank_that_does(how):
    outcomes = run_ranks(4, asked_on_some_ranks_only, how, dist_timeout=4.0)
    for rank in (0, 3):
        message, seconds = outcomes[rank]
        assert f"[rank {rank}] FSDP204 process groups" in message
        assert "found ranks 1, 2 silent" in message
        assert seconds < 15


def asked_differently(words: list) -> str:
    model = model_with(words[dist.get_rank()])
    count = dist.distributed_c10d._world.group_count
    with provokes(process_groups.create, errors.RankDisagreementError) as caught:
        model(whole_batch())
    assert dist.distributed_c10d._world.group_count == count  # nothing was made
    dist.barrier()  # and nothing is in disorder
    return caught.message


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["set2", "set2", "mod2", "set2"], "rank 2 asking for ranks 0,2"),
        ([None, "set4", "mod1", "set2"], "rank 3 asking for ranks 2-3"),
        ([[0, 1], [0, 1, 2], [1, 2], [3]], "rank 1 asking for ranks 0-2"),
        ([[[0, 1], [2, 3]], "set2", [2], "set2"], "rank 2 asking for ranks 2 "),
    ],
    ids=["words", "all", "lists", "mixed spellings"],
)
def test_units_that_ask_differently_are_an_error_on_every_rank(words, match):
    messages = run_ranks(4, asked_differently, words)
    assert len({message.split("] ", 1)[1] for message in messages}) == 1
    assert "FSDP203 process groups: unit 'layers.1'" in messages[0]
    assert re.search(match, messages[0]), messages[0]


def asked_differently_while_sending(words: list) -> str:
    """The constructor itself talks: some ranks find their partners, and miss others later."""
    rank, start = dist.get_rank(), time.monotonic()
    dist.barrier()
    with pytest.raises(errors.SilentRanksError) as caught:
        FSDP(seeded(), words[rank], sync_module_states=True)(whole_batch())
    assert time.monotonic() - start < 20
    return str(caught.value)


def test_a_constructor_that_sends_values_names_partners_with_other_groups():
    words = ["set2", "mod2", "set2", "set2"]
    messages = run_ranks(4, asked_differently_while_sending, words, dist_timeout=3.0)
    assert "found rank 1 silent" in messages[0]
    assert "found rank 3 silent" in messages[1]
    assert "silent" in messages[2]
    assert "silent" in messages[3]


def read_before_and_after_wrapping() -> None:
    """A unit that was used alone, with its group, becomes part of a larger model."""
    plain, model = seeded(), seeded()
    layer = model.layers[1] = FSDP(model.layers[1], process_group="set2")
    alone = layer.process_group
    mean_square(layer(my_part(whole_batch()))).backward()
    layer.zero_grad()
    model = FSDP(model)
    mean_square(plain(whole_batch())).backward()
    mean_square(model(my_part(whole_batch()))).backward()
    assert layer.process_group is alone is model.process_group is dist.group.WORLD
    assert_equal_gradients(model, plain)


def test_a_unit_that_had_its_group_before_keeps_it_in_a_larger_model():
    run_ranks(2, read_before_and_after_wrapping)


def units_made_before_the_process_group(folder: str) -> list[int]:
    """Words need no process group, only the sizes that a launcher tells."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # the other rank may still be connecting
    dist.destroy_process_group()
    model = seeded()
    for index, word in enumerate(("self", "set2", "node")):
        model.layers[index] = FSDP(model.layers[index], process_group=word)
    model = FSDP(model, process_group="mod1")
    with provokes(process_groups.create, errors.GroupMembershipError, match="init_process_group"):
        model(whole_batch())
    store = dist.FileStore(f"{folder}/late", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    mean_square(model(my_part(whole_batch()))).backward()
    return [dist.get_world_size(unit.process_group) for unit in (*model.layers, model)]


def test_units_may_be_made_before_the_process_group_where_a_launcher_tells_sizes(tmp_path):
    env = {"LOCAL_WORLD_SIZE": "1"}
    sizes = run_ranks(2, units_made_before_the_process_group, str(tmp_path), env=env)
    assert sizes == [[1, 2, 1, 2]] * 2


def a_unit_put_in_after_the_root_was_made() -> None:
    plain, model = seeded(), FSDP(seeded())
    plain.layers[1] = seeded(Layer)
    model.layers[1] = FSDP(seeded(Layer), process_group="set2")
    mean_square(plain(whole_batch())).backward()
    mean_square(model(my_part(whole_batch()))).backward()
    assert not model.layers[1].check_is_root()
    assert_equal_gradients(model, plain)


def test_a_unit_that_replaces_a_module_before_the_first_use_belongs_to_the_root():
    run_ranks(2, a_unit_put_in_after_the_root_was_made)


# Meshes


def groups_of_meshes() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for asked, expected in (
        (mesh["shard"], (rank // 2 * 2, rank // 2 * 2 + 1)),
        (mesh["replicate"], (rank % 2, rank % 2 + 2)),
        (init_device_mesh("cpu", (4,)), (0, 1, 2, 3)),
    ):
        group = process_groups.resolve(asked, where="unit 'x'")
        assert group.ranks == expected
        assert group.live is asked.get_group()
    with provokes(process_groups.resolve, errors.GroupWordError, match="2 dimensions"):
        process_groups.resolve(mesh, where="unit 'x'")
    part = DeviceMesh("cpu", [0, 1])
    if rank < 2:
        assert process_groups.resolve(part, where="unit 'x'").ranks == (0, 1)
    else:
        with provokes(process_groups.resolve, errors.GroupMembershipError, match=r"\[0, 1\]"):
            process_groups.resolve(part, where="unit 'x'")
        with provokes(process_groups.group_of_mesh, errors.GroupMembershipError, match="mesh"):
            process_groups.group_of_mesh(part, 0, where="unit 'x'")


def test_meshes_and_parts_of_them_are_groups():
    run_ranks(4, groups_of_meshes)


def message_of(spellings_per_rank: list[list]) -> str:
    spellings = spellings_per_rank[dist.get_rank()]
    groups = [
        process_groups.resolve(spelling, where=f"unit 'layers.{index}'")
        for index, spelling in enumerate(spellings)
    ]
    with provokes(process_groups.create, errors.RankDisagreementError) as caught:
        process_groups.create(groups)
    assert all(group.process_group is None for group in groups)
    return caught.message.split("] ", 1)[1]


def test_different_words_on_different_ranks_are_an_error_on_every_rank():
    messages = run_ranks(
        4, message_of, [["self", "set2"], ["self", "mod2"], *[["self", "set2"]] * 2]
    )

    assert set(messages) == {
        "FSDP203 process groups: unit 'layers.1': expected all of ranks 0-1 to ask for this group, "
        "found rank 0 asking for ranks 0-1 (unit 'layers.1', process_group='set2'); "
        "rank 1 asking for ranks 1,3 (unit 'layers.1', process_group='mod2'). "
        "Give the same word on every rank, or lists that do not overlap."
    }


def test_the_same_groups_in_another_order_are_an_error():
    messages = run_ranks(2, message_of, [["self", "set2"], ["set2", "self"]])

    assert all("unit 'layers.0'" in message for message in messages)


def test_another_number_of_units_is_an_error_on_every_rank():
    messages = run_ranks(3, message_of, [["self"], ["self"], ["self", "self"]])

    assert all(
        "rank 2 with `unit 'layers.1'` in line 2 where ranks 0, 1 have nothing" in message
        for message in messages
    )


def two_groups_of_equal_ranks() -> str:
    made = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    group = process_groups.resolve(made[dist.get_rank()], where="unit 'x'")
    with provokes(process_groups.create, errors.RankDisagreementError) as caught:
        process_groups.create([group])
    return caught.message


def test_two_different_live_groups_with_equal_ranks_are_told_apart():
    messages = run_ranks(2, two_groups_of_equal_ranks)

    assert all("process_group=<group" in message for message in messages)


def create_without_rank_one() -> tuple[str, float]:
    if dist.get_rank() == 1:
        return "", 0.0
    group = process_groups.resolve("self", where="unit 'x'")
    start = time.monotonic()
    with provokes(process_groups.create, errors.SilentRanksError) as caught:
        process_groups.create([group], timeout=timedelta(seconds=1))
    return caught.message, time.monotonic() - start


def test_a_rank_that_does_not_take_part_is_named():
    message, seconds = run_ranks(2, create_without_rank_one)[0]

    assert "found rank 1 silent" in message
    assert seconds < 10


# A second group where messages are paired by their order


def on_which_group(model: FSDP) -> dict[str, set]:
    """Train a step beside plain PyTorch; return the groups on which tensors moved, by call."""
    used: dict[str, set] = {}

    def noting(name: str):
        move = getattr(dist, name)

        def moved(*args, group, **kwargs):
            used.setdefault(name, set()).add(group)
            return move(*args, group=group, **kwargs)

        return moved

    for name in ("all_gather_single", "reduce_scatter_single", "all_reduce"):
        setattr(dist, name, noting(name))
    plain = seeded()
    mean_square(plain(whole_batch())).backward()
    mean_square(model(my_part(whole_batch()))).backward()
    found = {name: set(groups) for name, groups in used.items()}
    assert_equal_gradients(model, plain)
    return found


def as_on_other_devices(case: str) -> tuple[int, int]:
    """Send as other devices than the CPU do; return how many groups there are and were."""
    collectives._point_to_point = lambda device: False
    before, arguments = 1, {}
    if case == "live":
        before, arguments = 2, {"process_group": dist.new_group()}
    elif case == "mesh":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        before, arguments = 3, {"device_mesh": mesh, "sharding_strategy": "HYBRID_SHARD"}
    elif case == "pair":
        arguments = {"process_group": ("set2", "mod2"), "sharding_strategy": "HYBRID_SHARD"}
    model = nested(seeded(), **arguments)
    used = on_which_group(model)
    unit = model._unit
    shard, copies = unit.placement.shard, unit.placement.replicate
    assert used["all_gather_single"] == {shard.live}
    assert used["reduce_scatter_single"] == {shard.reductions}
    assert shard.reductions is not shard.live
    for group in unit.placement.groups:
        ranks = dist.get_process_group_ranks(group.reductions)
        assert (tuple(ranks), dist.get_rank(group.reductions)) == (group.ranks, group.rank)
    agreed = {group.live for group in unit.placement.groups}  # at the end of the backward
    assert used["all_reduce"] == agreed | ({copies.reductions} if copies else set())
    for layer in model.layers:  # equal sets share both groups
        for one, root in zip(layer._unit.placement.groups, unit.placement.groups, strict=True):
            assert (one.live, one.reductions) == (root.live, root.reductions)
    assert copy.deepcopy(shard).reductions is shard.reductions
    assert pickle.loads(pickle.dumps(shard)).reductions is None
    return before, dist.distributed_c10d._world.group_count


def test_gradients_travel_on_a_second_group_where_order_is_all_that_tells_messages_apart():
    assert run_ranks(4, as_on_other_devices, "everyone") == [(1, 2)] * 4
    assert run_ranks(4, as_on_other_devices, "live") == [(2, 3)] * 4
    assert run_ranks(4, as_on_other_devices, "pair") == [(1, 9)] * 4  # two for each of four sets
    for before, after in run_ranks(4, as_on_other_devices, "mesh"):
        assert after - before >= 2  # torch counts a mesh's own groups on their members only


def no_second_group() -> int:
    """On the CPU tags tell messages apart; a lone rank sends none; frozen units or not."""
    models = [nested(seeded(), process_group=word) for word in (None, "self")]
    for model in models:
        mean_square(model(my_part(whole_batch()))).backward()
        assert all(unit._unit.group.reductions is None for unit in FSDP.fsdp_modules(model))
    collectives._point_to_point = lambda device: False
    alone = nested(seeded(), process_group="self")
    mean_square(alone(my_part(whole_batch()))).backward()
    assert alone._unit.group.reductions is None
    return dist.distributed_c10d._world.group_count


def test_worlds_on_the_cpu_and_lone_ranks_do_not_pay_for_a_second_group():
    assert run_ranks(2, no_second_group) == [3, 3]


def ranks_that_issue_in_different_orders() -> None:
    collectives._point_to_point = lambda device: False
    rank = dist.get_rank()
    group = process_groups.resolve(None, where="unit 'x'")
    group.pairs_by_order = rank == 1  # one rank that needs it is enough
    process_groups.create([group])
    full, gradient = torch.empty(4), torch.arange(4.0)

    def gather():
        return collectives.start_all_gather(full, torch.full((2,), float(rank)), group, tag=0)

    def reduce():
        return collectives.start_reduce_scatter(gradient, group, tag=1)

    if rank == 0:
        gathering, reduction = gather(), reduce()
    else:
        reduction, gathering = reduce(), gather()
    gathering.wait()
    assert full.tolist() == [0, 0, 1, 1]
    assert reduction.wait().tolist() == ([0, 2] if rank == 0 else [4, 6])


def test_a_gather_and_a_reduction_in_another_order_on_each_rank_do_not_meet():
    run_ranks(2, ranks_that_issue_in_different_orders, dist_timeout=5.0)


# The dataclass below


def test_a_group_that_was_not_created_says_so():
    with provokes(RankGroup.live, errors.GroupNotCreatedError, match="not created yet"):
        _ = RankGroup((0, 1), 0).live
    with provokes(RankGroup.live_for_reductions, errors.GroupNotCreatedError, match="not created"):
        _ = RankGroup((0, 1), 0).live_for_reductions


def limit_of_a_created_group() -> list[float]:
    group = process_groups.resolve("self", where="unit")
    process_groups.create([group])
    backend = group.live._get_backend(torch.device("cpu"))
    world = dist.group.WORLD._get_backend(torch.device("cpu"))
    return [backend.options._timeout.total_seconds(), world.options._timeout.total_seconds()]


def test_created_groups_inherit_the_time_limit_of_the_default_group():
    for limit, inherited_from in run_ranks(2, limit_of_a_created_group):
        assert limit == inherited_from
