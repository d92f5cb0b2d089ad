"""Break one thing on a copy of the repository: the check that guards it must notice.

Each case changes one place, runs one check and expects a problem that was not there before,
in the changed file. So the checks of `docs-test` are proved to be able to fail.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tools import snippets
from tools.checks import built, commands, docstring_form, pages, raises, snippet_form
from tools.checks.result import Result
from tools.running import Outcome, Run
from tools.snippet_files import read_all

REPOSITORY = Path(__file__).resolve().parents[1]
COPIED = ("fsdp_ref", "snippets", "site", "tools", "tests", "inventories")
BESIDE = ("mkdocs.yml", "pyproject.toml", "CHANGELOG.md", "README.md", "CONTRIBUTING.md", "LICENSE")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "generated", ".*")

A_SNIPPET = "snippets/wrapping/policies/policies.py"
TUTORIAL = "snippets/tutorial/train_on_real_text/train_on_real_text_torch_fsdp1.py"
A_PAGE = "site/guides/process-groups.md"
A_MODULE = "fsdp_ref/process_groups.py"


@pytest.fixture
def tree(tmp_path):
    """Return a copy of the repository's sources."""
    for name in COPIED:
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=LEFT_OUT)
    for name in BESIDE:
        if (REPOSITORY / name).exists():
            shutil.copy(REPOSITORY / name, tmp_path)
    return tmp_path


def change(root: Path, file: str, old: str, new: str) -> None:
    """Replace the first match of a pattern in a file; it must be there."""
    path = root / file
    text = path.read_text()
    changed = re.sub(old, new, text, count=1, flags=re.MULTILINE)
    assert changed != text, f"{file} has nothing that matches {old!r}"
    path.write_text(changed)


def append(root: Path, file: str, text: str) -> None:
    """Add text at the end of a file."""
    path = root / file
    path.write_text(path.read_text() + text)


def new_problems(check: Callable[[Path], Result], root: Path, mutate: Callable[[], None]) -> str:
    """Return the problems that a change brings, without those that were there before."""
    before = set(check(root).problems)
    mutate()
    return "\n".join(problem for problem in check(root).problems if problem not in before)


# Promises


def kept(root: Path, file: str) -> Outcome:
    """Return the outcome of a run that prints what the unchanged file promises."""
    snippet = next(s for s in read_all(root) if s.path == root / file)
    return Outcome(Run(snippet, "gloo"), 0, list(snippet.promise), {}, 1.0)


def verdict_after(root: Path, file: str, old: str, new: Callable[[re.Match[str]], str]) -> str:
    """Change one number in a promise and judge the unchanged output against it."""
    outcome = kept(root, file)
    assert snippets.verdict(outcome, root) == ""
    path = root / file
    head, heading, rest = path.read_text().partition("Expected output:")
    changed = re.sub(old, new, rest, count=1)
    assert changed != rest
    path.write_text(head + heading + changed)
    snippet = next(s for s in read_all(root) if s.path == path)
    return snippets.verdict(dataclasses.replace(outcome, run=Run(snippet, "gloo")), root)


def test_one_printed_integer_off_by_one(tree):
    told = verdict_after(tree, TUTORIAL, r"(?<![\d.,])\d+(?![\d.,])", lambda m: str(int(m[0]) + 1))
    assert TUTORIAL in told


@pytest.mark.parametrize(("ulps", "noticed"), [(1, False), (2, True), (-1, False), (-2, True)])
def test_one_printed_decimal_off_in_its_last_digit(tree, ulps, noticed):
    def shifted(match):
        digits = len(match[0].partition(".")[2])
        return f"{float(match[0]) + ulps * 10**-digits:.{digits}f}"

    told = verdict_after(tree, TUTORIAL, r"\d+\.\d+", shifted)
    assert (TUTORIAL in told) == noticed


# Snippet files

