"""Where each element of each parameter lives: pure arithmetic, no tensors, no ranks talking.

A unit's parameters are laid end to end, padded at the end to a multiple of the number of
ranks, and cut into equal shards. All offsets are in elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class ParameterSlot:
    """Where one original parameter lies inside its flat parameter.

    Attributes:
        name: The parameter's name, relative to the wrapped module.
        shape: The original shape.
        offset: First element inside the flat parameter.
    """

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements; the product of the shape."""
        return prod(self.shape)

    @property
    def stop(self) -> int:
        """One past the last element inside the flat parameter."""
        return self.offset + self.numel


@dataclass(frozen=True)
class FlatLayout:
    """The arithmetic of one flat parameter over ``world_size`` ranks.

    Attributes:
        slots: One entry per original parameter, in order, without gaps.
        world_size: Number of ranks that share the flat parameter.

    Examples:
        Ten elements on four ranks: three each, so rank 3 owns two of padding.

        >>> layout = FlatLayout.of([("weight", (4, 2)), ("bias", (2,))], world_size=4)
        >>> [layout.shard_range(rank) for rank in range(4)]
        [(0, 3), (3, 6), (6, 9), (9, 12)]
    """

    slots: tuple[ParameterSlot, ...]
    world_size: int

    @classmethod
    def of(cls, parameters: Sequence[tuple[str, Sequence[int]]], world_size: int) -> FlatLayout:
        """Lay parameters end to end.

        Args:
            parameters: Pairs of name and shape, in order.
            world_size: Number of ranks, at least 1.

        Returns:
            The layout.

        Raises:
            ValueError: If ``world_size`` is below 1.

        Examples:
            >>> FlatLayout.of([("w", (2, 3)), ("b", (2,))], world_size=2).slots[1]
            ParameterSlot(name='b', shape=(2,), offset=6)
        """
        if world_size < 1:
            raise ValueError(f"expected world_size of at least 1, found {world_size}")
        slots, offset = [], 0
        for name, shape in parameters:
            slot = ParameterSlot(name, tuple(shape), offset)
            slots.append(slot)
            offset = slot.stop
        return cls(tuple(slots), world_size)

    @property
    def total_numel(self) -> int:
        """Elements of all parameters together, without padding."""
        return self.slots[-1].stop if self.slots else 0

    @property
    def shard_numel(self) -> int:
        """Elements of each rank's shard: ``ceil(total_numel / world_size)``."""
        return -(-self.total_numel // self.world_size)

    @property
    def padded_numel(self) -> int:
        """Elements of the padded flat parameter: ``shard_numel * world_size``."""
        return self.shard_numel * self.world_size

    @property
    def padding_numel(self) -> int:
        """Elements that are padding, always fewer than ``world_size``."""
        return self.padded_numel - self.total_numel

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Return the slice of the padded flat parameter that ``rank`` owns.

        All ranks own equally many elements, because all-gather and reduce-scatter need
        equal pieces; the last ranks may therefore own padding.

        Args:
            rank: Position in the shard group, ``0 <= rank < world_size``.

        Returns:
            ``(start, stop)`` in elements; ``stop - start`` is ``shard_numel``.

        Raises:
            ValueError: If ``rank`` is outside the shard group.

        Examples:
            >>> FlatLayout.of([("weight", (5,))], world_size=2).shard_range(1)
            (3, 6)
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"expected 0 <= rank < {self.world_size}, found rank {rank}")
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def overlap(self, slot: ParameterSlot, rank: int) -> tuple[int, int, int]:
        """Return which part of one parameter lies in one rank's shard.

        Args:
            slot: The parameter.
            rank: Position in the shard group.

        Returns:
            ``(start in the parameter, start in the shard, number of elements)``; the number
            is 0 when nothing of the parameter lies in that shard.

        Raises:
            ValueError: If ``rank`` is outside the shard group.

        Examples:
            The bias starts at element 6; rank 1 of 2 owns elements 4 to 8.

            >>> layout = FlatLayout.of([("w", (2, 3)), ("b", (2,))], world_size=2)
            >>> layout.overlap(layout.slots[1], rank=1)
            (0, 2, 2)
        """
        start, stop = self.shard_range(rank)
        first, last = max(start, slot.offset), min(stop, slot.stop)
        if first >= last:
            return 0, 0, 0
        return first - slot.offset, first - start, last - first
