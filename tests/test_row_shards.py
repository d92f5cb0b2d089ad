"""Weights cut by rows are those of torch's fully_shard, and come back whole from any mesh."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_ref import process_groups
from fsdp_ref.errors import GroupNotCreatedError, SilentRanksError
from fsdp_ref.rank_group import Placement, RankGroup
from fsdp_ref.row_shards import cut, mesh_of, rows_of, stored_name, whole
from fsdp_ref.strategies import place
from tests.provoked import provokes
from tests.ranks import run_ranks

SHAPES = [(7, 3), (2, 5), (1,), (4,), (0, 3), (6, 2, 2), ()]


def live(*arguments: object) -> Placement:
    """Place a unit and make its groups."""
    placement = place(*arguments, where="unit 'test'")
    process_groups.create(placement.groups)
    return placement


def numbers(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3))


def as_fully_shard() -> None:
    placement = live()
    for shape in SHAPES[:-1]:
        plain = nn.Module()
        plain.weight = nn.Parameter(numbers(shape))
        theirs = fully_shard(plain, mesh=init_device_mesh("cpu", (dist.get_world_size(),))).weight
        ours = cut(numbers(shape), placement)
        assert ours.placements == theirs.placements
        assert ours.device_mesh == theirs.device_mesh
        assert ours.shape == theirs.shape
        assert torch.equal(ours.to_local(), theirs.to_local()), shape
        assert ours.to_local().untyped_storage().nbytes() == ours.to_local().nbytes
        assert not ours.requires_grad


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_rows_lie_where_fully_shard_has_them(world_size):
    run_ranks(world_size, as_fully_shard)


def every_strategy() -> None:
    rank = dist.get_rank()
    hybrid = live("HYBRID_SHARD", ("mod2", "set2"))
    expected = {
        "all": (live(), [0, 1, 2, 3], (Shard(0),), "w"),
        "set2": (live(None, "set2"), [[0, 1], [2, 3]][rank // 2], (Shard(0),), f"w@rank{rank & 2}"),
        "self": (live(None, "self"), [rank], (Shard(0),), f"w@rank{rank}"),
        "copies": (live("NO_SHARD"), [0, 1, 2, 3], (Replicate(),), "w"),
        "own copy": (live("NO_SHARD", "self"), [rank], (Replicate(),), f"w@rank{rank}"),
        "hybrid": (hybrid, [[0, 2], [1, 3]], (Replicate(), Shard(0)), "w"),
    }
    for what, (placement, ranks, placements, name) in expected.items():
        mesh = mesh_of(placement)
        assert mesh.mesh.tolist() == ranks, what
        assert mesh is mesh_of(placement), what
        assert stored_name("w", placement) == name
        groups = placement.groups[-1:] if placement.replicate else placement.groups
        assert mesh.get_group(0) is groups[0].live, what
        for shape in SHAPES:
            piece = cut(numbers(shape), placement)
            assert piece.placements == (placements if shape else (Replicate(),) * mesh.ndim)
            assert torch.equal(whole(piece), numbers(shape)), what


def test_each_strategy_has_its_mesh_its_name_and_comes_back_whole():
    run_ranks(4, every_strategy)


def small_pair() -> None:
    """Four of six ranks hold two copies, the other two one: each set has one name."""
    rank = dist.get_rank()
    rows = [[0, 3], [1, 2]] if rank < 4 else [[4, 5]]
    row = next(row for row in rows if rank in row)
    placement = live("HYBRID_SHARD", (row, [other[row.index(rank)] for other in rows]))
    assert mesh_of(placement).mesh.tolist() == rows
    assert stored_name("w", placement) == ("w@rank0" if rank < 4 else "w@rank4")
    assert torch.equal(whole(cut(numbers((5, 2)), placement)), numbers((5, 2)))


def test_copies_that_are_kept_equal_have_one_name():
    run_ranks(6, small_pair)


def other_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for placements in [(Shard(0), Shard(1)), (Replicate(), Shard(1)), (Shard(0), Shard(0))]:
        assert torch.equal(
            whole(distribute_tensor(numbers((5, 3)), mesh, placements)), numbers((5, 3))
        )
    plain = numbers((2, 2))
    assert whole(plain) is plain
    assert not isinstance(whole(plain), DTensor)


def test_a_value_on_any_mesh_comes_back_whole_and_a_plain_one_as_it_is():
    run_ranks(4, other_meshes)


def groups_come_and_go() -> None:
    """A mesh is never used for another group of the same ranks."""
    first = live(None, "set2")
    assert mesh_of(first).get_group() is first.shard.live
    twin = RankGroup(first.shard.ranks, first.shard.rank)
    twin.process_group = next(
        group
        for group in (dist.new_group([0, 1]), dist.new_group([2, 3]))
        if group is not dist.GroupMember.NON_GROUP_MEMBER
    )
    assert mesh_of(Placement(twin)).get_group() is twin.live
    assert mesh_of(first).get_group() is first.shard.live


def test_a_mesh_belongs_to_live_groups():
    run_ranks(4, groups_come_and_go)
    with provokes(mesh_of, GroupNotCreatedError):
        mesh_of(Placement(RankGroup((0, 1), 0)))


def only_rank_0_asks() -> None:
    placement = live("HYBRID_SHARD", ("set2", "mod2"))
    if dist.get_rank() == 0:
        with provokes(rows_of, SilentRanksError, match="rank 2 silent"):
            rows_of(placement)


def test_a_rank_that_asks_alone_hears_who_was_silent():
    run_ranks(4, only_rank_0_asks, dist_timeout=3)


def initialised_twice(path: str) -> None:
    """Names of groups begin anew with each default group; meshes must not."""
    rank = dist.get_rank()
    for again in (False, True):
        if again:
            dist.destroy_process_group()
            store = dist.FileStore(path, 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        placement = live()
        assert mesh_of(placement).get_group() is placement.shard.live
        assert torch.equal(whole(cut(numbers((5, 2)), placement)), numbers((5, 2)))


def test_a_mesh_is_made_anew_after_the_process_group_was(tmp_path):
    run_ranks(2, initialised_twice, str(tmp_path / "store"))
