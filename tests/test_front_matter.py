"""What stands above a page can be read: a fault there is shown to readers as text, and not told."""

from __future__ import annotations

import pytest
import yaml

from tools.paths import ROOT, pages

PAGES = pages(ROOT)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_page_says_its_title_and_what_it_is_about(page):
    opening, front, _ = page.read_text("utf-8").split("---\n", 2)
    said = yaml.safe_load(front)
    assert opening == ""
    assert set(said) >= {"title", "description"}
    assert all(isinstance(said[key], str) and said[key] for key in ("title", "description"))
