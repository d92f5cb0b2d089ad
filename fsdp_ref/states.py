"""What memory holds and where the step is: two small state machines.

Most failures of sharded training are a right thing at a wrong moment: a gather inside a gather,
a weight read after it was dropped. Two tables of legal moves turn them into errors.

`ShardState` says what is in memory for a unit, `Phase` where the training step is.
The two are independent: activation checkpointing runs a forward inside a backward.
"""

from __future__ import annotations

from enum import Enum


class ShardState(Enum):
    """What a unit's memory holds."""

    SHARDED = "sharded"
    """Only this rank's shard is in memory."""
    UNSHARDING = "unsharding"
    """The all-gather was issued; its result may not be used yet."""
    UNSHARDED = "unsharded"
    """The module sees the full parameters."""


LEGAL_MOVES: dict[ShardState, frozenset[ShardState]] = {
    ShardState.SHARDED: frozenset({ShardState.UNSHARDING}),
    # Back to SHARDED: after an exception while waiting, or when a prefetch was not needed.
    ShardState.UNSHARDING: frozenset({ShardState.UNSHARDED, ShardState.SHARDED}),
    ShardState.UNSHARDED: frozenset({ShardState.SHARDED}),
}
"""The legal moves between shard states; one method makes them and refuses all others."""


class Phase(Enum):
    """Where the training step is, for one unit."""

    IDLE = "idle"
    """Neither in a forward nor in a backward."""
    FORWARD = "forward"
    """Between the unit's pre-forward and post-forward."""
    PRE_BACKWARD = "pre_backward"
    """The gradient reached the unit's output; its parameters are gathered for backward."""
    POST_BACKWARD = "post_backward"
    """The gradient left through the unit's input; reduction and resharding."""


NEXT_PHASES: dict[Phase, frozenset[Phase]] = {
    # POST_BACKWARD without PRE_BACKWARD: other ranks used the unit, this one reduces zeros.
    Phase.IDLE: frozenset({Phase.FORWARD, Phase.PRE_BACKWARD, Phase.POST_BACKWARD}),
    # FORWARD inside FORWARD: a module that calls itself; a unit keeps a stack of phases.
    Phase.FORWARD: frozenset({Phase.FORWARD, Phase.IDLE}),
    # FORWARD inside PRE_BACKWARD: activation checkpointing recomputes.
    Phase.PRE_BACKWARD: frozenset({Phase.FORWARD, Phase.POST_BACKWARD}),
    Phase.POST_BACKWARD: frozenset({Phase.IDLE}),
}
"""Which phase may follow which; a phase entered inside another one returns to it."""