FORM = [
    (r"^# --8<-- \[end:body\]\n", "", "section body needs one start and, below it, one end"),
    (r"\[start:body\]", "[start:bdoy]", "section bdoy needs one start"),
    (r"^(# --8<-- \[start:body\])$", r"import sys\n\1", "outside section `body`"),
    (r"^(# --8<-- \[end:body\])$", r"\1\nprint('after')", "outside section `body`"),
    (r"^import torch$", "import torch\nimport numpy", "imports numpy"),
    (r"^import torch$", "import torch\nfrom tests import models", "imports tests"),
    (r"init_process_group\(\)", 'init_process_group("gloo")', "leave the backend out"),
    (r"init_process_group\(\)", 'init_process_group(backend="gloo")', "leave the backend out"),
    (r"^dist\.destroy_process_group\(\)\n", "", "last statement must be"),
    (r"torch\.cuda\.is_available\(\)", "False", "all snippets choose the device alike"),
    (r"^import torch$", "import torch  # (1)!", "annotation would be copied"),
    (r"^    torchrun .*$", "    python policies.py", "no indented `torchrun"),
    (r"^Expected output:$", "Output:", "has no line 'Expected output:'"),
    (r"^import torch$", "import torch as", "not valid Python"),
]


@pytest.mark.parametrize(("old", "new", "message"), FORM, ids=[case[2] for case in FORM])
def test_a_snippet_that_cannot_be_copied_and_run(tree, old, new, message):
    mutate = partial(change, tree, A_SNIPPET, old, new)
    told = new_problems(snippet_form.check_form, tree, mutate)
    assert A_SNIPPET in told
    assert message in told


def test_a_missing_version_of_a_snippet(tree):
    mutate = (tree / "snippets/wrapping/policies/policies_torch_fsdp2.py").unlink
    told = new_problems(snippet_form.check_form, tree, mutate)
    assert "policies_torch_fsdp2.py missing; show all three APIs" in told


def test_a_snippet_that_no_page_shows(tree):
    mutate = partial(change, tree, "site/guides/wrapping.md", r"^--8<--.*policies\.md\"$", "")
    told = new_problems(snippet_form.check_on_pages, tree, mutate)
    assert "snippets/wrapping/policies:1: no page shows it" in told


def test_a_page_that_shows_a_snippet_that_does_not_exist(tree):
    line = '\n--8<-- "site/generated/snippets/wrapping/plicies.md"\n'
    mutate = partial(append, tree, A_PAGE, line)
    assert A_PAGE in new_problems(snippet_form.check_on_pages, tree, mutate)


# Docstrings

NAMES = [
    (
        "an argument renamed",
        A_MODULE,
        r"^        world_size: ",
        "        size_of_world: ",
        "size_of_world",
    ),
    (
        "an argument too many",
        A_MODULE,
        r"^(        word: )",
        r"        no_such: Nothing.\n\1",
        "no_such",
    ),
    (
        "an attribute renamed",
        "fsdp_ref/flat_param.py",
        r"^        _is_sharded: ",
        "        _is_shraded: ",
        "_is_shraded",
    ),
]


@pytest.mark.parametrize(
    ("file", "old", "new", "name"), [c[1:] for c in NAMES], ids=[c[0] for c in NAMES]
)
def test_a_documented_name_that_the_code_lacks(tree, file, old, new, name):
    mutate = partial(change, tree, file, old, new)
    told = new_problems(docstring_form.check_names, tree, mutate)
    assert file in told
    assert f"documents {name}, which the code does not have" in told


def test_an_undocumented_parameter(tree):
    mutate = partial(change, tree, A_MODULE, r"^        word: ", "        other: ")
    told = new_problems(docstring_form.check_public, tree, mutate)
    assert "rank_lists: parameter word is not under `Args:`" in told


def test_a_public_function_without_a_docstring(tree):
    old = r'^(def rank_lists\([^:]*:[^"]*)"""(?:.|\n)*?"""'
    mutate = partial(change, tree, A_MODULE, old, r"\1pass")
    told = new_problems(docstring_form.check_public, tree, mutate)
    assert "rank_lists: has no docstring" in told


def test_an_export_that_no_page_shows(tree):
    file = "site/reference/wrapping.md"
    mutate = partial(change, tree, file, r"^::: fsdp_ref\.auto_wrap$", "::: fsdp_ref.wrap")
    told = new_problems(docstring_form.check_public, tree, mutate)
    assert "auto_wrap is on no page" in told


