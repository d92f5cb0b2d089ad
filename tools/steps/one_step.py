"""The picture of one sharded step on the home page, drawn from the recorded step."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

from tools.prebuild.writer import Generated
from tools.steps.charts import in_words, text
from tools.steps.figure import Ways

WIDTH, TOP, ROW, CURVE = 420, 62, 34, 74  # narrow enough for a phone
WAY = "FULL_SHARD"
LEGEND = (("all-gather", "--rank-1"), ("whole", "--rank-0"), ("reduce-scatter", "--rank-2"))
PHASES = ("forward", "backward")

Ticks = list[dict[str, Any]]


def moments(ticks: Ticks, unit: str) -> Iterator[tuple[str, int, int]]:
    """Yield colour, beginning and end of all that happens to a unit, in its order."""
    began: dict[str, int] = {}
    for now, tick in enumerate(ticks):
        if tick["unit"] != unit:
            continue
        match tick["what"]:
            case "all-gather" | "reduce-scatter" as what:
                began[what] = now
            case "all-gather done":
                yield "--rank-1", began["all-gather"], now
                began["whole"] = now
            case "reduce-scatter done":
                yield "--rank-2", began["reduce-scatter"], now
            case "reshard":
                yield "--rank-0", began["whole"], now


def at(now: int, ticks: Ticks) -> float:
    """Return where a moment lies from left to right."""
    return now * WIDTH / (len(ticks) - 1)


def lanes(ticks: Ticks, units: list[dict[str, Any]]) -> Iterator[str]:
    """Yield one lane for each unit: a thin line for its shard, and blocks on it."""
    for row, unit in enumerate(units):
        y = TOP + row * ROW
        yield text(5, y - 3, unit["name"])
        yield (
            f'<rect x="0" y="{y + 6}" width="{WIDTH}" height="3" '
            'fill="currentColor" fill-opacity="0.25"/>'
        )
        for colour, start, stop in moments(ticks, unit["name"]):
            x, end = at(start, ticks), at(stop, ticks)
            yield (
                f'<rect x="{x:.1f}" y="{y}" width="{end - x:.1f}" height="15" '
                f'fill="var({colour})"/>'
            )


def curve(ticks: Ticks, whole: int, y: float) -> Iterator[str]:
    """Yield the bytes of whole units over the step, under a line for the whole model."""
    bottom, scale = y + CURVE, (CURVE - 8) / whole
    path, live = [f"M0 {bottom}"], 0
    for now, tick in enumerate(ticks):
        live = tick.get("live", live)
        path.append(f"H{at(now, ticks):.1f}V{bottom - live * scale:.1f}")
    line = bottom - whole * scale
    yield f'<path d="{"".join(path)}H{WIDTH}V{bottom}Z" fill="var(--rank-0)" fill-opacity="0.8"/>'
    dashes = 'stroke="currentColor" stroke-dasharray="4 4" fill="none"'
    yield f'<path d="M0 {line:.1f}H{WIDTH}" {dashes}/>'
    yield text(5, round(line - 6), f"all units whole, as in data parallelism: {in_words(whole)}")


def drawing(ways: Ways) -> str:
    """Return the figure as one block of HTML without blank lines."""
    rank = ways[WAY][0]
    ticks, units = rank["ticks"], rank["units"]
    whole = sum(unit["whole"] for unit in units)
    most = max(tick.get("live", 0) for tick in ticks)
    below = TOP + ROW * len(units) + 14
    height = below + CURVE + 20
    title = (
        f"One training step on one of {len(ways[WAY])} ranks. Each unit is gathered before it "
        f"computes and dropped after it, in the forward and once more in the backward; then its "
        f"gradient leaves as a reduce-scatter. Of {in_words(whole)} of weights, at most "
        f"{in_words(most)} are whole at once."
    )
    lines = [
        '<figure class="one-step">',
        f'<svg role="img" viewBox="0 0 {WIDTH} {height}" aria-labelledby="one-step-title">',
        f'<title id="one-step-title">{html.escape(title)}</title>',
    ]
    for number, (name, colour) in enumerate(LEGEND):
        x = (0, 108, 180)[number]
        lines.append(f'<rect x="{x}" y="2" width="11" height="11" fill="var({colour})"/>')
        lines.append(text(x + 16, 12, name))
    lines.append('<rect x="300" y="6" width="11" height="3" fill="currentColor" opacity="0.4"/>')
    lines.append(text(316, 12, "own shard"))
    for now, tick in enumerate(ticks):
        if tick["what"] in PHASES:
            x = at(now, ticks)
            lines.append(
                f'<path d="M{x:.1f} 22V{below + CURVE}" stroke="currentColor" '
                'stroke-opacity="0.35" fill="none"/>'
            )
            lines.append(text(x + 5, 36, tick["what"]))
    lines += [*lanes(ticks, units), *curve(ticks, whole, below)]
    lines.append(text(0, height - 5, f"whole at once, at most: {in_words(most)}"))
    caption = (
        f"One step of a small model, recorded on one of {len(ways[WAY])} ranks. From left to "
        "right are moments in their order; their distance says nothing of time."
    )
    return "\n".join([*lines, "</svg>", f"<figcaption>{caption}</figcaption>", "</figure>\n"])


def generate(ways: Ways, output: Generated) -> None:
    """Add the picture.

    Args:
        ways: The recording; without one there is no picture.
        output: Where the files are collected.
    """
    if ways:
        output.add("steps/one_step.html", drawing(ways))
