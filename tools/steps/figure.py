"""The step player's data and its tables, from one recorded run on four ranks.

A reader without the script, or who cannot see the drawing, has the tables. The script reads what
happens at each moment from them, so both say the same.
"""

from __future__ import annotations

import hashlib
import html
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.paths import ROOT, shown, sources
from tools.prebuild.fragments import PrebuildError
from tools.prebuild.recorded import kept
from tools.prebuild.writer import Generated
from tools.running import base_environment

PROGRAM = Path("tools/steps/program.py")
RANKS = 4
LIMIT_SECONDS = 240

TITLES = {
    "FULL_SHARD": "Full shard",
    "SHARD_GRAD_OP": "Shard gradients and optimizer",
    "HYBRID_SHARD": "Hybrid: two pairs of ranks",
    "no_sync": "Full shard, one no_sync before",
    "cpu_offload": "Full shard, CPU offload",
    "experts 'self'": "Experts in their own group",
}
"""The ways in the order in which they are offered, by their names in the recording."""

NOTES = {
    "FULL_SHARD": "Every unit is whole only while it computes. Its backward gathers it again.",
    "SHARD_GRAD_OP": "Units stay whole from their forward to their backward: fewer messages, "
    "more memory.",
    "HYBRID_SHARD": "Ranks 0 and 1 share one copy of the model, ranks 2 and 3 another. An "
    "all-reduce between the copies follows each reduce-scatter.",
    "no_sync": "The first backward reduces nothing: each rank keeps the whole gradient of its own "
    "batch. The second reduces the sum.",
    "cpu_offload": "The same messages as full shard: what differs is that the shards lie in the "
    "host's memory.",
    "experts 'self'": "The unit called experts belongs to each rank alone. It is never gathered "
    "from others and its gradients are not averaged.",
}

WORDS = {
    "forward": "The forward begins",
    "backward": "The backward begins",
    "forward inside no_sync": "The forward of a batch inside no_sync begins",
    "backward inside no_sync": "Its backward begins",
    "optimizer step": "The optimizer changes the shards",
    "end": "The step is over",
    "agree": "Ranks agree on which parameters were used",
    "all-gather": "{unit}: all-gather issued",
    "all-gather done": "{unit}: all-gather has arrived",
    "unshard": "{unit}: whole, its module runs",
    "reshard": "{unit}: dropped to its shards",
    "reduce-scatter": "{unit}: reduce-scatter of its gradient issued",
    "reduce-scatter done": "{unit}: its gradient shard is ready",
    "all-reduce": "{unit}: all-reduce of gradient shards between copies issued",
    "all-reduce done": "{unit}: copies agree on the gradient",
}

Ways = dict[str, list[dict[str, Any]]]


def recorded(root: Path, *, fresh: bool = False) -> Ways:
    """Return the recording, from `build/cache` while nothing that it depends on has changed.

    Args:
        root: The repository.
        fresh: Record again.

    Raises:
        PrebuildError: If the run fails, or if its ranks did not do the same things in one order.
    """
    digest = hashlib.sha256(importlib.metadata.version("torch").encode())
    for path in [root / PROGRAM, *sources(root)]:
        digest.update(path.read_bytes())
    cache = root / "build" / "cache" / f"steps-{digest.hexdigest()[:16]}.json"
    found = kept(cache, "steps-*.json", fresh=fresh)
    if found is None:
        text = run(root)
        cache.parent.mkdir(parents=True, exist_ok=True)
        for old in cache.parent.glob("steps-*.json"):
            old.unlink()
        cache.write_text(text, "utf-8")
    ways: Ways = json.loads((found or cache).read_text("utf-8"))
    for way, ranks in ways.items():
        orders = {tuple((t["what"], t["unit"]) for t in rank["ticks"]) for rank in ranks}
        if len(orders) != 1:
            raise PrebuildError(f"{PROGRAM}:1: under {way} the ranks have different orders")
    return ways


