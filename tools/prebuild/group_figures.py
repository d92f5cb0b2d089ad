"""Figures of the page about process groups, as inline SVG that follows the colour scheme.

One draws which ranks a word puts together, computed by the package. The other draws the loss
curves that a snippet printed.
"""

from __future__ import annotations

import importlib
from html import escape
from itertools import pairwise
from pathlib import Path

from tools.prebuild.fragments import PrebuildError
from tools.prebuild.recorded import recorded_output
from tools.prebuild.writer import Generated
from tools.snippet_files import Snippet

SNIPPET = "process_groups/loss_curves"
HOSTS, PER_HOST = 2, 4
WORDS = (
    ("set8", "None, 'set8', 'mod1'"),
    ("node", "'node', 'set4'"),
    ("set2", "'set2'"),
    ("self", "'self', 'set1'"),
    ("local_rank_across_nodes", "'local_rank_across_nodes', 'mod4'"),
    ("mod2", "'mod2'"),
)
"""The words that are drawn, and all that mean the same on this world."""
STROKES = ("currentColor", "var(--rank-0)", "var(--rank-1)", "var(--rank-2)", "var(--rank-3)")
WIDTHS = (9, 5, 2.5, 2.5, 2.5)
DASHES = ("", "", "7 5", "1.5 6", "")


def generate(snippets: list[Snippet], root: Path, output: Generated, *, fresh: bool) -> None:
    """Add both figures.

    Args:
        snippets: All snippet files.
        root: The repository.
        output: Where the files are collected.
        fresh: Run the snippet again, whatever the cache holds.

    Raises:
        PrebuildError: If what the snippet printed are no curves.
    """
    output.add("process_groups_ranks.svg", ranks_figure())
    curves = next((s for s in snippets if s.key == SNIPPET and s.api == "fsdp_ref"), None)
    if curves is None:
        output.add("loss_curves.svg", "\n")
        return
    names, rows = read_curves(recorded_output(curves, root, fresh=fresh), curves.path)
    output.add("loss_curves.svg", curves_figure(names, rows))


def ranks_figure() -> str:
    """Draw what each word puts together: a row of ranks per word, a colour and letter per group."""
    rank_lists = importlib.import_module("fsdp_ref.process_groups").rank_lists
    world = HOSTS * PER_HOST
    left, size, gap, top, height = 230, 36, 8, 64, 52
    across = [left + rank * (size + gap) + rank // PER_HOST * 3 * gap for rank in range(world)]
    bottom = top + len(WORDS) * height
    parts = []
    for host in range(HOSTS):
        first, last = across[host * PER_HOST], across[(host + 1) * PER_HOST - 1] + size
        parts += [
            f'<rect x="{first - 8}" y="4" width="{last - first + 16}" height="{bottom - 6}" '
            'rx="10" fill="none" stroke="currentColor" stroke-opacity="0.35"/>',
            text((first + last) / 2, 24, f"host {host}", "middle", bold=True),
        ]
    parts += [text(x + size / 2, 48, f"rank {rank}", "middle", 11) for rank, x in enumerate(across)]
    for row, (word, spelt) in enumerate(WORDS):
        y = top + row * height
        lines = spelt.replace(", ", ",\n", 1).split("\n")
        middle = y + size / 2 + 5 - 9 * (len(lines) - 1)
        parts += [text(left - 20, middle + 18 * at, line, "end") for at, line in enumerate(lines)]
        for number, ranks in enumerate(rank_lists(word, world, PER_HOST)):
            colour = f"var(--rank-{number % 4})"
            for rank in ranks:
                parts += [
                    f'<rect x="{across[rank]}" y="{y}" width="{size}" height="{size}" rx="6" '
                    f'fill="{colour}" fill-opacity="0.22" stroke="{colour}" stroke-width="2"/>',
                    text(across[rank] + size / 2, y + size / 2 + 5, "ABCDEFGH"[number], "middle"),
                ]
    title = f"The groups that each word makes of {world} ranks on {HOSTS} hosts"
    return figure(
        "groups-of-words", title, across[-1] + size + 12, bottom, parts, "min-width: 30rem"
    )


def text(
    x: float, y: float, content: str, anchor: str = "start", size: int = 14, *, bold: bool = False
) -> str:
    """Return a text element."""
    weight = ' font-weight="700"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{weight}>'
        f"{escape(content)}</text>"
    )


