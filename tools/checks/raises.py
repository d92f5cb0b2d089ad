"""Is every error that a docstring promises provoked by a test, through that very object?

A test says so with `provokes` of `tests/provoked.py`, which checks the traceback at run time:

    with provokes(fsdp_ref.wrap, errors.WrapContextError):
        fsdp_ref.wrap(nn.Linear(2, 2))

Here the sources of the tests are read: each promised pair must appear in one of them.
"""

from __future__ import annotations

import ast
from pathlib import Path

import griffe

from tools import docstrings
from tools.checks.docstring_form import shown_objects
from tools.checks.result import Result
from tools.checks.snippet_form import dotted
from tools.paths import shown

PROMISES = (griffe.DocstringSectionKind.raises, griffe.DocstringSectionKind.warns)


def check_raises(root: Path) -> Result:
    """Compare the promised errors of public objects with the provocations in the tests."""
    package = docstrings.load(root)
    provoked = provocations(root, package)
    problems = []
    count = 0
    for obj in shown_objects(root, package):
        for error in promised_errors(obj):
            count += 1
            if (obj.canonical_path, error) not in provoked:
                problems.append(
                    f"{docstrings.place(obj, root)}: {obj.path} promises {error}, and no test "
                    f"provokes it; add `with provokes({obj.path}, {error}):` to "
                    "tests/test_errors.py, or take the promise back"
                )
    return Result(f"{count} promised errors, {len(provoked)} provoked", problems)


def promised_errors(obj: griffe.Object) -> list[str]:
    """Return the class names in an object's `Raises:` and `Warns:` sections."""
    found = []
    for section in docstrings.sections(obj):
        if section.kind in PROMISES:
            found += [str(item.annotation).rpartition(".")[2] for item in section.value]
    return found


def test_files(root: Path) -> list[Path]:
    """Return the test files, in a fixed order."""
    return sorted((root / "tests").rglob("test_*.py"))


def provoking_tests(root: Path) -> list[str]:
    """Return the tests that provoke an error of the package, as pytest names them."""
    package = docstrings.load(root)
    found = []
    for path in test_files(root):
        if pairs_in(path, package):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            names = [name for name in reaching(tree, "provokes") if name.startswith("test_")]
            found += [f"{shown(path, root)}::{name}" for name in names]
    return found


def reaching(tree: ast.Module, name: str) -> list[str]:
    """Return the file's functions that mention a name, directly or through one another."""
    mentions = {
        node.name: {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    reached = {name}
    while more := {f for f, used in mentions.items() if used & reached} - reached:
        reached |= more
    return [function for function in mentions if function in reached]


def provocations(root: Path, package: griffe.Module) -> set[tuple[str, str]]:
    """Return all pairs of object path and error name that tests provoke."""
    return {pair for path in test_files(root) for pair in pairs_in(path, package)}


def pairs_in(path: Path, package: griffe.Module) -> set[tuple[str, str]]:
    """Read one test file's `provokes(object, error)` calls.

    Args:
        path: The test file.
        package: The package, to find what a name means.

    Returns:
        Pairs of the object's path where it is defined, and the error's class name.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = imported_names(tree)
    found = set()
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] == "provokes"):
            continue
        if len(node.args) < 2:
            continue
        obj, error = dotted(node.args[0]), dotted(node.args[1])
        first, _, rest = obj.partition(".")
        full = ".".join(part for part in (names.get(first, first), rest) if part)
        target = find(full, package)
        if target is not None and error:
            found.add((target.canonical_path, error.rpartition(".")[2]))
    return found


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Return what each imported name of a file stands for, as a dotted path."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                names[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def find(path: str, package: griffe.Module) -> griffe.Object | griffe.Alias | None:
    """Find an object of the package by its dotted path; None if there is none."""
    root, _, rest = path.partition(".")
    if root != package.name or not rest:
        return None
    try:
        return package[rest]
    except KeyError:
        return None
