"""Checks that are a run of another tool: examples, provocations, spelling, the strict build."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tools.checks.pages import docstring_texts
from tools.checks.raises import provoking_tests
from tools.checks.result import Result
from tools.paths import pages, shown
from tools.prebuild import inventory, prebuild
from tools.prebuild.fragments import PrebuildError
from tools.running import base_environment
from tools.snippet_files import SnippetError

LIMIT_SECONDS = 600


def run(arguments: list[str], root: Path) -> subprocess.CompletedProcess[str]:
    """Run a Python module in the repository, with the variables of a snippet's run."""
    environment = os.environ | base_environment("gloo", {}) | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )


def indented(text: str) -> str:
    """Set a tool's output apart from our own lines."""
    return "\n".join(f"    {line}" for line in text.strip().splitlines())


def check_prebuild(root: Path) -> Result:
    """Generate all pages anew, then once more: the second time nothing may change."""
    try:
        prebuild(root, fresh=True)
        prebuild(root)  # the recorded run took a while, and a source may have been edited
        changed = prebuild(root)
    except (PrebuildError, SnippetError, RuntimeError) as error:
        return Result("generated pages", [str(error)])
    files = [path for path in (root / "site" / "generated").rglob("*") if path.is_file()]
    problems = [
        f"site/generated/{path}:1: differs when generated again; its generator must not depend "
        "on time or chance"
        for path in changed
    ]
    return Result(f"{len(files)} generated files", problems)


def check_inventory(root: Path) -> Result:
    """Compare the committed inventory of torch's names with what would be written."""
    names = inventory.entries(root).splitlines()
    difference = inventory.difference(root)
    return Result(f"{len(names)} names of torch", [difference] if difference else [])


def check_examples(root: Path) -> Result:
    """Run every example of the docstrings; all that are written must have run."""
    done = run(["tools.checks.run_examples"], root)
    written = sum(
        line.lstrip().startswith(">>> ") for text in docstring_texts(root) for line in text.lines
    )
    if done.returncode != 0:
        return Result(
            "examples", [f"fsdp_ref/__init__.py:1: no example ran:\n{indented(done.stderr)}"]
        )
    answer = json.loads(done.stdout.splitlines()[-1])
    problems = [
        f"{shown(Path(p['file']), root)}:{p['line']}: an example prints something else than it "
        f"says; mend the code or the docstring:\n{indented(p['told'])}"
        for p in answer["problems"]
    ]
    if answer["attempted"] != written and not problems:
        problems.append(
            f"fsdp_ref:1: {written} example lines are written, {answer['attempted']} ran; an "
            "example in an attribute's docstring or a nested function is not found by doctest"
        )
    return Result(f"{answer['attempted']} examples", problems)


def check_provocations(root: Path) -> Result:
    """Run the tests that provoke the documented errors."""
    tests = provoking_tests(root)
    if not tests:
        return Result("0 tests", ["tests/test_errors.py:1: no test provokes a documented error"])
    files = sorted({test.partition("::")[0] for test in tests})
    done = run(["pytest", "-q", "--no-header", "-p", "no:cacheprovider", *tests], root)
    last = (done.stdout.strip().splitlines() or [done.stderr])[-1].strip("= ")
    problems = []
    if done.returncode != 0:
        told = indented(done.stdout[-4000:])
        problems = [f"{files[0]}:1: a promised error did not come:\n{told}"]
    if " skipped" in last:
        problems.append(f"{files[0]}:1: a skipped test proves nothing: {last}")
    return Result(f"{last} in {len(files)} files", problems)


def check_build(root: Path) -> Result:
    """Build the site strictly. Never with `-q`: that would switch strictness off."""
    done = run(["mkdocs", "build", "--strict", "--clean"], root)
    told = done.stderr + done.stdout
    problems = []
    if done.returncode != 0:
        warnings = [line for line in told.splitlines() if line.startswith(("WARNING", "ERROR"))]
        lines = "\n".join(warnings) or told
        problems = [
            f"mkdocs.yml:1: the strict build failed; mend what it names:\n{indented(lines)}"
        ]
    return Result(f"{len(pages(root))} pages", problems)


SPELLED = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "site",
    "fsdp_ref",
    "snippets",
    "tools",
    "tests",
)


def check_spelling(root: Path) -> Result:
    """Look for known misspellings in prose and code."""
    beside = Path(sys.executable).with_name("typos")
    program = str(beside) if beside.exists() else shutil.which("typos")
    if program is None:
        return Result(
            "0 files", ["pyproject.toml:1: the spelling checker `typos` is not installed"]
        )
    present = [name for name in SPELLED if (root / name).exists()]
    done = subprocess.run(
        [program, "--format", "brief", "--color", "never", *present],
        cwd=root,
        capture_output=True,
        text=True,
    )
    problems = [re.sub(r"^\./", "", line) for line in done.stdout.splitlines() if line.strip()]
    if done.returncode not in (0, 2):
        problems.append(f"pyproject.toml:1: typos failed: {done.stderr.strip()}")
    return Result(f"{len(present)} folders and files", problems)
