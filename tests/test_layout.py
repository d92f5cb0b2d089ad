"""The layout arithmetic, for any shapes and any number of ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ref.layout import FlatLayout, ParameterSlot
from tests.provoked import provokes

shapes = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=6)
world_sizes = st.integers(1, 9)


@st.composite
def layouts(draw):
    named = [(f"p{index}", shape) for index, shape in enumerate(draw(shapes))]
    return FlatLayout.of(named, draw(world_sizes))


@given(layouts())
def test_slots_lie_end_to_end_without_gaps(layout):
    offset = 0
    for slot in layout.slots:
        assert slot.offset == offset
        assert slot.numel == torch.empty(slot.shape).numel()
        offset = slot.stop
    assert layout.total_numel == offset


@given(layouts())
def test_padding_is_the_least_that_makes_shards_equal(layout):
    assert layout.padded_numel == layout.total_numel + layout.padding_numel
    assert layout.padded_numel == layout.shard_numel * layout.world_size
    assert 0 <= layout.padding_numel < layout.world_size


@given(layouts())
def test_shard_ranges_tile_the_padded_parameter_in_rank_order(layout):
    position = 0
    for rank in range(layout.world_size):
        start, stop = layout.shard_range(rank)
        assert (start, stop - start) == (position, layout.shard_numel)
        position = stop
    assert position == layout.padded_numel


@given(layouts())
def test_overlaps_put_every_element_of_every_parameter_in_exactly_one_shard(layout):
    for slot in layout.slots:
        owned = []
        for rank in range(layout.world_size):
            inner, outer, numel = layout.overlap(slot, rank)
            start, _ = layout.shard_range(rank)
            owned += range(inner, inner + numel)
            if numel:  # both coordinates name the same element of the flat parameter
                assert slot.offset + inner == start + outer
                assert outer + numel <= layout.shard_numel
            else:
                assert (inner, outer) == (0, 0)
        assert owned == list(range(slot.numel))


@settings(max_examples=50)
@given(layouts())
def test_shards_cut_by_overlap_join_into_the_original_parameters(layout):
    originals = [torch.randn(slot.shape) for slot in layout.slots]
    shards = torch.zeros(layout.world_size, layout.shard_numel)
    for slot, original in zip(layout.slots, originals, strict=True):
        for rank in range(layout.world_size):
            inner, outer, numel = layout.overlap(slot, rank)
            shards[rank, outer : outer + numel] = original.flatten()[inner : inner + numel]

    joined = shards.flatten()
    for slot, original in zip(layout.slots, originals, strict=True):
        assert torch.equal(joined[slot.offset : slot.stop].view(slot.shape), original)
    assert not joined[layout.total_numel :].any()


@given(layouts(), st.integers(-3, 12))
def test_a_rank_outside_the_group_is_refused(layout, rank):
    if 0 <= rank < layout.world_size:
        assert len(layout.shard_range(rank)) == 2
        return
    with provokes(FlatLayout.shard_range, ValueError, match=f"found rank {rank}$"):
        layout.shard_range(rank)
    slot = ParameterSlot("p", (2,), 0)
    with provokes(FlatLayout.overlap, ValueError, match=rf"0 <= rank < {layout.world_size}"):
        layout.overlap(slot, rank)


@pytest.mark.parametrize("world_size", [0, -1])
def test_no_ranks_are_refused(world_size):
    with provokes(FlatLayout.of, ValueError, match="world_size of at least 1"):
        FlatLayout.of([("p", (2,))], world_size)


def test_a_layout_without_parameters_is_empty():
    layout = FlatLayout.of([], world_size=3)
    assert (layout.total_numel, layout.shard_numel, layout.padded_numel) == (0, 0, 0)
