"""The step player's data: one order on all ranks, and the same facts in its tables."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest

from tools.paths import ROOT
from tools.prebuild.fragments import PrebuildError
from tools.steps import charts, figure


@pytest.fixture(scope="module")
def ways() -> figure.Ways:
    return figure.recorded(ROOT)


def test_every_strategy_has_a_table_with_a_row_for_each_moment(ways: figure.Ways):
    page = figure.player(ways)
    found = re.search(r'<script type="application/json">(.*?)</script>', page)
    assert found
    data = json.loads(found[1])
    tables = re.findall(r"<details.*?</details>", page, re.DOTALL)
    assert list(data) == list(figure.TITLES) == list(figure.NOTES)
    rows = [table.count("<tr><td>") for table in tables]
    assert rows == [len(way["ticks"]) for way in data.values()]
    assert "\n\n" not in page.strip()  # a blank line would end the block of HTML


def test_memory_returns_to_nothing_whole_and_experts_of_their_own_send_nothing(ways: figure.Ways):
    for ranks in ways.values():
        assert len(ranks) == figure.RANKS
        last = [tick for tick in ranks[0]["ticks"] if "live" in tick][-1]
        assert last["live"] == 0
    own = [t for t in ways["experts 'self'"][0]["ticks"] if t["unit"] == "experts"]
    assert own
    assert sum(tick.get("sent", 0) for tick in own) == 0


def test_ranks_with_different_orders_are_refused(
    ways: figure.Ways, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    crossed = copy.deepcopy(ways)
    ticks = crossed["FULL_SHARD"][1]["ticks"]
    ticks[1], ticks[2] = ticks[2], ticks[1]
    program = tmp_path / figure.PROGRAM
    program.parent.mkdir(parents=True)
    program.write_text("")
    monkeypatch.setattr(figure, "run", lambda root: json.dumps(crossed))
    with pytest.raises(PrebuildError, match="FULL_SHARD the ranks have different orders"):
        figure.recorded(tmp_path)


def test_a_chart_says_its_numbers_to_who_cannot_see_it(ways: figure.Ways):
    drawn = charts.split_in_two(ways)
    (title,) = re.findall(r"<title[^>]*>(.*?)</title>", drawn)
    one, two = re.findall(r": ([\d.]+ kB)", title)
    assert one == two  # the two halves send what the all-reduce sends
