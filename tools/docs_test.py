"""Proves that pages and code agree.

    python -m tools.docs_test                      everything
    python -m tools.docs_test wrapping             only this page's snippets, in seconds
    python -m tools.docs_test wrapping/policies    one snippet, also by its literal command
    python -m tools.docs_test --literal            every snippet also by its literal command
    python -m tools.docs_test --only links tips    some checks
    python -m tools.docs_test --update [NAMES]     rewrite promised outputs; review the diff

It compares and never rewrites, except with `--update`. One line per check says what was looked
at and how long it took; a failure names file, line and what to do.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tools import running, snippets
from tools.checks import (
    answers,
    built,
    commands,
    docstring_form,
    pages,
    raises,
    snippet_form,
    who_calls,
)
from tools.checks.result import Result
from tools.paths import ROOT
from tools.snippet_files import SnippetError

PROGRESS_SECONDS = 15.0

CHECKS: dict[str, Callable[[Path], Result]] = {
    "snippet files": snippet_form.check_form,
    "snippets on pages": snippet_form.check_on_pages,
    "public docstrings": docstring_form.check_public,
    "who calls": who_calls.check_who_calls,
    "documented names": docstring_form.check_names,
    "tips": docstring_form.check_tips,
    "promised errors": raises.check_raises,
    "figures": pages.check_figures,
    "spelling": commands.check_spelling,
    "inventory": commands.check_inventory,
    "generated pages": commands.check_prebuild,
    "code blocks": pages.check_fences,
    "tests on pages": answers.check_named_tests,
    "strict build": commands.check_build,
    "links": built.check_links,
    "answers": answers.check_anchors,
    "examples": commands.check_examples,
    "error tests": commands.check_provocations,
}
"""The checks that take only the repository, in the order in which they run."""

SNIPPETS = "snippets"


def run_snippets(names: list[str], *, literal: bool) -> Result:
    """Run snippets and compare them with their promises.

    Args:
        names: Pages, snippets or files; none means all.
        literal: Run every file by its literal command as well.

    Returns:
        The result, with what was not available as notes.
    """
    try:
        selected = snippets.select(names)
    except SnippetError as error:
        return Result("0 runs", str(error).splitlines())
    gpus = running.cards()
    todo = snippets.plan(selected, names, literal=literal, gpus=gpus)
    report = snippets.execute(todo, progress=Progress())
    problems = [text for outcome in report.outcomes if (text := snippets.verdict(outcome))]
    return Result(report.summary, problems, availability(gpus, todo.not_run))


def availability(gpus: int, not_run: list[str]) -> list[str]:
    """Say plainly which backends were not available, and what was not run for that."""
    if not not_run:
        return []
    if gpus == 0:
        files = len({line.partition(" on ")[0] for line in not_run})
        return [f"nccl was not available (this machine has no GPU): {files} files not run on it"]
    return [f"{len(not_run)} runs were not possible:", *(f"  {line}" for line in not_run)]


class Progress:
    """Prints failures at once, and now and then how far the runs are."""

    def __init__(self) -> None:
        """Start the clock."""
        self.last = time.monotonic()

    def __call__(self, done: int, total: int, outcome: running.Outcome) -> None:
        """Hear of one finished run."""
        now = time.monotonic()
        if snippets.verdict(outcome):
            snippets.tell(done, total, outcome)
        elif now - self.last > PROGRESS_SECONDS:
            print(f"            {done} of {total} runs done", flush=True)
            self.last = now


def report(name: str, number: int, total: int, check: Callable[[], Result]) -> bool:
    """Make one check and print its line; return whether it passed."""
    start = time.monotonic()
    try:
        result = check()
    except Exception as error:  # a crash in one check must not hide the others' findings
        result = Result("crashed", [f"the check itself failed: {type(error).__name__}: {error}"])
    word = "FAIL" if result.problems else "ok"
    seconds = time.monotonic() - start
    print(f"[{number:2}/{total}] {word:4} {name:18} {result.counted}  {seconds:.1f} s", flush=True)
    for note in result.notes:
        print(f"        note {note}")
    for problem in result.problems:
        print(f"        {problem}", flush=True)
    return not result.problems


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="tools.docs_test", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="pages, snippets (page/name) or files")
    parser.add_argument("--literal", action="store_true", help="also run each file's own command")
    parser.add_argument("--only", nargs="+", metavar="CHECK", help=", ".join([*CHECKS, SNIPPETS]))
    parser.add_argument("--update", action="store_true", help="rewrite promised outputs")
    options = parser.parse_args(arguments)
    if options.update:
        return snippets.main([*options.names, "--update"])
    wanted = options.only or ([SNIPPETS] if options.names else [*CHECKS, SNIPPETS])
    unknown = [name for name in wanted if name not in (*CHECKS, SNIPPETS)]
    if unknown:
        parser.error(
            f"no check is called {unknown[0]!r}; there are: {', '.join([*CHECKS, SNIPPETS])}"
        )
    snippets.end_cleanly()
    start = time.monotonic()
    passed = 0
    every_snippet = partial(run_snippets, options.names, literal=options.literal)
    for number, name in enumerate(wanted, 1):
        check = partial(CHECKS[name], ROOT) if name in CHECKS else every_snippet
        passed += report(name, number, len(wanted), check)
    failed = len(wanted) - passed
    verdict = f"{failed} of {len(wanted)} checks failed" if failed else f"{passed} checks passed"
    print(f"docs-test: {verdict} in {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
