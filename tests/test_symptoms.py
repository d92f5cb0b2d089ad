"""The page that leads from what a reader sees to its cause."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from fsdp_ref import errors
from tests.ranks import run_ranks
from tests.toy import mean_square, my_part, nested, seeded, whole_batch
from tools.checks import answers

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "site" / "guides" / "symptoms.md"
AT_LEAST = 76  # symptoms are added; one that can no longer happen takes its number along


def symptoms() -> dict[str, str]:
    """Return the text under each heading of a symptom."""
    parts = re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    found = {}
    for part in parts:
        title, _, body = part.partition("\n")
        found[title] = re.split(r"^## ", body, flags=re.MULTILINE)[0]
    return found


def test_every_symptom_has_a_name_of_its_own_to_link_to():
    names = [re.search(r" \{ #([a-z0-9-]+) \}$", title) for title in symptoms()]
    assert all(names)
    assert len({match[1] for match in names if match}) == len(names) >= AT_LEAST


def without_proof(text: str) -> bool:
    """Tell whether a symptom names neither a snippet nor a test, nor says that there is none."""
    shown = text.partition("Shown")[2]
    named = answers.NAMED_TEST.search(shown) or re.search(r"\[\w+/\w+\][\[(]", shown)
    return named is None and "No test here shows it" not in text


def test_every_symptom_says_what_to_do_where_to_read_on_and_what_shows_it():
    wanted = {
        "what to do": lambda text: "**Do:** " in text,
        "where to read on": lambda text: re.search(r"^See \[", text, re.MULTILINE),
        "what shows it": lambda text: not without_proof(text),
    }
    lacks = {
        title: [name for name, has in wanted.items() if not has(text)]
        for title, text in symptoms().items()
    }
    assert {title: names for title, names in lacks.items() if names} == {}


def test_tests_that_pages_name_exist():
    result = answers.check_named_tests(ROOT)
    assert result.problems == []
    assert int(result.counted.split()[0]) > 50


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("a_rank_that_never_starts", "a_rank_that_starts", "there is no test"),
        ("tests/test_errors.py::", "tests/test_faults.py::", "there is no test"),
        ("tests/test_errors.py::", "tests/test_errors.py ", "in one line"),
    ],
)
def test_a_name_of_a_test_that_does_not_exist_is_a_fault(tmp_path, old, new, told):
    line = "Shown by `tests/test_errors.py::test_a_rank_that_never_starts_is_named`.\n"
    page = tmp_path / "site" / "guides" / "page.md"
    page.parent.mkdir(parents=True)
    page.write_text(f"# Page\n\n{line}")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_errors.py").write_text(
        "def test_a_rank_that_never_starts_is_named():\n"
    )
    assert answers.check_named_tests(tmp_path).problems == []
    page.write_text(f"# Page\n\n{line.replace(old, new)}")
    (problem,) = answers.check_named_tests(tmp_path).problems
    assert problem.startswith("site/guides/page.md:3: ")
    assert told in problem


# What the page says, and no other test shows.


def only_rank_0_clips() -> str:
    model = nested(seeded())
    mean_square(model(my_part(whole_batch()))).backward()
    if dist.get_rank() != 0:
        time.sleep(4)
        return "left"
    with pytest.raises(errors.SilentRanksError, match="FSDP204 clip_grad_norm_"):
        model.clip_grad_norm_(1.0)
    return "error"


def test_clipping_on_one_rank_alone_ends_in_an_error_that_names_the_call():
    assert run_ranks(2, only_rank_0_clips, dist_timeout=3) == ["error", "left"]
