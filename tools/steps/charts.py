"""Charts as inline SVG in the colours of the site, from the recorded steps and the memory model."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_ref.ledger import ring_all_reduce_bytes
from tools.memory_model import STRATEGIES, Setup, cost
from tools.prebuild.writer import Generated
from tools.steps.figure import TITLES, Ways

WIDTH, ROW = 420, 40  # narrow, with names above bars, so that a phone can show it
WORLDS = (1, 2, 4, 8, 16)
MODEL = {"root": 50_000_000, "layer": 200_000_000, "layers": 32}
"""The model that the calculator starts with."""


@dataclass(frozen=True)
class Bar:
    """One bar: its name, and the parts that lie end to end in it."""

    name: str
    parts: tuple[int, ...]


def in_words(number: int) -> str:
    """Return a number of bytes in a unit that suits it."""
    value, units = float(number), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def chart(key: str, title: str, bars: Sequence[Bar], legend: Sequence[str]) -> str:
    """Draw bars below each other, with the sum at the end of each.

    Args:
        key: Makes ids unique on a page.
        title: What it shows, for who cannot see it.
        bars: From top to bottom.
        legend: What the parts of a bar are.

    Returns:
        One block of HTML without blank lines.
    """
    most = max(sum(bar.parts) for bar in bars)
    scale = (WIDTH - 70) / most
    height = ROW * len(bars) + 28
    told = "; ".join(f"{bar.name}: {in_words(sum(bar.parts))}" for bar in bars)
    lines = [
        "<figure>",
        f'<svg role="img" viewBox="0 0 {WIDTH} {height}" aria-labelledby="{key}-title" '
        'style="width: 100%; max-width: 32rem">',
        f'<title id="{key}-title">{html.escape(title)}. {html.escape(told)}</title>',
    ]
    for number, name in enumerate(legend):
        x = number * (WIDTH // len(legend))
        lines.append(f'<rect x="{x}" y="4" width="11" height="11" fill="var(--rank-{number})"/>')
        lines.append(text(x + 16, 14, name))
    for row, bar in enumerate(bars):
        y, x = row * ROW + 26, 0.0
        lines.append(text(0, y + 11, bar.name))
        for number, part in enumerate(bar.parts):
            wide = part * scale
            lines.append(
                f'<rect x="{x:.1f}" y="{y + 16}" width="{wide:.1f}" height="14" '
                f'fill="var(--rank-{number})"/>'
            )
            x += wide
        lines.append(text(x + 6, y + 27, in_words(sum(bar.parts))))
    caption = f"<figcaption>{html.escape(title)}</figcaption>"
    return "\n".join([*lines, "</svg>", caption, "</figure>\n"])


def text(x: float, y: float, words: str) -> str:
    """Write words in the colour of the text around the figure."""
    return (
        f'<text x="{x:.1f}" y="{y}" font-size="12" fill="currentColor">{html.escape(words)}</text>'
    )


def memory_by_strategy() -> str:
    """Draw what rests and what is whole at the peak, under each strategy on two hosts."""
    bars = []
    for strategy in STRATEGIES:
        one = cost(Setup(**MODEL, world_size=16, ranks_per_host=8, strategy=strategy))
        bars.append(Bar(strategy, (one.at_rest + one.gradients, one.full)))
    title = "Bytes of one rank at the peak, on 16 ranks of two hosts, with AdamW"
    return chart("memory-strategy", title, bars, ("shards and optimizer", "full parameters"))


def memory_by_world() -> str:
    """Draw the same for full sharding on more and more ranks."""
    bars = []
    for world in WORLDS:
        one = cost(Setup(**MODEL, world_size=world, ranks_per_host=8))
        name = "1 rank" if world == 1 else f"{world} ranks"
        bars.append(Bar(name, (one.at_rest + one.gradients, one.full)))
    title = "Bytes of one rank at the peak under FULL_SHARD, with AdamW"
    return chart("memory-world", title, bars, ("shards and optimizer", "full parameters"))


def bytes_by_way(ways: Ways) -> str:
    """Draw what rank 0 sent in each recorded step."""
    operations = ("all-gather", "reduce-scatter", "all-reduce")
    bars = []
    for way, title in TITLES.items():
        ticks = ways[way][0]["ticks"]
        sums = [sum(t.get("sent", 0) for t in ticks if t["what"] == one) for one in operations]
        bars.append(Bar(title, tuple(sums)))
    return chart("bytes-way", "Bytes that rank 0 sent in the recorded steps", bars, operations)


def split_in_two(ways: Ways) -> str:
    """Draw an all-reduce beside the two collectives that do the same, from a recorded step."""
    ticks = ways["SHARD_GRAD_OP"][0]["ticks"]
    sent = {
        one: sum(t["sent"] for t in ticks if t["what"] == one)
        for one in ("reduce-scatter", "all-gather")
    }
    whole = sum(unit["whole"] for unit in ways["SHARD_GRAD_OP"][0]["units"])
    ranks = len(ways["SHARD_GRAD_OP"])
    bars = [
        Bar("recorded, SHARD_GRAD_OP", (sent["reduce-scatter"], sent["all-gather"])),
        Bar("ring all-reduce", (0, 0, ring_all_reduce_bytes(whole, ranks))),
    ]
    title = "An all-reduce is a reduce-scatter and an all-gather: bytes that a rank sends"
    return chart("split", title, bars, ("reduce-scatter", "all-gather", "all-reduce"))


def unit_sizes(ways: Ways) -> str:
    """Draw the units of the recorded model: what a rank keeps, and what it gathers."""
    bars = [
        Bar(unit["name"], (unit["rest"], unit["whole"] - unit["rest"]))
        for unit in ways["FULL_SHARD"][0]["units"]
    ]
    title = "The units of the recorded model on one of four ranks"
    return chart("units", title, bars, ("own shard", "gathered from others"))


def generate(ways: Ways, output: Generated) -> None:
    """Add the charts.

    Args:
        ways: The recording; without one there are no charts.
        output: Where the files are collected.
    """
    if ways:
        output.add("steps/memory_by_strategy.html", memory_by_strategy())
        output.add("steps/memory_by_world.html", memory_by_world())
        output.add("steps/split.html", split_in_two(ways))
        output.add("steps/unit_sizes.html", unit_sizes(ways))
        output.add("steps/bytes_by_way.html", bytes_by_way(ways))