@pytest.mark.parametrize(
    ("file", "method"),
    [("fully_sharded.py", "def unshard"), ("saving.py", "def state_dict")],
    ids=["its own", "inherited"],
)
def test_a_public_method_that_no_page_shows(tree, file, method):
    def mutate():
        if file == "fully_sharded.py":
            whole = r"(::: fsdp_ref\.FullyShardedDataParallel\n    options:\n)"
            page = "site/reference/fully-sharded.md"
            change(tree, page, whole, r"\1      members: false\n")
        else:
            shown = r"^::: fsdp_ref\.FullyShardedDataParallel\.state_dict$"
            change(tree, "site/reference/weights.md", shown, "::: fsdp_ref.wrap")

    told = new_problems(docstring_form.check_public, tree, mutate)
    name = method.removeprefix("def ")
    assert f"FullyShardedDataParallel.{name} is on no page" in told
    assert f"fsdp_ref/{file}:" in told


def test_a_promised_error_that_no_test_provokes(tree):
    old = r"^    Raises:\n        GroupWordError"
    new = "    Raises:\n        KeyError: Never.\n        GroupWordError"
    mutate = partial(change, tree, A_MODULE, old, new)
    told = new_problems(raises.check_raises, tree, mutate)
    assert "promises KeyError, and no test provokes it" in told


def test_a_provocation_that_goes_away(tree):
    old = r"provokes\((?:fsdp_ref\.)?(?:process_groups\.)?table, "

    def mutate():
        for path in (tree / "tests").glob("test_*.py"):
            if path.name != Path(__file__).name:
                path.write_text(re.sub(old, "provokes(other, ", path.read_text()))

    told = new_problems(raises.check_raises, tree, mutate)
    assert "table promises GroupWordError, and no test provokes it" in told


# Tips

TIP = "\n\nTip: Mind the group\n    It matters.\n\n    Proof: wrapping/policies\n\n# More\n"
TIPS = [
    ("a well-written tip", TIP, ""),
    ("no blank line before", TIP.replace("\n\nTip", "\nTip", 1), "not collected"),
    ("a blank line after the heading", TIP.replace("group\n", "group\n\n"), "not collected"),
    ("a body that is not indented", TIP.replace("    It", "It"), "not collected"),
    (
        "directly after another section",
        "\n\nArgs:\n    x: It.\n    Tip: Mind the group\n        Proof: wrapping/policies\n\n",
        "not collected",
    ),
    ("no proof", TIP.replace("    Proof: wrapping/policies\n", ""), "has no proof"),
    ("a proof that does not exist", TIP.replace("policies", "plicies"), "there is no snippet"),
]


@pytest.mark.parametrize(("text", "message"), [c[1:] for c in TIPS], ids=[c[0] for c in TIPS])
def test_a_tip_must_be_collected_and_proved(tree, text, message):
    mutate = partial(change, tree, A_MODULE, r"\n\n# Pitfalls\n", f"{text}\n# Pitfalls\n")
    told = new_problems(docstring_form.check_tips, tree, mutate)
    if message:
        assert A_MODULE in told
        assert message in told
    else:
        assert told == ""


def test_a_tip_whose_proof_is_removed(tree):
    proof = r"^\s+Proof: process_groups/experts_through_a_policy\n"
    mutate = partial(change, tree, A_MODULE, proof, "")
    assert "has no proof" in new_problems(docstring_form.check_tips, tree, mutate)


def test_a_tip_on_an_object_that_no_page_shows(tree):
    old = r"^(def _known_world_size\(.*:)$"
    tip = "Tip: Know\n        Well.\n\n        Proof: wrapping/policies"
    new = rf'\1\n    """Know.\n\n    {tip}\n    """'
    mutate = partial(change, tree, A_MODULE, old, new)
    assert "gives a tip and is on no page" in new_problems(docstring_form.check_tips, tree, mutate)


# Pages

