"""What must hold of every page: readable for all, fits a phone, small, and quiet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import latest
from tools.site_tree import pages

FIRST_LOAD = 400_000
FIRST_LOAD_OF_THE_PLAYER = 600_000
PLAYER = "guides/life-of-a-step/"


def addresses() -> list[str]:
    """Every page of the latest version, as the end of its address."""
    top = latest().resolve()
    found = [page.relative_to(top).as_posix() for page in pages(top)]
    return [path.removesuffix("index.html") for path in found]


def _name(path: str) -> str:
    return path.rstrip("/") or "home"


every_page = pytest.mark.parametrize("path", addresses(), ids=_name)


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe-core, as its package brings it."""
    import axe_playwright_python

    return (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text("utf-8")


def test_there_are_pages_to_look_at():
    assert len(addresses()) > 20


def serious(page: Any, axe: str) -> list[str]:
    """What axe finds on a page that keeps somebody from reading it."""
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{fault['id']}: {node['target'][0]}: {node['failureSummary']}"
        for fault in found["violations"]
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"][:3]
    ]


@every_page
def test_the_page_is_small_readable_for_all_and_fits_a_phone(open_page: Any, axe: str, path: str):
    # One load for all of it; without motion, so that axe meets no colour half-way to another.
    page = open_page(f"latest/{path}", color_scheme="light", reduced_motion="reduce")
    loaded = page.evaluate(
        """['navigation', 'resource'].flatMap(kind => performance.getEntriesByType(kind))
           .map(entry => [entry.name, entry.decodedBodySize])"""
    )
    limit = FIRST_LOAD_OF_THE_PLAYER if path == PLAYER else FIRST_LOAD
    total = sum(size for _, size in loaded)
    largest = sorted(loaded, key=lambda entry: -entry[1])[:6]
    assert total <= limit, f"{total} bytes, of which {largest}"

    assert serious(page, axe) == []
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("document.body.getAttribute('data-md-color-scheme') === 'slate'")
    assert serious(page, axe) == []

    page.set_viewport_size({"width": 360, "height": 780})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    # Whatever sticks out is cut off or scrolls in a box of its own.
    page.evaluate("scrollTo(1000, 0)")
    assert page.evaluate("scrollX") == 0
