"""What a reader does on any page: search, switch versions, tabs and colours, copy, download."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import TREE, latest
from tools import snippets
from tools.paths import ROOT
from tools.snippet_files import Snippet, read_all

SNIPPET = "wrapping/shard_a_model"
SHOWN_ON = "latest/guides/wrapping/"


def search(page: Any, words: str) -> list[str]:
    """Type words into the search and return the addresses of what is found."""
    told = "document.querySelector('.md-search-result__meta').innerText"
    box = page.locator(".md-search__input")
    if box.input_value():  # a search before this one: empty the box, until its results are gone
        box.fill("")
        page.keyboard.press("End")  # the theme looks at the words when a key goes up
        page.wait_for_function(f"!/matching/.test({told})")
    else:
        page.keyboard.press("/")
    box.fill(words)
    page.keyboard.press("End")
    page.wait_for_function(f"/matching/.test({told})")
    items = ".md-search-result__item"
    return page.evaluate(
        f"[...document.querySelectorAll('{items}')].map(item => "
        "item.querySelector('.md-search-result__link').getAttribute('href'))"
    )


# --- Search ---------------------------------------------------------------------------------------


SEARCHES = tomllib.loads((Path(__file__).parent / "thirty_searches.toml").read_text())["search"]


def test_every_symptom_is_found_among_the_first_three(open_page: Any):
    assert len(SEARCHES) == 30
    page = open_page("latest/")
    missed = []
    for wanted in SEARCHES:
        found = search(page, wanted["words"])
        pages = [address.partition("?")[0].partition("latest/")[2] for address in found]
        if wanted["page"] not in pages[:3]:
            missed.append(f"{wanted['words']}: not {wanted['page']} but {pages[:5]}")
    assert missed == []


def test_the_search_is_loaded_only_when_a_reader_turns_to_it(open_page: Any):
    page = open_page("latest/")
    loaded = "performance.getEntriesByType('resource').map(entry => entry.name)"
    assert not [name for name in page.evaluate(loaded) if "/search" in name and "later" not in name]
    search(page, "wrap")
    assert any(name.endswith("search_index.json") for name in page.evaluate(loaded))


def test_a_result_leads_to_its_page_and_marks_the_words(open_page: Any):
    page = open_page("latest/")
    search(page, "optimizer")
    page.locator(".md-search-result__link[href*='h=opt']").first.click()
    page.locator("article mark").first.wait_for()


# --- Versions -------------------------------------------------------------------------------------


def test_the_top_of_the_site_leads_to_the_latest_version(open_page: Any, site: str):
    page = open_page("")
    page.wait_for_url(f"{site}latest/")


def test_the_selector_lists_the_versions_and_switching_keeps_the_page(open_page: Any, site: str):
    page = open_page(SHOWN_ON)
    page.locator(".md-version__current").hover(force=True)
    names = page.locator(".md-version__link").all_inner_texts()
    wanted = [entry["title"] for entry in json.loads((Path(TREE) / "versions.json").read_text())]
    assert [name.split("\n")[0].strip() for name in names] == wanted
    page.locator(".md-version__link", has_text="dev").click()
    page.wait_for_url(f"{site}dev/guides/wrapping/")


def test_other_versions_say_that_they_are_not_the_latest_and_lead_to_the_same_page(
    open_page: Any, site: str
):
    page = open_page("dev/guides/wrapping/")
    bar = page.get_by_role("complementary", name="Version")
    bar.wait_for()
    assert "development version" in bar.inner_text()
    bar.get_by_role("link").click()
    page.wait_for_url(f"{site}latest/guides/wrapping/")
    page.wait_for_load_state("networkidle")
    assert page.get_by_role("complementary", name="Version").count() == 0


def test_the_numbered_address_of_the_latest_version_has_no_bar(open_page: Any):
    page = open_page(f"{latest().resolve().name}/")
    page.wait_for_load_state("networkidle")
    assert page.locator(".not-latest").count() == 0


# --- Tabs, copy, download -------------------------------------------------------------------------


def shown_file(api: str) -> Snippet:
    """The snippet file as `docs-test` runs it."""
    return next(s for s in read_all(ROOT) if s.key == SNIPPET and s.api == api)


def body(snippet: Snippet) -> str:
    """The file from its first import on, without the marks around it."""
    text = snippet.path.read_text("utf-8")
    return text.split("# --8<-- [start:body]\n")[1].split("# --8<-- [end:body]")[0]


def test_a_tab_chosen_on_one_page_is_chosen_on_the_next(open_page: Any, site: str):
    page = open_page(SHOWN_ON)
    page.locator(".tabbed-labels label", has_text="torch FSDP2").first.click()
    chosen = page.locator(".tabbed-set > input:checked + input, .tabbed-set > input:checked")
    assert chosen.count() >= 2
    everywhere = """() => [...document.querySelectorAll('.tabbed-set')].map(set =>
        set.querySelectorAll('.tabbed-labels label')[
            [...set.querySelectorAll(':scope > input')].findIndex(input => input.checked)
        ].innerText.trim())"""
    assert set(page.evaluate(everywhere)) == {"torch FSDP2"}
    page.goto(f"{site}latest/tutorial/")
    page.wait_for_load_state("networkidle")
    assert set(page.evaluate(everywhere)) == {"torch FSDP2"}


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("api", ["fsdp_ref", "torch FSDP1", "torch FSDP2"])
def test_what_is_copied_is_what_ran_and_the_download_equals_it(
    open_page: Any, api: str, width: int
):
    page = open_page(SHOWN_ON, width=width)
    snippet = shown_file(api)
    assert snippets.select([str(snippet.path.relative_to(ROOT))])[0].path == snippet.path
    page.locator(".tabbed-labels label", has_text=api).first.click()
    block = page.locator(".highlight", has_text=snippet.path.name).first
    block.locator("button.md-code__button[title]").first.click()
    page.wait_for_function("document.querySelector('.md-dialog--active')")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.rstrip("\n") == body(snippet).rstrip("\n")

    with page.expect_download() as started:
        page.locator(f"a[download='{snippet.path.name}']").first.click()
    assert Path(started.value.path()).read_bytes() == snippet.path.read_bytes()


def test_no_copy_button_covers_text_on_a_phone(open_page: Any):
    page = open_page(SHOWN_ON, width=360)
    covered = page.evaluate(
        """() => [...document.querySelectorAll('.highlight')].filter(block => {
            const button = block.querySelector('.md-code__button');
            const code = block.querySelector('code');
            if (!button || !code || !button.offsetParent) return false;
            code.scrollLeft = code.scrollWidth;
            const line = document.createRange();
            const text = document.createTreeWalker(code, NodeFilter.SHOW_TEXT).nextNode();
            line.setStart(text, 0);
            const end = code.textContent.indexOf('\\n');
            let walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT), node, seen = 0;
            while ((node = walker.nextNode()) && seen + node.length < end) seen += node.length;
            line.setEnd(node, end - seen);
            const one = button.getBoundingClientRect();
            return [...line.getClientRects()].some(two => two.right > one.left + 1
                && two.left < one.right && two.bottom > one.top + 1 && two.top < one.bottom - 1);
        }).map(block => block.innerText.slice(0, 60))"""
    )
    assert covered == []


# --- Colours --------------------------------------------------------------------------------------

SCHEME = "document.body.getAttribute('data-md-color-scheme')"


@pytest.mark.parametrize(("system", "scheme"), [("light", "default"), ("dark", "slate")])
def test_colours_follow_the_system_until_a_reader_chooses(
    open_page: Any, site: str, system: str, scheme: str
):
    page = open_page("latest/", color_scheme=system)
    assert page.evaluate(SCHEME) == scheme
    for chosen in ("default", "slate"):  # the toggle goes: system, light, dark, system
        page.locator("label.md-header__button[for^=__palette]:visible").click()
        page.wait_for_function(f"{SCHEME} === '{chosen}'")
        page.goto(f"{site}{SHOWN_ON}")
        page.wait_for_load_state("networkidle")
        assert page.evaluate(SCHEME) == chosen
    page.locator("label.md-header__button[for^=__palette]:visible").click()
    page.wait_for_function(f"{SCHEME} === '{scheme}'")