def run(root: Path) -> str:
    """Run the program on four ranks and return what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "steps.json"
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        done = subprocess.run(
            [sys.executable, *torchrun, str(root / PROGRAM), str(output)],
            env=os.environ | base_environment("gloo", {}) | {"PYTHONPATH": str(root)},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        if not output.exists():
            where = shown(root / PROGRAM, root)
            raise PrebuildError(f"{where}:1: the recorded run failed:\n{done.stderr[-4000:]}")
        return output.read_text("utf-8")


def shortest(values: Sequence[Any]) -> Any:
    """Return one value where all ranks have the same, else one for each."""
    return values[0] if all(value == values[0] for value in values) else list(values)


def compact(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one way as the script wants it: what is the same on all ranks stands once."""
    units = [
        {
            "name": same[0]["name"],
            "whole": same[0]["whole"],
            "rest": shortest([unit["rest"] for unit in same]),
            "ranks": [unit["ranks"] for unit in same],
        }
        for same in zip(*(rank["units"] for rank in ranks), strict=True)
    ]
    names = [unit["name"] for unit in units]
    ticks = []
    for same in zip(*(rank["ticks"] for rank in ranks), strict=True):
        tick = {"what": same[0]["what"]}
        if same[0]["unit"]:
            tick["unit"] = names.index(same[0]["unit"])
        if "live" in same[0]:
            tick["live"] = shortest([one["live"] for one in same])
        ticks.append(tick)
    return {"units": units, "ticks": ticks}


def cell(values: Sequence[int]) -> str:
    """Say a number of bytes that each rank has its own of."""
    one = shortest(values)
    if isinstance(one, list):
        return ", ".join(f"{value:,}" for value in one)
    return f"{one:,}" if one else ""


def groups(lists: Sequence[list[int]]) -> str:
    """Name the groups of ranks that take part."""
    distinct = sorted({tuple(ranks) for ranks in lists if ranks})
    return " and ".join("".join(map(str, ranks)) for ranks in distinct)


def table(way: str, ranks: list[dict[str, Any]]) -> str:
    """Write everything that happens under one way as a table of HTML."""
    live = [0] * len(ranks)
    rows = []
    for number, same in enumerate(zip(*(rank["ticks"] for rank in ranks), strict=True)):
        first = same[0]
        text = WORDS[first["what"]].format(unit=first["unit"])
        if "live" in first:
            live = [one["live"] for one in same]
        cells = [
            str(number),
            html.escape(text),
            groups([one.get("group", []) for one in same]),
            cell([one.get("sent", 0) for one in same]),
            cell(live) or "0",
        ]
        rows.append("<tr>" + "".join(f"<td>{text}</td>" for text in cells) + "</tr>")
    head = ("Moment", "What happens", "Groups", "Bytes that a rank sends", "Full parameters")
    return "\n".join(
        [
            f'<details data-way="{html.escape(way)}">',
            f"<summary>{TITLES[way]}: the same as a table</summary>",
            f"<p>{NOTES[way]}</p>",
            '<table class="step-table">',
            "<thead><tr>" + "".join(f"<th>{title}</th>" for title in head) + "</tr></thead>",
            "<tbody>",
            *rows,
            "</tbody>",
            "</table>",
            "</details>",
        ]
    )


def player(ways: Ways) -> str:
    """Write the player for a page two folders below the top: its data, and its tables."""
    data = {way: compact(ways[way]) for way in TITLES}
    packed = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return "\n".join(
        [
            '<div class="step-player" data-ranks="4">',
            '<link rel="stylesheet" href="../../assets/player.css">',
            '<div class="step-player__stage"></div>',
            '<div class="step-player__tables">',
            *(table(way, ways[way]) for way in TITLES),
            "</div>",
            f'<script type="application/json">{packed}</script>',
            '<script src="../../assets/player.js" defer></script>',
            "</div>",
            "",
        ]
    )


def generate(root: Path, output: Generated, *, fresh: bool) -> Ways:
    """Add the player, where a page includes it.

    Args:
        root: The repository.
        output: Where the files are collected.
        fresh: Record again, whatever the cache holds.

    Returns:
        The recording, for other figures.
    """
    if not (root / PROGRAM).exists():  # a small repository made by a test
        return {}
    ways = recorded(root, fresh=fresh)
    output.add("steps/player.html", player(ways))
    return ways


if __name__ == "__main__":
    sys.stdout.write(player(recorded(ROOT)))
