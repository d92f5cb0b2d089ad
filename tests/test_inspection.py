"""`explain` and `unit_tree` say where weights are, on any rank alone, and are right about it."""

import dataclasses
import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_ref
from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ModuleWrapPolicy, explain, timeline, unit_tree
from fsdp_ref.places import UnitPlace, UnitTree
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import Layer, Stack, seeded, three_deep


class Mixed(nn.Module):
    """Tied, frozen, in two dtypes, with a buffer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.inner = nn.Linear(3, 3)
        self.inner.bias.requires_grad_(False)
        self.norm = nn.LayerNorm(3).double()
        self.register_buffer("shift", torch.zeros(3))
        self.head = nn.Linear(3, 7)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.inner(self.embedding(tokens))
        hidden = (hidden + self.shift).to(hidden.dtype)
        return self.head(self.norm(hidden.to(self.norm.weight.dtype)).to(hidden.dtype))


def mixed(**arguments):
    """Give the linear layer inside a unit of its own."""
    model = seeded_in_own_dtypes()
    model.inner = FSDP(model.inner, **arguments)
    return FSDP(model, **arguments)


def seeded_in_own_dtypes():
    torch.manual_seed(0)
    return Mixed()


def plain_weights():
    named = seeded_in_own_dtypes().named_parameters(remove_duplicate=False)
    return {name: parameter.detach() for name, parameter in named}


# Right about it


def explanation_and_shards(arguments):
    model = mixed(**arguments)
    units = {"root": model, "inner": model.inner}
    shards = {
        (name, number): flat_param.detach().clone()
        for name, unit in units.items()
        for number, flat_param in enumerate(unit._unit.flat_params)
    }
    return explain(model), shards


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_element_is_where_explain_says(world_size):
    ranks = run_ranks(world_size, explanation_and_shards, {})
    expected = plain_weights()
    explanation = ranks[0][0]
    assert {place.name for place in explanation} == set(expected)
    for place in explanation:
        weight, home = expected[place.name], (place.unit, place.flat_param)
        assert place.shape == weight.shape
        found = torch.full((weight.numel(),), float("nan"), dtype=weight.dtype)
        for piece in place.pieces:
            shard = ranks[piece.rank][1][home]
            first = place.offset + piece.start - piece.rank * shard.numel()
            found[piece.start : piece.stop] = shard[first : first + piece.stop - piece.start]
        assert torch.equal(found.view(place.shape), weight), place
        numel = sum(piece.stop - piece.start for piece in place.pieces)
        assert numel == weight.numel(), "each element once"


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_bytes_at_rest_and_padding_add_up_to_what_the_rank_holds(world_size):
    ranks = run_ranks(world_size, explanation_and_shards, {})
    for rank, (explanation, shards) in enumerate(ranks):
        for home, shard in shards.items():
            places = [p for p in explanation if (p.unit, p.flat_param) == home and not p.tied_to]
            last = places[-1].offset + torch.Size(places[-1].shape).numel()
            padding_here = max(0, (rank + 1) * shard.numel() - max(last, rank * shard.numel()))
            held = sum(place.bytes_at_rest for place in places)
            assert held == (shard.numel() - padding_here) * shard.dtype.itemsize
            assert {place.padding_numel for place in places} == {shard.numel() * world_size - last}
            assert all(place.device == shard.device for place in places)


PRECISION = {
    "mixed_precision": {
        "param_dtype": torch.bfloat16,
        "reduce_dtype": torch.float32,
        "buffer_dtype": torch.float16,
    }
}


def explanation_and_step(arguments):
    model = mixed(**arguments)
    before = explain(model), unit_tree(model)
    with timeline() as recorded:
        model(torch.tensor([0, 1, 2])).float().sum().backward()
    again = explain(model), unit_tree(model)
    with model.summon_full_params():
        inside = explain(model), unit_tree(model)
    assert before == again == inside
    return before, recorded, model.shift.dtype


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        PRECISION,
        {"sharding_strategy": "SHARD_GRAD_OP", "cpu_offload": True},
        {"use_orig_params": True},
    ],
)
def test_it_says_the_same_at_any_time_and_a_step_confirms_it(arguments):
    for (explanation, tree), recorded, buffer_dtype in run_ranks(
        2, explanation_and_step, arguments
    ):
        for place in explanation:
            mine = [event for event in recorded.events if event.unit == place.unit]
            gathered = {e.dtype for e in mine if e.operation == "all-gather"}
            reduced = {e.dtype for e in mine if e.operation == "reduce-scatter"}
            assert place.dtypes.gathered in gathered
            assert (place.dtypes.reduced or torch.float32) in reduced
            assert place.dtypes.buffers in (None, buffer_dtype)
        frozen = {place.name for place in explanation if place.dtypes.reduced is None}
        assert frozen == {"inner.bias"}
        whole = max(event.live_unsharded_bytes for event in recorded.events)
        assert sum(unit.bytes_unsharded for unit in tree) == whole
        assert (
            {unit.name for unit in tree} == {e.unit for e in recorded.events} == {"root", "inner"}
        )


def alone():
    """Ask on one rank only, before anything was sent; the group does not even exist."""
    if dist.get_rank() == 0:
        return None
    model = FSDP(seeded(), auto_wrap_policy=ModuleWrapPolicy({Layer}), process_group="self")
    assert model._unit.group.process_group is None
    text = f"{explain(model)}{unit_tree(model)}"
    assert model._unit.group.process_group is None
    return text


def test_one_rank_may_ask_alone_and_before_any_group_exists():
    silent, text = run_ranks(2, alone)
    assert silent is None
    assert "layers.2.linear.weight" in text


# Ties, strategies, and what no unit holds


def ties_and_leftovers():
    inner = seeded_in_own_dtypes()
    outside = nn.Linear(2, 2)
    model = nn.ModuleDict({"sharded": FSDP(inner), "plain": outside, "again": outside})
    return explain(model), unit_tree(model)


def test_aliases_and_parameters_outside_of_units_are_listed():
    explanation, tree = run_ranks(2, ties_and_leftovers)[0]
    tied = explanation.named("sharded.head.weight")
    first = explanation.named("sharded.embedding.weight")
    assert tied == dataclasses.replace(first, name=tied.name, tied_to=first.name)
    plain = explanation.named("plain.weight")
    assert (plain.unit, plain.flat_param, plain.strategy) == (None, None, None)
    assert (plain.pieces, plain.ranks, plain.copies) == ((), (), ())
    assert plain.bytes_at_rest == plain.bytes_unsharded == 16
    assert explanation.named("again.weight").tied_to == "plain.weight"
    assert [place.unit for place in explanation[-4:]] == [None] * 4
    assert [unit.name for unit in tree] == ["sharded"]


def two_names_for_one_unit():
    unit = FSDP(nn.Linear(2, 2))
    model = FSDP(nn.Sequential(unit, unit, nn.Linear(2, 1)))
    return explain(model), unit_tree(model)


def test_a_unit_that_hangs_in_two_places_has_two_names_and_one_memory():
    explanation, tree = run_ranks(1, two_names_for_one_unit)[0]
    assert [(place.name, place.tied_to) for place in explanation] == [
        ("2.weight", None),
        ("2.bias", None),
        ("0.weight", None),
        ("0.bias", None),
        ("1.weight", "0.weight"),
        ("1.bias", "0.bias"),
    ]
    assert [unit.name for unit in tree] == ["root", "0"]


def strategies():
    rank = dist.get_rank()
    pairs = ([0, 1], [2, 3])[rank // 2], [rank % 2, rank % 2 + 2]
    found = {}
    for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        found[name] = explain(FSDP(nn.Linear(2, 3), sharding_strategy=name))[0]
    for name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        model = FSDP(nn.Linear(2, 3), sharding_strategy=name, process_group=pairs)
        found[name] = explain(model)[0]
    return found


def test_strategy_groups_and_copies_are_those_that_were_asked_for():
    found = run_ranks(4, strategies)[3]
    assert {name: place.strategy for name, place in found.items()} == {name: name for name in found}
    sharing = {name: (place.ranks, place.copies) for name, place in found.items()}
    assert sharing == {
        "FULL_SHARD": ((0, 1, 2, 3), ()),
        "SHARD_GRAD_OP": ((0, 1, 2, 3), ()),
        "NO_SHARD": ((3,), (0, 1, 2, 3)),
        "HYBRID_SHARD": ((2, 3), (1, 3)),
        "_HYBRID_SHARD_ZERO2": ((2, 3), (1, 3)),
    }
    assert [str(piece) for piece in found["HYBRID_SHARD"].pieces] == ["2[0:5]", "3[5:6]"]


def names_and_errors():
    explanation = explain(FSDP(nn.Linear(2, 3)))
    with provokes(fsdp_ref.places.Explanation.named, KeyError, match="there are weight, bias"):
        explanation.named("wieght")  # misspelt on purpose


def test_an_unknown_name_is_answered_with_the_known_ones():
    run_ranks(1, names_and_errors)


# As tables


def tables():
    deep = three_deep(Stack(2))
    precise = FSDP(Mixed(), **PRECISION)
    inner = deep.module.layers[0]
    return [str(table) for table in (explain(deep), unit_tree(deep), explain(precise))], (
        str(explain(inner)).splitlines()[1:3]
    )


PLACES = """\
parameter                 shape   offset  elements on ranks                 bytes here  whole
root: FULL_SHARD over 0-3, float32
  head.weight             (2, 5)       0  0[0:3] 1[3:6] 2[6:9] 3[9:10]              12     40
  head.bias               (2,)        10  3[0:2]                                     0      8
