"""The table of readers' questions and the tests that answer them stay in step."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tools.checks import answers

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "questions"
HOW_MANY = 139  # reports are added, never dropped
ANSWERED = 139  # of them on a page; more are welcome
FIELDS = {"id", "symptom", "right", "processes", "tests", "page"}
# Why a report has no test, or not one of all that it asks.
REASONS = {"needs a GPU"}
PAGES = {
    *("guides/wrapping.md", "guides/tied-weights.md", "guides/frozen-parameters.md"),
    *("guides/precision.md", "guides/clipping.md", "guides/accumulation.md"),
    *("guides/unequal-batches.md", "guides/memory.md", "guides/out-of-memory.md"),
    *("guides/checkpointing.md", "guides/offload.md", "guides/ranks-that-differ.md"),
    *("guides/inference.md", "guides/initialisation.md", "guides/process-groups.md"),
    *("guides/optimizers.md", "guides/weights-in-and-out.md", "guides/communication.md"),
    *("guides/coming-from-torch.md", "guides/symptoms.md", "reference/errors.md"),
}
ID = re.compile(r"(?:[\w.-]+/)+[\w.-]+#\d+|lab:[\w-]+|discuss\.pytorch\.org/t/\d+")
TEST = re.compile(r"((?:^#.*\n)*)(?:^@.*\n)*^def (test_\w+)\(", re.MULTILINE)


@cache
def questions() -> list[dict[str, Any]]:
    return tomllib.loads((ROOT / "tests" / "questions.toml").read_text())["question"]


@cache
def collected() -> set[str]:
    """Ask pytest itself which tests the folder has."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, str(FOLDER)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}


def answered_by_comments() -> dict[str, list[str]]:
    """Return the reports that the comment above each test names."""
    found = {}
    for path in sorted(FOLDER.glob("test_*.py")):
        for comment, name in TEST.findall(path.read_text()):
            found[f"tests/questions/{path.name}::{name}"] = sorted(ID.findall(comment))
    return found


def test_every_report_is_there_once():
    counts = Counter(question["id"] for question in questions())
    assert [name for name, count in counts.items() if count > 1] == []
    assert len(counts) >= HOW_MANY


def is_on_a_page(anchor: str) -> bool:
    """Tell whether an anchor has a page's source; docs-test looks for it in the built page."""
    page, _, name = anchor.partition("#")
    return (ROOT / "site" / page).is_file() and re.fullmatch(r"[\w.-]+", name) is not None


def faults(question: dict[str, Any]) -> list[str]:
    """Say what is wrong with a row."""
    if set(question) - {"why", "anchor"} != FIELDS:
        return [f"its fields are {sorted(question)}"]
    page, why, anchor = question["page"], question.get("why"), question.get("anchor")
    rules = {
        "the id is not a report's": ID.fullmatch(question["id"]),
        "symptom and right are sentences": all(
            question[f][-1:] in ".?" for f in ("symptom", "right")
        ),
        "processes are 0 to 4": question["processes"] in range(5),
        f"no page {page} is planned": page in PAGES,
        f"{why!r} is not among the reasons": why is None or why in REASONS,
        f"{anchor} is no place on a page": anchor is None or is_on_a_page(anchor),
        "it has neither a test nor a reason": question["tests"] or why,
        "a few ranks on a CPU need no GPU": why != "needs a GPU" or question["processes"] == 0,
    }
    return [fault for fault, holds in rules.items() if not holds]


def test_every_row_is_complete():
    assert {question["id"]: found for question in questions() if (found := faults(question))} == {}


def test_table_and_folder_name_the_same_tests():
    named = {test for question in questions() for test in question["tests"]}
    assert named - collected() == set(), "named in the table, not collected"
    assert collected() - named == set(), "collected, not named in the table"


def test_the_comment_above_a_test_names_the_reports_that_it_answers():
    rows: dict[str, list[str]] = {}
    for question in questions():
        for test in question["tests"]:
            rows.setdefault(test, []).append(question["id"])
    assert answered_by_comments() == {test: sorted(ids) for test, ids in rows.items()}


def test_answers_are_not_taken_back():
    answered = [question["id"] for question in questions() if "anchor" in question]
    assert len(answered) >= ANSWERED


QUESTION = """[[question]]
id = "lab:one"
anchor = "guides/memory.md#calculate-it"

[[question]]
id = "lab:two"
"""


@pytest.fixture
def site(tmp_path):
    """Return a repository with two questions, and a built page that answers one."""
    page = tmp_path / "build" / "site" / "guides" / "memory" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text('<h1 id="memory">Memory</h1><h2 id="calculate-it">Calculate it</h2>')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "questions.toml").write_text(QUESTION)
    return tmp_path


def test_an_answer_that_is_there_is_counted(site):
    result = answers.check_anchors(site)
    assert (result.counted, result.problems) == ("1 of 2 questions", [])


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("#calculate-it", "#calculator", "has no anchor 'calculator'"),
        ("#calculate-it", "", "has no anchor ''"),
        ("memory.md", "memories.md", "no such page"),
    ],
)
def test_an_answer_that_is_not_there_is_a_fault(site, old, new, told):
    (site / "tests" / "questions.toml").write_text(QUESTION.replace(old, new))
    (problem,) = answers.check_anchors(site).problems
    assert problem.startswith("tests/questions.toml:2: ")
    assert told in problem


def test_without_a_built_site_no_answer_is_found(site):
    shutil.rmtree(site / "build")
    assert "run the build first" in answers.check_anchors(site).problems[0]
