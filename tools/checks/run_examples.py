"""Runs the examples in the package's docstrings; a process of its own, started by docs-test."""

from __future__ import annotations

import doctest
import importlib
import io
import json
import pkgutil

import fsdp_ref


def main() -> None:
    """Run all examples and print the result as one line of JSON."""
    names = ["fsdp_ref", *(m.name for m in pkgutil.walk_packages(fsdp_ref.__path__, "fsdp_ref."))]
    finder = doctest.DocTestFinder(exclude_empty=True)
    attempted, problems = 0, []
    for name in names:
        if name.endswith("__main__"):
            continue
        module = importlib.import_module(name)
        for test in finder.find(module, name):
            told = io.StringIO()
            runner = doctest.DocTestRunner(verbose=False)
            outcome = runner.run(test, out=told.write)
            attempted += outcome.attempted
            if outcome.failed:
                problems.append(
                    {"file": test.filename, "line": (test.lineno or 0) + 1, "told": told.getvalue()}
                )
    print(json.dumps({"attempted": attempted, "problems": problems}))


if __name__ == "__main__":
    main()
