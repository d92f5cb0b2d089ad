"""The sums of the memory page's calculator are what recorded runs stored and sent."""

from __future__ import annotations

import pytest

from tools.memory_model import Setup, cost
from tools.paths import ROOT
from tools.steps.figure import Ways, recorded

ELEMENT = 4


@pytest.fixture(scope="module")
def ways() -> Ways:
    return recorded(ROOT)


@pytest.mark.parametrize(
    ("way", "per_host"), [("FULL_SHARD", 4), ("SHARD_GRAD_OP", 4), ("HYBRID_SHARD", 2)]
)
def test_shards_full_parameters_and_messages_are_those_of_a_recorded_step(
    ways: Ways, way: str, per_host: int
):
    for rank in ways[way]:
        whole = {unit["name"]: unit["whole"] // ELEMENT for unit in rank["units"]}
        expected = cost(Setup(whole["root"], whole["first"], 3, 4, per_host, way))
        assert sum(unit["rest"] for unit in rank["units"]) == expected.shards
        events = [tick for tick in rank["ticks"] if "live" in tick and tick["what"] != "agree"]
        assert max(event["live"] for event in events) == expected.full
        sent = {"all-gather": 0, "reduce-scatter": 0, "all-reduce": 0}
        for event in events:
            if event["what"] in sent:
                sent[event["what"]] += event["sent"]
        assert sent["all-gather"] + sent["reduce-scatter"] == expected.shared
        assert sent["all-reduce"] == expected.copied


def test_an_optimizer_and_low_precision_change_only_their_own_part():
    plain = cost(Setup(0, 1000, 4, 4, 4, optimizer_states=0))
    adam = cost(Setup(0, 1000, 4, 4, 4, optimizer_states=2))
    low = cost(Setup(0, 1000, 4, 4, 4, optimizer_states=0, compute_bytes=2))
    assert (plain.at_rest, adam.at_rest) == (4000, 12000)
    assert (low.full, low.shards) == (plain.full // 2, plain.shards)
