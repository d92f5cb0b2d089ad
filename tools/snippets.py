"""Runs the snippets and compares what they print with what their docstrings promise.

    python -m tools.snippets                       every snippet
    python -m tools.snippets wrapping              one page
    python -m tools.snippets wrapping/policies     one snippet, also by its literal command
    python -m tools.snippets --literal             every file by its literal command
    python -m tools.snippets --update wrapping     rewrite promises; review the diff

A failed comparison is never repeated. A failed rendezvous (the processes did not find each
other, so the snippet was not judged) is repeated once, and counted. An abort in torch's threads
while Python shuts down, after the promised output was printed, is repeated and counted too.
"""

from __future__ import annotations

import argparse
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tools import running
from tools.compare import differences
from tools.paths import ROOT, shown
from tools.running import Launcher, Outcome, Run
from tools.snippet_files import Snippet, SnippetError, chosen, read_most, rewrite_promise

AT_A_TIME = 2
ABORTS_ALLOWED = 3
PORTABLE_PAGES = ("tutorial",)
PORTABLE = {"ATEN_CPU_CAPABILITY": "default"}
"""The slowest kernels, those of any x86 processor: a promise must hold there as well."""


@dataclass
class Plan:
    """What will be run, and what cannot be."""

    runs: list[Run] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)


@dataclass
class Report:
    """What the runs gave."""

    plan: Plan
    outcomes: list[Outcome]
    seconds: float

    @property
    def retried(self) -> int:
        """How many rendezvous were repeated."""
        return sum(outcome.rendezvous_retries for outcome in self.outcomes)

    @property
    def summary(self) -> str:
        """The runs in one line of counts."""
        files = len({outcome.run.snippet.path for outcome in self.outcomes})
        kinds: dict[str, int] = {}
        for outcome in self.outcomes:
            kinds[outcome.run.how] = kinds.get(outcome.run.how, 0) + 1
        parts = ", ".join(f"{count} {how}" for how, count in kinds.items())
        retried = f"; {self.retried} rendezvous repeated" if self.retried else ""
        aborted = sum(outcome.exit_retries for outcome in self.outcomes)
        retried += f"; {aborted} repeated after an abort at Python's exit" if aborted else ""
        return f"{len(self.outcomes)} runs of {files} files ({parts}{retried})"


def plan(snippets: list[Snippet], by_name: Iterable[str], *, literal: bool, gpus: int) -> Plan:
    """Decide which runs a selection of files needs.

    Args:
        snippets: The selected files.
        by_name: What the command line named; files and snippets there also run literally.
        literal: Run every file by its literal command as well.
        gpus: How many GPUs this machine has.

    Returns:
        The runs in order, and a line for each that this machine cannot do.
    """
    names = [name.rstrip("/") for name in by_name]
    result = Plan()
    pages: set[str] = set()
    for snippet in snippets:
        named = any("/" in name and snippet.key in name for name in names)
        named |= any(name.endswith(snippet.path.name) for name in names)
        literally = literal or named or snippet.page not in pages
        pages.add(snippet.page)
        for backend in ("gloo", "nccl"):
            reason = why_not(snippet, backend, gpus)
            if reason:
                result.not_run.append(f"{snippet.label} on {backend}: {reason}")
                continue
            result.runs.append(Run(snippet, backend))
            if literally and backend == ("nccl" if snippet.needs_gpu else "gloo"):
                result.runs.append(Run(snippet, backend, literal=True))
            if backend == "gloo" and snippet.page in PORTABLE_PAGES:
                result.runs.append(Run(snippet, backend, variables=PORTABLE))
    return result


def why_not(snippet: Snippet, backend: str, gpus: int) -> str:
    """Say why this machine cannot run a file on a backend; empty if it can."""
    cards = snippet.ranks
    if backend == "gloo":
        return "needs a GPU, as its name says" if snippet.needs_gpu else ""
    if gpus < cards:
        return f"needs {cards} GPUs, this machine has {gpus or 'none'}"
    return ""


class Launchers:
    """Launcher processes, one per thread and kind of environment, started when needed."""

    def __init__(self, package: Path) -> None:
        """Remember where the package is; nothing starts yet."""
        self.package = package
        self.idle: dict[str, queue.SimpleQueue[Launcher]] = {}
        self.all: list[Launcher] = []
        self.lock = threading.Lock()

    def run(self, run: Run, limit: float) -> Outcome:
        """Run one file, under the agent or literally."""
        if run.literal:
            return running.run_literally(run, self.package, limit)
        with self.lock:
            idle = self.idle.setdefault(run.how, queue.SimpleQueue())
        try:
            launcher = idle.get_nowait()
        except queue.Empty:
            environment = running.base_environment(run.backend, run.variables)
            launcher = Launcher(environment, self.package)
            with self.lock:
                self.all.append(launcher)
        outcome = running.run_under_agent(run, launcher, limit)
        idle.put(launcher)
        return outcome

    def close(self) -> None:
        """End all launchers."""
        for launcher in self.all:
            launcher.close()


