"""Do readers' questions have an answer where they say, and do pages name tests that exist?"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tools.checks.built import Page
from tools.checks.pages import page_texts
from tools.checks.result import Result

QUESTIONS = Path("tests") / "questions.toml"
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
BROKEN_TEST = re.compile(r"`tests/[\w/]+\.py(?!::\w+`|`)")


def check_anchors(root: Path) -> Result:
    """Check that the built site has the place at which each question says it is answered."""
    lines = (root / QUESTIONS).read_text(encoding="utf-8").splitlines()
    asked = tomllib.loads("\n".join(lines))["question"]
    answered = [question for question in asked if "anchor" in question]
    ids = ids_by_page(root)
    problems = []
    for question in answered:
        anchor = question["anchor"]
        if fault := anchor_fault(anchor, ids):
            where = lines.index(f'id = "{question["id"]}"') + 1
            problems.append(f"{QUESTIONS}:{where}: {anchor}: {fault}")
    if not ids:
        problems = ["build/site:1: there is no built site; run the build first"]
    return Result(f"{len(answered)} of {len(asked)} questions", problems)


def ids_by_page(root: Path) -> dict[str, set[str]]:
    """Return the anchors of each built page, under the name of its source."""
    site = root / "build" / "site"
    found = {}
    for path in sorted(site.rglob("index.html")):
        folder = path.parent.relative_to(site).as_posix()
        ids = set(Page(path).ids)
        found["index.md" if folder == "." else f"{folder}.md"] = ids
        found["index.md" if folder == "." else f"{folder}/index.md"] = ids
    return found


def anchor_fault(anchor: str, ids: dict[str, set[str]]) -> str:
    """Say what is wrong with `page.md#anchor`, or nothing."""
    page, _, name = anchor.partition("#")
    if page not in ids:
        return "the site has no such page"
    return "" if name in ids[page] else f"the page has no anchor '{name}'; was a heading renamed?"


def check_named_tests(root: Path) -> Result:
    """Check that every test that a page names exists."""
    problems: list[str] = []
    count = 0
    for text in page_texts(root):
        for index, line in enumerate(text.lines):
            count += len(NAMED_TEST.findall(line))
            problems += [f"{text.at(index, root)}: {fault}" for fault in test_faults(line, root)]
    return Result(f"{count} tests", problems)


def test_faults(line: str, root: Path) -> Iterator[str]:
    """Yield what is wrong with the tests that a line names."""
    for file, name in NAMED_TEST.findall(line):
        if name not in functions(root / file):
            yield f"there is no test {file}::{name}; name the one that shows it now"
    if BROKEN_TEST.search(line):
        yield "the name of a test is `file::function`, in one line"


@cache
def functions(path: Path) -> frozenset[str]:
    """Return the names of a file's functions; none if there is no such file."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return frozenset(re.findall(r"^def (\w+)\(", text, re.MULTILINE))
