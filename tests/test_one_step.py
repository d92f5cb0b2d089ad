"""The picture on the home page says what was recorded."""

from __future__ import annotations

import re
from typing import Any

from tools.steps.one_step import drawing, moments


def tick(what: str, unit: str = "", **more: Any) -> dict[str, Any]:
    return {"what": what, "unit": unit, **more}


STEP = [
    tick("forward"),
    tick("all-gather", "root", live=400),
    tick("all-gather done", "root"),
    tick("unshard", "root", live=400),
    tick("backward"),
    tick("reshard", "root", live=0),
    tick("reduce-scatter", "root", live=0),
    tick("reduce-scatter done", "root"),
    tick("end"),
]


def test_a_unit_is_gathered_then_whole_then_its_gradient_leaves():
    assert list(moments(STEP, "root")) == [
        ("--rank-1", 1, 2),
        ("--rank-0", 2, 5),
        ("--rank-2", 6, 7),
    ]
    assert list(moments(STEP, "layer")) == []


def test_the_picture_tells_its_numbers_in_words_and_in_lengths():
    unit = {"name": "root", "whole": 400, "rest": 100}
    other = {"name": "layer", "whole": 1600, "rest": 400}
    shown = drawing({"FULL_SHARD": [{"units": [unit, other], "ticks": STEP}] * 4})
    assert "Of 2 kB of weights, at most 400 bytes are whole at once." in shown
    assert "one of 4 ranks" in shown
    assert "all units whole, as in data parallelism: 2 kB" in shown
    # The curve: nothing, then a fifth of the dashed line's height, then nothing again.
    bottom = float(re.search(r'd="M0 ([\d.]+)H', shown)[1])
    heights = [bottom - float(y) for y in re.findall(r"V([\d.]+)(?=H)", shown)]
    line = bottom - float(re.search(r'd="M0 ([\d.]+)H420"', shown)[1])
    assert round(max(heights), 3) == round(line / 5, 3) > 0
    assert heights[0] == heights[-1] == 0
    assert "\n\n" not in shown.strip()