def execute(
    todo: Plan,
    root: Path = ROOT,
    *,
    limit: float = running.LIMIT_SECONDS,
    progress: Callable[[int, int, Outcome], None] = lambda done, total, outcome: None,
) -> Report:
    """Run a plan, two files at a time.

    Args:
        todo: The runs.
        root: The repository whose `fsdp_ref` the snippets import.
        limit: Seconds after which one run is stopped.
        progress: Called after each run with its number, the total and the outcome.

    Returns:
        All outcomes, in the plan's order.
    """
    start = time.monotonic()
    done = 0
    lock = threading.Lock()
    with running.package_folder(root) as package:
        launchers = Launchers(package)

        def one(run: Run) -> Outcome:
            nonlocal done
            outcome = launchers.run(run, limit)
            if outcome.rendezvous_failed:
                outcome = launchers.run(run, limit)
                outcome.rendezvous_retries = 1
            aborts = 0
            while outcome.aborted_at_exit and kept(outcome) and aborts < ABORTS_ALLOWED:
                outcome, aborts = launchers.run(run, limit), aborts + 1
            outcome.exit_retries = aborts
            with lock:
                done += 1
                progress(done, len(todo.runs), outcome)
            return outcome

        pool = ThreadPoolExecutor(AT_A_TIME)
        try:
            outcomes = list(pool.map(one, todo.runs))
        except BaseException:  # Ctrl+C, a termination signal, or a defect of ours
            pool.shutdown(wait=False, cancel_futures=True)
            running.stop_everything()
            raise
        pool.shutdown()
        launchers.close()
    return Report(todo, outcomes, time.monotonic() - start)


def kept(outcome: Outcome) -> bool:
    """Tell whether the output, at least, is what was promised."""
    return not differences(outcome.run.snippet.promise, outcome.printed)


def verdict(outcome: Outcome, root: Path = ROOT) -> str:
    """Judge one run.

    Args:
        outcome: What the run did.
        root: The repository, to show paths.

    Returns:
        Empty when the promise was kept; else the file, what happened and what to do.
    """
    snippet = outcome.run.snippet
    place = f"{shown(snippet.path, root)}:{snippet.promise_line}: [{outcome.run.how}]"
    told = "\n".join(
        f"    {name}:\n" + "\n".join(f"      {line}" for line in text.rstrip().splitlines())
        for name, text in outcome.errors.items()
    )
    if outcome.timed_out:
        return f"{place} was stopped after {outcome.seconds:.0f} s; where its ranks were:\n{told}"
    if outcome.code != 0:
        return f"{place} failed with status {outcome.code}:\n{told}"
    if outcome.talkative_ranks:
        return (
            f"{place} several ranks print, so the order of lines is chance; print from one:\n{told}"
        )
    found = differences(snippet.promise, outcome.printed)
    if not found:
        return ""
    listed = "\n".join(f"    {line}" for line in found)
    return (
        f"{place} prints something else than it promises:\n{listed}\n"
        f"    Mend the code, or run `nox -s docs-update -- {snippet.key}` and review the diff."
        + (f"\n{told}" if told else "")
    )


def update(report: Report) -> list[Snippet]:
    """Rewrite the promises that differ at all from the first plain run of each file.

    Args:
        report: The runs.

    Returns:
        The files that were changed.
    """
    changed, seen = [], set()
    for outcome in report.outcomes:
        snippet = outcome.run.snippet
        ran = outcome.code == 0 and not outcome.timed_out and not outcome.talkative_ranks
        if snippet.path in seen or not ran:
            continue
        seen.add(snippet.path)
        printed = [line.rstrip() for line in outcome.printed]
        if printed != list(snippet.promise):
            rewrite_promise(snippet, printed)
            changed.append(snippet)
    return changed


def end_cleanly() -> None:
    """Let a termination signal stop what we started, as Ctrl+C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def tell(done: int, total: int, outcome: Outcome) -> None:
    """Print one progress line."""
    word = "FAIL" if verdict(outcome) else "ok"
    run = outcome.run
    print(
        f"[{done}/{total}] {word:4} {run.snippet.label} ({run.how}) {outcome.seconds:.1f} s",
        flush=True,
    )


def select(names: list[str], root: Path = ROOT) -> list[Snippet]:
    """Return the snippets that a command line names.

    Args:
        names: Pages, snippets or files; none means all.
        root: The repository.

    Returns:
        The chosen files.

    Raises:
        SnippetError: If a name means nothing, or a file that it may mean cannot be read.
    """
    snippets, broken = read_most(root)
    stems = {name.removeprefix("snippets/").split("/")[0].removesuffix(".md") for name in names}
    for path, message in broken.items():
        if not names or stems & {path.parent.parent.name, path.parent.name, path.stem}:
            raise SnippetError(message)
    return chosen(snippets, names, root)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="tools.snippets", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="pages, snippets (page/name) or files")
    parser.add_argument("--literal", action="store_true", help="also run each file's own command")
    parser.add_argument("--update", action="store_true", help="rewrite promises instead of failing")
    parser.add_argument(
        "--limit", type=float, default=running.LIMIT_SECONDS, help="seconds per run"
    )
    options = parser.parse_args(arguments)
    end_cleanly()
    try:
        selected = select(options.names)
    except SnippetError as error:
        print(f"FAIL {error}")
        return 1
    todo = plan(selected, options.names, literal=options.literal, gpus=running.cards())
    if options.update:
        todo.runs = [run for run in todo.runs if not run.literal and not run.variables]
    report = execute(todo, limit=options.limit, progress=tell)
    rewritten = update(report) if options.update else []
    for snippet in rewritten:
        print(f"rewrote the promise of {shown(snippet.path, ROOT)}: review the diff")
    paths = {snippet.path for snippet in rewritten}
    failures = [v for o in report.outcomes if o.run.snippet.path not in paths and (v := verdict(o))]
    for failure in failures:
        print(f"\nFAIL {failure}")
    for line in todo.not_run:
        print(f"not run: {line}")
    print(f"{report.summary}, {len(failures)} failed, {report.seconds:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
