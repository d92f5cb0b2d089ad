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


@every_page
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(open_page: Any, axe: str, path: str, scheme: str):
    page = open_page(f"latest/{path}", color_scheme=scheme)
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    serious = [
        f"{fault['id']}: {node['target'][0]}: {node['failureSummary']}"
        for fault in found["violations"]
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"][:3]
    ]
    assert serious == []


@every_page
def test_the_page_fits_a_narrow_phone(open_page: Any, path: str):
    page = open_page(f"latest/{path}", width=360, height=780)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    # Whatever sticks out is cut off or scrolls in a box of its own.
    page.evaluate("scrollTo(1000, 0)")
    assert page.evaluate("scrollX") == 0


@every_page
def test_the_first_load_is_small(open_page: Any, path: str):
    page = open_page(f"latest/{path}")
    loaded = page.evaluate(
        """['navigation', 'resource'].flatMap(kind => performance.getEntriesByType(kind))
           .map(entry => [entry.name, entry.decodedBodySize])"""
    )
    limit = FIRST_LOAD_OF_THE_PLAYER if path == PLAYER else FIRST_LOAD
    total = sum(size for _, size in loaded)
    largest = sorted(loaded, key=lambda entry: -entry[1])[:6]
    assert total <= limit, f"{total} bytes, of which {largest}"
