"""The tables of legal moves are what the code does: it makes every move in them and no other."""

import itertools

import pytest
from torch import nn

from fsdp_ref.errors import ShardStateError
from fsdp_ref.options import Options
from fsdp_ref.rank_group import Placement, RankGroup
from fsdp_ref.registered import RegisteredNames
from fsdp_ref.states import LEGAL_MOVES, NEXT_PHASES, Phase, ShardState
from fsdp_ref.unit import Unit
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import mean_square, my_part, nested, seeded, whole_batch


def unit_without_parameters() -> Unit:
    placement = Placement(RankGroup(ranks=(0,), rank=0))
    wrapper = nn.Module()
    wrapper._fsdp_wrapped_module = nn.Identity()
    return Unit("layers.0", [], placement, RegisteredNames(wrapper, []), Options())


def unit_in(state: ShardState) -> Unit:
    unit = unit_without_parameters()
    path = {
        ShardState.SHARDED: [],
        ShardState.UNSHARDING: [ShardState.UNSHARDING],
        ShardState.UNSHARDED: [ShardState.UNSHARDING, ShardState.UNSHARDED],
    }
    for step in path[state]:
        unit.move(step)
    return unit


def test_a_unit_starts_sharded_and_idle():
    unit = unit_without_parameters()
    assert (unit.state, unit.phase) == (ShardState.SHARDED, Phase.IDLE)


@pytest.mark.parametrize(("start", "to"), [*itertools.product(ShardState, ShardState)])
def test_a_move_works_exactly_when_the_table_allows_it(start, to):
    unit = unit_in(start)
    if to in LEGAL_MOVES[start]:
        unit.move(to)
        assert unit.state is to
        return
    with provokes(Unit.move, ShardStateError) as caught:
        unit.move(to)
    assert unit.state is start
    assert caught.message.startswith("[rank 0] FSDP301 unit 'layers.0': expected a move from")
    assert f"found a move to {to.name}" in caught.message
    for legal in LEGAL_MOVES[start]:
        assert legal.name in caught.message


def test_the_table_of_moves_names_every_state():
    assert set(LEGAL_MOVES) == set(ShardState)
    assert set().union(*LEGAL_MOVES.values()) == set(ShardState)


def unit_in_phase(phase: Phase) -> Unit:
    unit = unit_without_parameters()
    path = {
        Phase.IDLE: [],
        Phase.FORWARD: [Phase.FORWARD],
        Phase.PRE_BACKWARD: [Phase.PRE_BACKWARD],
        Phase.POST_BACKWARD: [Phase.PRE_BACKWARD, Phase.POST_BACKWARD],
    }
    for step in path[phase]:
        unit.enter(step)
    assert unit.phase is phase
    return unit


@pytest.mark.parametrize(("start", "to"), [*itertools.product(Phase, Phase)])
def test_a_phase_is_entered_exactly_when_the_table_allows_it(start, to):
    unit = unit_in_phase(start)
    if to in NEXT_PHASES[start]:
        unit.enter(to)
        assert unit.phase is to
        return
    with provokes(Unit.enter, ShardStateError, match="FSDP301 unit 'layers.0'"):
        unit.enter(to)
    assert unit.phase is start


def test_a_forward_inside_another_phase_returns_to_it():
    for outer in (Phase.FORWARD, Phase.PRE_BACKWARD):
        unit = unit_in_phase(outer)
        unit.enter(Phase.FORWARD)
        unit.leave_forward()
        assert unit.phase is outer


def moves_and_phases_of_a_run() -> tuple[set, set]:
    """Note every change of state in training, in evaluation and after a failure. On ranks."""
    moves, phases = set(), set()
    move, enter = Unit.move, Unit.enter

    def noted_move(self: Unit, to: ShardState) -> None:
        moves.add((self.state, to))
        move(self, to)

    def noted_enter(self: Unit, phase: Phase) -> None:
        phases.add((self.phase, phase))
        enter(self, phase)

    Unit.move, Unit.enter = noted_move, noted_enter
    model, x = nested(seeded()), my_part(whole_batch())
    for _ in range(2):
        mean_square(model(x)).backward()
    unit = model._unit
    unit.start_unshard_ahead()  # a gather that turns out not to be needed
    unit.reshard()
    return moves, phases


def test_training_makes_every_move_of_the_table_and_no_other():
    legal = {(start, to) for start, ends in LEGAL_MOVES.items() for to in ends}
    for moves, phases in run_ranks(2, moves_and_phases_of_a_run):
        assert moves == legal
        assert phases <= {(start, to) for start, ends in NEXT_PHASES.items() for to in ends}
