"""The answers of `explain` and `unit_tree`: rows of data, and the tables that they print as."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fsdp_ref.columns import align, dtype_in_words, ranks_in_words, rich_table, shorten


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of one parameter, flattened, that one rank holds.

    Attributes:
        rank: The global rank.
        start: First element of the parameter.
        stop: One past the last element.
    """

    rank: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.rank}[{self.start}:{self.stop}]"


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of a parameter in the course of a step.

    Attributes:
        at_rest: Of the shard, which the optimizer updates.
        gathered: Of the full parameter, with which the module computes.
        reduced: Of the gradient on its way; `None` if the parameter is frozen, or in no unit.
        buffers: Of floating-point buffers in the same unit; `None` if they are left as they are.
    """

    at_rest: torch.dtype
    gathered: torch.dtype
    reduced: torch.dtype | None
    buffers: torch.dtype | None = None

    def __str__(self) -> str:
        words = [dtype_in_words(self.at_rest)]
        if self.gathered != self.at_rest:
            words.append(f"gathered in {dtype_in_words(self.gathered)}")
        if self.reduced is None:
            words.append("frozen")
        elif self.reduced != self.gathered:
            words.append(f"reduced in {dtype_in_words(self.reduced)}")
        if self.buffers is not None:
            words.append(f"buffers in {dtype_in_words(self.buffers)}")
        return ", ".join(words)


@dataclass(frozen=True)
class WeightPlace:
    """Where one original parameter is.

    Attributes:
        name: Its name, seen from the model that was asked about.
        shape: Its shape before wrapping.
        unit: The unit that holds it, as in a timeline; `None` if no unit does: then every rank
            holds all of it.
        flat_param: Which of the unit's flat parameters holds it, counted from 0.
        offset: Its first element in the flat parameter.
        pieces: Who holds which of its elements, among the ranks that share one copy. A rank
            that holds none is left out.
        ranks: The ranks that share one copy; empty if no unit holds it.
        copies: The ranks that hold the same pieces as this one, itself included; empty if there
            is one copy only.
        strategy: The sharding strategy of the unit.
        dtypes: Its dtypes in the course of a step.
        device: Where this rank's piece is between steps.
        bytes_at_rest: Bytes of it on this rank between steps, without optimizer state.
        bytes_unsharded: Bytes of it on each rank while its unit is whole.
        padding_numel: Elements of padding at the end of its flat parameter.
        tied_to: The first name of the same parameter, if this is another one. It has no memory
            of its own then.
    """

    name: str
    shape: tuple[int, ...]
    unit: str | None
    flat_param: int | None
    offset: int
    pieces: tuple[Piece, ...]
    ranks: tuple[int, ...]
    copies: tuple[int, ...]
    strategy: str | None
    dtypes: Dtypes
    device: torch.device
    bytes_at_rest: int
    bytes_unsharded: int
    padding_numel: int
    tied_to: str | None = None

    @property
    def home(self) -> str:
        """What the table says above the parameters of one flat parameter."""
        if self.unit is None or self.strategy is None:
            return f"in no unit: {dtype_in_words(self.dtypes.at_rest)}"
        which = f", flat parameter {self.flat_param}" if self.flat_param else ""
        padding = f", {self.padding_numel} of padding" if self.padding_numel else ""
        where = _where(self.strategy, self.ranks, self.copies)
        return f"{self.unit}{which}: {where}, {self.dtypes}{padding}"

    def cells(self) -> tuple[str, ...]:
        """What the table says about it."""
        held = shorten([str(piece) for piece in self.pieces], " ")
        name = f"{self.name} = {self.tied_to}" if self.tied_to else self.name
        return (name, str(self.shape), f"{self.offset:,}", held or "all on every rank",
                f"{self.bytes_at_rest:,}", f"{self.bytes_unsharded:,}")  # fmt: skip


class Explanation(tuple[WeightPlace, ...]):
    """The places of all parameters, as a tuple that prints as a table.

    In the table, `2[5:9]` means that rank 2 holds elements 5 to 8 of the flattened parameter.

    Examples:
        A module that is not wrapped is whole on every rank.

        >>> from fsdp_ref import explain
        >>> [place.unit for place in explain(torch.nn.Linear(2, 3))]
        [None, None]
    """

    def named(self, name: str) -> WeightPlace:
        """Return the place of one parameter.

        Args:
            name: One of its names in the plain model.

        Returns:
            Its place.

        Raises:
            KeyError: If there is no such parameter.
        """
        for place in self:
            if place.name == name:
                return place
        raise KeyError(f"no parameter {name!r}; there are {', '.join(p.name for p in self)}")

    def __str__(self) -> str:
        indented = [("  " + cells[0], *cells[1:]) for cells in map(WeightPlace.cells, self)]
        header, *lines = align([_WEIGHT_HEADER, *indented], _WEIGHT_NUMBERS)
        text, home = [header], ""
        for place, line in zip(self, lines, strict=True):
            if place.home != home:
                home = place.home
                text.append(home)
            text.append(line)
        return "\n".join(text)

    def __rich__(self) -> Any:
        rows = [(*place.cells(), place.home) for place in self]
        return rich_table([(*_WEIGHT_HEADER, "where"), *rows], _WEIGHT_NUMBERS)


_WEIGHT_HEADER = ("parameter", "shape", "offset", "elements on ranks", "bytes here", "whole")
_WEIGHT_NUMBERS = {2, 4, 5}


@dataclass(frozen=True)
class UnitPlace:
    """One unit in the tree of units.

    Attributes:
        name: Its name, as in a timeline.
        depth: How many units are around it.
        module: The class of the wrapped module.
        parameters: Names of the parameters that it holds itself, seen from its module.
        numel: Elements of these.
        padding_numel: Elements of padding at the end of its flat parameters.
        bytes_at_rest: Bytes of its shards on this rank, padding included.
        bytes_unsharded: Bytes on each rank while it is whole, padding included.
        ranks: The ranks that share one copy.
        copies: The ranks that hold the same shards as this one, itself included; empty if there
            is one copy only.
        strategy: Its sharding strategy.
    """

    name: str
    depth: int
    module: str
    parameters: tuple[str, ...]
    numel: int
    padding_numel: int
    bytes_at_rest: int
    bytes_unsharded: int
    ranks: tuple[int, ...]
    copies: tuple[int, ...]
    strategy: str

    def cells(self) -> tuple[str, ...]:
        """What the table says about it, after its name."""
        return (self.module, str(len(self.parameters)), f"{self.numel:,}",
                str(self.padding_numel), f"{self.bytes_at_rest:,}", f"{self.bytes_unsharded:,}",
                _where(self.strategy, self.ranks, self.copies))  # fmt: skip


class UnitTree(tuple[UnitPlace, ...]):
    """The units of a model, outer before inner, as a tuple that prints as a tree.

    Examples:
        A model that is not wrapped has none.

        >>> from fsdp_ref import unit_tree
        >>> unit_tree(torch.nn.Linear(2, 3)) == ()
        True
    """

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [_TREE_HEADER]
        for number, unit in enumerate(self):
            branches = _branches([below.depth for below in self[number:]])
            rows.append((branches + unit.name, *unit.cells()))
        return rows

    def __str__(self) -> str:
        return "\n".join(align(self._rows(), _TREE_NUMBERS))

    def __rich__(self) -> Any:
        return rich_table(self._rows(), _TREE_NUMBERS)


_TREE_HEADER = ("unit", "class", "parameters", "elements", "padding", "bytes here", "whole", "")
_TREE_NUMBERS = {2, 3, 4, 5, 6}


def _branches(depths: list[int]) -> str:
    """Draw the lines in front of the first of ``depths``; the others come below it."""
    depth, *below = depths
    drawn = ""
    for level in range(1, depth + 1):
        more = level in below[: next((n for n, d in enumerate(below) if d < level), len(below))]
        if level < depth:
            drawn += "│  " if more else "   "
        else:
            drawn += "├─ " if more else "└─ "
    return drawn


def _where(strategy: str, ranks: tuple[int, ...], copies: tuple[int, ...]) -> str:
    copied = f", copies on {ranks_in_words(copies)}" if copies else ""
    return f"{strategy} over {ranks_in_words(ranks)}{copied}"
