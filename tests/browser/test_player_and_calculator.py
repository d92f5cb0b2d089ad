"""The step player and the calculator, by mouse and by keyboard."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from tools.memory_model import STRATEGIES, Setup, cost

STEP = "latest/guides/life-of-a-step/"
MEMORY = "latest/guides/memory/"


def moment(page: Any) -> int:
    return int(page.locator(".step-player input[type=range]").input_value())


def test_the_player_steps_scrubs_plays_and_pauses(open_page: Any):
    page = open_page(STEP)
    page.get_by_role("button", name="One moment on").click()
    assert moment(page) == 1
    assert "all-gather issued" in page.locator(".step-player__now").inner_text()
    page.get_by_role("button", name="One moment back").click()
    assert moment(page) == 0
    page.locator(".step-player input[type=range]").fill("3")
    # The root is whole on every rank: each lane shows four filled pieces of it.
    lanes = page.locator(".step-player__rank")
    filled = lanes.locator(".step-player__unit:nth-of-type(1) .weights i.here")
    assert (lanes.count(), filled.count()) == (4, 16)
    page.get_by_role("button", name="Play").click()
    page.wait_for_function("document.querySelector('.step-player input').value > 4")
    page.get_by_role("button", name="Pause").click()
    stopped = moment(page)
    page.wait_for_timeout(1000)
    assert moment(page) == stopped


def test_the_player_works_by_keyboard(open_page: Any):
    page = open_page(STEP, reduced_motion="reduce")
    page.locator(".step-player input[type=range]").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert moment(page) == 2
    page.get_by_role("button", name="Play").focus()
    page.keyboard.press("ArrowLeft")
    assert moment(page) == 1
    page.keyboard.press("Enter")
    assert page.get_by_role("button", name="Pause").count() == 1
    page.keyboard.press("Enter")
    assert page.get_by_role("button", name="Play").count() == 1


@pytest.mark.parametrize("number", range(6))
def test_every_strategy_can_be_walked_to_its_end_and_has_its_table(open_page: Any, number: int):
    page = open_page(STEP, width=360)
    page.locator(".step-player select").select_option(index=number)
    page.locator(".step-player input[type=range]").focus()
    page.keyboard.press("End")
    assert "The step is over" in page.locator(".step-player__now").inner_text()
    table = page.locator(".step-player details").nth(number)
    table.locator("summary").click()
    rows = table.locator("tbody tr")
    assert rows.count() == moment(page) + 1
    assert rows.last.get_attribute("aria-current") == "step"


def test_the_calculator_gives_what_the_module_gives(open_page: Any):
    page = open_page(MEMORY)
    grid = [
        Setup(root, layer, layers, world, host, strategy, width, states)
        for root, layer, layers, (world, host), strategy, width, states in itertools.product(
            (0, 1001), (7, 20_000_003), (1, 32), ((1, 1), (4, 2), (16, 8)), STRATEGIES,
            (2, 4), (0, 2),
        )
    ]  # fmt: skip
    given = [dataclasses.asdict(setup) for setup in grid]
    found = page.evaluate(
        "grid => grid.map(one => document.querySelector('form.calculator').cost(one))", given
    )
    assert found == [dataclasses.asdict(cost(setup)) for setup in grid]


def test_the_calculator_follows_its_inputs(open_page: Any):
    page = open_page(MEMORY)
    rows = page.locator(".calculator tbody tr")

    def sums() -> list[int]:
        return [int(row.get_attribute("data-bytes")) for row in rows.all()]

    def expected(**changes: Any) -> list[int]:
        setup = Setup(50_000_000, 200_000_000, 32, 16, 8)
        one = cost(dataclasses.replace(setup, **changes))
        parts = [one.shards, one.optimizer, one.gradients, one.full]
        return [*parts, one.at_rest, one.at_peak, one.shared, one.copied]

    assert sums() == expected()
    page.locator("[name=strategy]").select_option("HYBRID_SHARD")
    assert sums() == expected(strategy="HYBRID_SHARD")
    page.locator("[name=world_size]").fill("12")
    assert "whole numbers" in page.locator(".calculator [role=alert]").inner_text()
    page.locator("[name=world_size]").fill("16")
    page.get_by_role("checkbox", name="CPU offload").press("Space")
    assert sums()[4] == 0