layers.0: FULL_SHARD over 0-3, float32, 3 of padding
  layers.0.scale          (5,)         0  0[0:2] 1[2:4] 2[4:5]                       8     20
layers.0.linear: FULL_SHARD over 0-3, float32, 2 of padding
  layers.0.linear.weight  (5, 5)       0  0[0:8] 1[8:16] 2[16:24] 3[24:25]          32    100
  layers.0.linear.bias    (5,)        25  3[0:5]                                     0     20
layers.1: FULL_SHARD over 0-3, float32, 3 of padding
  layers.1.scale          (5,)         0  0[0:2] 1[2:4] 2[4:5]                       8     20
layers.1.linear: FULL_SHARD over 0-3, float32, 2 of padding
  layers.1.linear.weight  (5, 5)       0  0[0:8] 1[8:16] 2[16:24] 3[24:25]          32    100
  layers.1.linear.bias    (5,)        25  3[0:5]                                     0     20"""

TREE = """\
unit                   class   parameters  elements  padding  bytes here  whole
root                   Stack            2        12        0          12     48  FULL_SHARD over 0-3
├─ layers.0            Layer            1         5        3           8     32  FULL_SHARD over 0-3
│  └─ layers.0.linear  Linear           2        30        2          32    128  FULL_SHARD over 0-3
└─ layers.1            Layer            1         5        3           8     32  FULL_SHARD over 0-3
   └─ layers.1.linear  Linear           2        30        2          32    128  FULL_SHARD over 0-3
