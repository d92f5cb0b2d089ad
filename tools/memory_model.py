"""What a rank stores and sends under a strategy: the sums of the calculator on the memory page.

`site/assets/calculator.js` does the same sums. A browser test compares the two over a grid, and
another test compares these sums with recorded runs.
"""

from __future__ import annotations

from dataclasses import dataclass

FULL_PRECISION_BYTES = 4
OPTIMIZER_STATES = {"SGD": 0, "SGD with momentum": 1, "Adam, AdamW": 2}
"""Numbers in full precision that an optimizer keeps for each element of a shard."""

COMPUTE_BYTES = {"float32": 4, "bfloat16 or float16": 2}
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", *HYBRID)
DROPPED_AFTER_FORWARD = ("FULL_SHARD", "HYBRID_SHARD")


@dataclass(frozen=True)
class Setup:
    """A model and how it is trained.

    Attributes:
        root: Elements that stay with the root.
        layer: Elements of each layer, every one a unit of its own.
        layers: Number of layers.
        world_size: Number of ranks.
        ranks_per_host: How many of them share a host; hybrid strategies cut within it.
        strategy: One of `STRATEGIES`.
        compute_bytes: Bytes of an element while computing and when gathered.
        optimizer_states: Numbers that the optimizer keeps for each element.
        reduce_bytes: Bytes of an element when gradients are reduced.
    """

    root: int
    layer: int
    layers: int
    world_size: int
    ranks_per_host: int
    strategy: str = "FULL_SHARD"
    compute_bytes: int = 4
    optimizer_states: int = 2
    reduce_bytes: int = 4


@dataclass(frozen=True)
class Cost:
    """Bytes of one rank. Activations, and a gradient that is on its way, come on top.

    Attributes:
        shards: The parameters that it keeps, in full precision.
        optimizer: The state of the optimizer for them.
        gradients: Their gradients, from the backward until they are cleared.
        full: The most bytes of full parameters at once.
        shared: Sent in a step among the ranks that share the parameters.
        copied: Sent in a step between copies of the model.
    """

    shards: int
    optimizer: int
    gradients: int
    full: int
    shared: int
    copied: int

    @property
    def at_rest(self) -> int:
        """Bytes between steps."""
        return self.shards + self.optimizer

    @property
    def at_peak(self) -> int:
        """Bytes at the end of a backward at most."""
        return self.at_rest + self.gradients + self.full


def cost(setup: Setup) -> Cost:
    """Add up what one rank stores and sends."""
    size = setup.world_size
    if setup.strategy in HYBRID:
        size = min(setup.ranks_per_host, setup.world_size)
    copies = setup.world_size // size
    root, layer = -(-setup.root // size), -(-setup.layer // size)  # elements of a shard, padded
    shard = root + setup.layers * layer
    dropped = setup.strategy in DROPPED_AFTER_FORWARD
    at_once = min(setup.layers, 2) if dropped else setup.layers
    gathers = root + setup.layers * layer * (2 if dropped else 1)
    reduced = shard * setup.reduce_bytes
    return Cost(
        shards=shard * FULL_PRECISION_BYTES,
        optimizer=shard * FULL_PRECISION_BYTES * setup.optimizer_states,
        gradients=shard * FULL_PRECISION_BYTES,
        full=(root + at_once * layer) * size * setup.compute_bytes,
        shared=(size - 1) * (gathers * setup.compute_bytes + reduced),
        copied=2 * (copies - 1) * reduced // copies,
    )