BLOCKS = [
    "```python\nmodel = wrap(model)\n```\n",
    "```py\nmodel = wrap(model)\n```\n",
    "``` python\nmodel = wrap(model)\n```\n",
    '```python title="x.py"\n--8<-- "snippets/wrapping/policies/policies.py:body"\nx = 1\n```\n',
    '=== "tab"\n\n    ```python\n    x = 1\n    ```\n',
    "```pycon\nx = 1\n```\n",
    "~~~python\nx = 1\n~~~\n",
    "```\nx = 1\n```\n",
    "```python4\nx = 1\n```\n",
    "```python\nx = 1\n",
    "Text\n\n    import torch\n    x = 1\n",
    "    >>> 1 + 1\n",
]


@pytest.mark.parametrize("block", BLOCKS)
def test_code_on_a_page_that_nothing_ran(tree, block):
    mutate = partial(append, tree, A_PAGE, "\n" + block)
    assert A_PAGE in new_problems(pages.check_fences, tree, mutate)


def test_python_in_a_docstring_that_nothing_ran(tree):
    block = "\n\n```python\nx = 1\n```\n\n# Pitfalls\n"
    mutate = partial(change, tree, A_MODULE, r"\n\n# Pitfalls\n", block)
    assert A_MODULE in new_problems(pages.check_fences, tree, mutate)


def test_included_sections_and_commands_are_fine(tree):
    block = '\n```python\n--8<-- "snippets/wrapping/policies/policies.py:body"\n```\n'
    block += "\n```shell\npip install .\n```\n"
    assert new_problems(pages.check_fences, tree, lambda: append(tree, A_PAGE, block)) == ""


FIGURES = [
    "16 bytes", "4 GB", "1,024 MiB", "50%", "50 %", "30 percent", "3 seconds", "0.5 ms", "2 s",
    "100 µs", "12 minutes", "3 times", "2x", "2.5x", "2\u00d7", "3-fold", "four bytes",
    "ten seconds", "a 10-second limit", "3.35MB", "8 TFLOPS", "900 GB/s",
]  # fmt: skip
NOT_FIGURES = [
    "two ranks", "a 2 x 2 mesh", "4 elements", "float32", "bf16", "world size 8", "shape (2, 3)",
    "`min_num_params=1e8`", "FSDP2", "twice as many all-gathers", "version 2.13", "rank 0",
    "the 1980s", "8-bit",
]  # fmt: skip


@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_with_a_unit_written_by_hand(tmp_path, figure):
    (tmp_path / "site").mkdir()
    page = tmp_path / "site" / "page.md"
    page.write_text(f"# Page\n\nIt takes {figure} and more.\n")
    assert any(p.startswith("site/page.md:3: ") for p in pages.check_figures(tmp_path).problems)


@pytest.mark.parametrize("text", NOT_FIGURES)
def test_numbers_without_a_unit_are_fine(tmp_path, text):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "page.md").write_text(f"# Page\n\nIt has {text} and more.\n")
    assert pages.check_figures(tmp_path).problems == []


def test_a_figure_in_a_docstring(tree):
    mutate = partial(change, tree, A_MODULE, r"\n\n# Pitfalls\n", "\n\nSaves 75%.\n\n# Pitfalls\n")
    assert A_MODULE in new_problems(pages.check_figures, tree, mutate)


@pytest.mark.parametrize("file", [A_PAGE, A_MODULE, A_SNIPPET])
def test_a_misspelling(tree, file):
    mutate = partial(append, tree, file, f"\n# Reci{'eve'} it\n")
    told = new_problems(commands.check_spelling, tree, mutate)
    assert file in told


def test_an_inventory_that_is_not_what_the_names_give(tree):
    name = "torch.nn.Linear generated/torch.nn.Linear.html\n"
    mutate = partial(append, tree, "tools/prebuild/torch_names.txt", name)
    told = new_problems(commands.check_inventory, tree, mutate)
    assert "run `python -m tools.prebuild.inventory`" in told


# The built site