"""

PRECISE = [  # above the parameters of each flat parameter
    "root: FULL_SHARD over 0-3, float32, gathered in bfloat16, reduced in float32, "
    "buffers in float16, 3 of padding",
    "root, flat parameter 1: FULL_SHARD over 0-3, float32, gathered in bfloat16, frozen, "
    "buffers in float16, 1 of padding",
    "root, flat parameter 2: FULL_SHARD over 0-3, float64, gathered in bfloat16, reduced in "
    "float32, buffers in float16, 2 of padding",
]


def test_both_print_as_tables():
    (places, tree, precise), inner = run_ranks(4, tables)[0]
    assert places == PLACES
    assert tree == TREE.rstrip()
    assert [line for line in precise.splitlines() if line.startswith("root")] == PRECISE
    assert "  head.weight = embedding.weight" in precise
    assert inner[0] == "layers.0: FULL_SHARD over 0-3, float32, 3 of padding"
    assert inner[1].split()[0] == "scale"


def drawn(*depths: int) -> list[str]:
    blank = UnitPlace("x", 0, "", (), 0, 0, 0, 0, (), (), "")
    tree = UnitTree(dataclasses.replace(blank, depth=depth) for depth in depths)
    return [line.split("x")[0] for line in str(tree).splitlines()[1:]]


def test_branches_lead_on_to_the_next_unit_at_the_same_depth():
    assert drawn(0, 1, 2, 2, 1, 2) == ["", "├─ ", "│  ├─ ", "│  └─ ", "└─ ", "   └─ "]
    assert drawn(0, 0, 1) == ["", "", "└─ "]  # two roots next to each other


def test_of_many_ranks_the_table_shows_some():
    piece = fsdp_ref.places.Piece
    place = dataclasses.replace(
        explain(nn.Linear(2, 3))[0],
        unit="root",
        strategy="FULL_SHARD",
        ranks=tuple(range(0, 64, 2)),
        pieces=tuple(piece(rank, rank, rank + 1) for rank in range(0, 64, 2)),
    )
    assert place.cells()[3] == "0[0:1] 2[2:3] 4[4:5] .. 62[62:63]"
    assert "over 0,2,4,..,62" in place.home


class FakeTable:
    """Takes down what a `rich.table.Table` is asked to draw."""

    def __init__(self):
        self.columns, self.rows = [], []

    def add_column(self, title, justify):
        self.columns.append((title, justify))

    def add_row(self, *cells):
        self.rows.append(cells)


def test_rich_draws_the_same_rows(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", types.ModuleType("rich"))
    monkeypatch.setitem(sys.modules, "rich.table", types.SimpleNamespace(Table=FakeTable))
    ((places, tree),) = run_ranks(1, both_answers)
    table = places.__rich__()
    assert table.columns[0] == ("parameter", "left")
    assert table.columns[4] == ("bytes here", "right")
    assert table.rows[1] == ("bias", "(3,)", "6", r"0\[0:3]", "12", "12", places[1].home)
    assert tree.__rich__().rows == [
        ("root", "Linear", "2", "9", "0", "36", "36", "FULL_SHARD over 0")
    ]


def both_answers():
    model = FSDP(nn.Linear(2, 3))
    return explain(model), unit_tree(model)