def figure(
    name: str, title: str, width: float, height: float, parts: list[str], limits: str
) -> str:
    """Put elements into an image with a name for those who cannot see it.

    Args:
        name: Unique among the figures of a page.
        title: What the figure shows.
        width: Of its own coordinates.
        height: Of its own coordinates.
        parts: The elements.
        limits: The least or the greatest width on a page, as a style.

    Returns:
        SVG to stand inside a page: without blank lines, in the colours of the page.
    """
    head = (
        f'<div class="group-figure" tabindex="0" style="overflow-x: auto">'  # narrow: it scrolls
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-labelledby="{name}" '
        f'fill="currentColor" style="width: 100%; {limits}; display: block; '
        f'font-family: var(--md-text-font-family)">'
    )
    title = f'<title id="{name}">{escape(title)}</title>'
    return "\n".join([head, title, *parts, "</svg></div>"]) + "\n"


def read_curves(printed: list[str], path: Path) -> tuple[list[str], list[list[float]]]:
    """Read the table of losses.

    Args:
        printed: The lines of the run.
        path: The snippet, for the message.

    Returns:
        The names of the curves, and their values, a row for each step.

    Raises:
        PrebuildError: If it is no table of numbers with a name for each column.
    """
    lines = [[cell.strip() for cell in line.split(" | ")] for line in printed if " | " in line]
    try:
        names, rows = lines[0][1:], [[float(cell) for cell in line[1:]] for line in lines[1:]]
    except (IndexError, ValueError) as error:
        raise PrebuildError(f"{path}:1: printed no table of losses: {error}") from error
    if len(rows) < 2 or len(names) != len(STROKES) or any(len(row) != len(names) for row in rows):
        raise PrebuildError(f"{path}:1: printed no {len(STROKES)} curves of at least two steps")
    return names, rows


def curves_figure(names: list[str], rows: list[list[float]]) -> str:
    """Draw the curves from the second step on, the first of them broad, so that others lie on it.

    Args:
        names: Of the curves.
        rows: The losses, a row for each step.

    Returns:
        SVG to stand inside a page.
    """
    rows = rows[1:]  # the first loss is that of the initial weights: the same, and far above
    lowest, highest = min(map(min, rows)), max(map(max, rows))
    left, right, top, bottom = 52, 500, 16, 300
    xs = [left + (right - left) * at / (len(rows) - 1) for at in range(len(rows))]

    def height(loss: float) -> float:
        return bottom - (loss - lowest) / (highest - lowest) * (bottom - top)

    parts = [
        f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="currentColor" '
        'stroke-opacity="0.5"/>',
        text(left - 8, top + 5, f"{highest:.2f}", "end", 12),
        text(left - 8, bottom + 5, f"{lowest:.2f}", "end", 12),
        text(left - 8, (top + bottom) / 2, "loss", "end", 12),
        text(left, bottom + 20, "step 2", "middle", 12),
        text(right, bottom + 20, f"step {len(rows) + 1}", "end", 12),
    ]
    for number, name in enumerate(names):
        points = [(x, height(row[number])) for x, row in zip(xs, rows, strict=True)]
        lines = "".join(f"L{x:.1f} {y:.1f}" for _, (x, y) in pairwise(points))
        start = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
        x, y = 250, 40 + 24 * number
        parts += [
            f'<path d="{start}{lines}" {pen(number)}/>',
            f'<path d="M{x} {y}h44" {pen(number)}/>',
            text(x + 56, y + 5, name),
        ]
    last = ", ".join(f"{name} {loss:.4f}" for name, loss in zip(names, rows[-1], strict=True))
    title = f"Loss curves; in the last step: {last}"
    return figure("loss-curves-figure", title, right + 12, bottom + 30, parts, "max-width: 36rem")


def pen(number: int) -> str:
    """Return how a curve is drawn."""
    opacity = ' stroke-opacity="0.25"' if number == 0 else ""
    dash = f' stroke-dasharray="{DASHES[number]}"' if DASHES[number] else ""
    return (
        f'fill="none" stroke="{STROKES[number]}" stroke-width="{WIDTHS[number]}" '
        f'stroke-linecap="round"{opacity}{dash}'
    )
