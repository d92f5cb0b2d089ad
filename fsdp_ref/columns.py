"""Text in columns for terminals, and short words for ranks and dtypes."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from typing import Any

import torch

_SHOWN = 4  # of many ranks or pieces


def align(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Pad cells so that columns stand below each other.

    Args:
        rows: The cells, equally many in each row.
        right: Numbers of the columns that end, rather than begin, below each other.

    Returns:
        One line per row, without blanks at the end.

    Examples:
        >>> for line in align([("unit", "bytes"), ("layers.0", "7")], right={1}):
        ...     print(line)
        unit      bytes
        layers.0      7
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def shorten(words: Sequence[str], separator: str) -> str:
    """Join words; of many, the first ones and the last one.

    Examples:
        >>> shorten(["a", "b", "c", "d", "e", "f"], " ")
        'a b c .. f'
    """
    if len(words) > _SHOWN:
        words = [*words[: _SHOWN - 1], "..", words[-1]]
    return separator.join(words)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Name ranks in a few characters.

    Examples:
        >>> ranks_in_words([0, 1, 2, 3]), ranks_in_words([1, 3]), ranks_in_words([2])
        ('0-3', '1,3', '2')
    """
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return shorten([str(rank) for rank in ranks], ",")


def dtype_in_words(dtype: torch.dtype | None) -> str:
    """Name a dtype without its module.

    Examples:
        >>> dtype_in_words(torch.bfloat16), dtype_in_words(None)
        ('bfloat16', '-')
    """
    return "-" if dtype is None else str(dtype).removeprefix("torch.")


def rich_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> Any:
    """Return a table of the package `rich`, which is asked for only by `rich` itself.

    Args:
        rows: The cells; the first row is the header.
        right: Numbers of the columns that are aligned at their end.

    Returns:
        A `rich.table.Table`.
    """
    # Not an import statement: the package is never needed, and this runs only where it exists.
    table = importlib.import_module("rich.table").Table()
    for number, title in enumerate(rows[0]):
        table.add_column(title, justify="right" if number in right else "left")
    for row in rows[1:]:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))  # brackets are markup to it
    return table