GOOD = """<html><head><link rel="canonical" href="https://example.org/"><link rel="stylesheet"
href="style.css"></head><body><h1 id="top">A</h1><h2 id="x">B</h2><a href="#x">x</a>
<a href="../b/#y">b</a><a href="https://example.org/">out</a><img src="../i.svg"></body></html>"""
OTHER = '<html><body><h1 id="y">B</h1></body></html>'
FAULTS = [
    ('href="#x"', 'href="#z"', "has no anchor 'z'"),
    ('href="../b/#y"', 'href="../b/#z"', "has no anchor 'z'"),
    ('href="../b/#y"', 'href="../c/"', "leads nowhere"),
    ('href="../b/#y"', 'href="/b/"', "is absolute"),
    ('src="../i.svg"', 'src="../j.svg"', "leads nowhere"),
    ('src="../i.svg"', 'src="https://example.org/i.svg"', "must not ask another host"),
    ('src="../i.svg"', 'srcset="//example.org/i.svg 2x"', "must not ask another host"),
    ('href="style.css"', 'href="https://example.org/s.css"', "must not ask another host"),
    ('rel="canonical"', 'rel="preconnect"', "must not ask another host"),
    ("<h1", '<script src="https://example.org/x.js"></script><h1', "must not ask another host"),
    ("<h1", '<iframe src="//example.org/"></iframe><h1', "must not ask another host"),
    ("<h1", '<p style="background: url(https://example.org/)"></p><h1', "must not ask another"),
    ('id="x"', 'id="top"', "id 'top' appears 2 times"),
    ("<h2", "<h3", "a heading of level 3 follows one of level 1"),
    ("<h2", "<h1>again</h1><h2", "exactly one first-level heading"),
    ("<h2", "<p>Args:\n    word: The word.</p><h2", "shows 'Args:' as plain text"),
]


@pytest.fixture
def site(tmp_path):
    """Return a repository with a small built site."""
    folder = tmp_path / "build" / "site"
    for name, text in (("a/index.html", GOOD), ("b/index.html", OTHER)):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    (folder / "a" / "style.css").write_text("body { background: url(data:x) }\n")
    (folder / "i.svg").write_text("<svg/>")
    return tmp_path


def test_a_whole_site_has_no_fault(site):
    result = built.check_links(site)
    assert (result.problems, result.counted) == ([], "6 references on 2 pages")


@pytest.mark.parametrize(("old", "new", "message"), FAULTS)
def test_a_fault_in_a_built_page(site, old, new, message):
    path = site / "build" / "site" / "a" / "index.html"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    told = "\n".join(built.check_links(site).problems)
    assert "build/site/a/index.html:" in told
    assert message in told


@pytest.mark.parametrize("rule", ["@import 'https://example.org/x.css';", "a{b:url(//c.d/e.woff)}"])
def test_a_stylesheet_that_loads_from_elsewhere(site, rule):
    (site / "build" / "site" / "a" / "style.css").write_text(rule)
    assert "from another host" in "\n".join(built.check_links(site).problems)


def test_no_built_site_is_a_failure(tmp_path):
    assert built.check_links(tmp_path).problems


# The whole command, on the copy


def docs_test(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.docs_test", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)


def test_an_example_that_prints_something_else(tree):
    change(
        tree,
        A_MODULE,
        r"^    mod2 on 8 ranks: 2 groups of 4$",
        "    mod2 on 8 ranks: 3 groups of 4",
    )
    done = docs_test(tree, "--only", "examples")
    assert done.returncode == 1
    assert A_MODULE in done.stdout
    assert "mod2 on 8 ranks: 3 groups" in done.stdout


@pytest.mark.slow
def test_a_heading_that_a_page_links_to(tree):
    change(tree, "fsdp_ref/wrapping.py", r"^# Policies$", "# Rules")
    done = docs_test(tree, "--only", "generated pages", "strict build")
    assert done.returncode == 1
    assert "tutorial.md" in done.stdout
    assert "wrapping--policies" in done.stdout


@pytest.mark.slow
def test_a_gradient_that_is_no_mean(tree):
    change(tree, "fsdp_ref/flat_gradient.py", r"scale = 1\.0 / .*$", "scale = 1.0")
    done = docs_test(tree, "who_averages_with_whom.py")
    assert done.returncode == 1
    assert "prints something else than it promises" in done.stdout


def test_an_unknown_check_is_answered_with_the_known_ones(capsys):
    from tools import docs_test

    with pytest.raises(SystemExit):
        docs_test.main(["--only", "lnks"])
    assert "there are: snippet files" in capsys.readouterr().err
