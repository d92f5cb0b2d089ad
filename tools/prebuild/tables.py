"""Tables that are computed from the package: states, errors, process groups, attributes."""

from __future__ import annotations

import importlib
import inspect
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import griffe

from tools.prebuild.writer import Generated


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def first_paragraph(docstring: griffe.Docstring | str | None) -> str:
    """Return a docstring's first paragraph as one line."""
    text = docstring if isinstance(docstring, str) else docstring.value if docstring else ""
    return " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())


def states(package: griffe.Module) -> str:
    """Write the two state machines as tables, from `LEGAL_MOVES` and `NEXT_PHASES`."""
    module = importlib.import_module("fsdp_ref.states")
    parts = [
        machine(package, module.LEGAL_MOVES, "What memory holds", "may become"),
        machine(package, module.NEXT_PHASES, "Where the step is", "may be followed by"),
    ]
    return "\n\n".join(parts) + "\n"


def machine(
    package: griffe.Module, moves: dict[Enum, frozenset[Enum]], title: str, verb: str
) -> str:
    """Write one machine: a row per state, what it means and what may come next."""
    kind = type(next(iter(moves)))
    rows = []
    for state in kind:
        following = [other for other in kind if other in moves[state]]  # in the order of the enum
        meaning = package[f"states.{kind.__name__}.{state.name}"].docstring
        names = ", ".join(f"`{other.name}`" for other in following)
        rows.append([f"`{state.name}`", first_paragraph(meaning), names])
    head = [f"`{kind.__name__}`", title, verb]
    return table(head, rows)


def errors() -> str:
    """Write the catalogue of errors and warnings, in the order of their codes."""
    module = importlib.import_module("fsdp_ref.errors")
    rows = []
    for kind in sorted(classes(module), key=lambda kind: kind.code):
        bases = [base.__name__ for base in kind.__mro__ if base.__module__ == "builtins"]
        caught = next(name for name in bases if name not in ("Exception", "object"))
        link = f"[{kind.__name__}][fsdp_ref.errors.{kind.__name__}]"
        rows.append([f"`{kind.code}`", link, f"`{caught}`", first_paragraph(kind.__doc__)])
    return table(["Code", "Class", "Is also a", "When"], rows) + "\n"


def classes(module: ModuleType) -> list[Any]:
    """Return the module's error classes, without the two bases that nobody raises."""
    found = [kind for kind in vars(module).values() if inspect.isclass(kind)]
    return [kind for kind in found if getattr(kind, "code", "FSDP000") != "FSDP000"]


WORLDS = ((4, 4), (8, 4))
"""Ranks, and ranks per host, of the example tables."""


def process_groups() -> str:
    """Write what each process group word means on small worlds."""
    module = importlib.import_module("fsdp_ref.process_groups")
    parts = []
    for world_size, per_host in WORLDS:
        hosts = world_size // per_host
        host = "one host" if hosts == 1 else f"{hosts} hosts of {per_host} ranks"
        rows = []
        for word in ("self", "set2", "mod2", "node", "local_rank_across_nodes"):
            lists = module.rank_lists(word, world_size, per_host)
            rows.append([f"`'{word}'`", ", ".join(f"`{ranks}`" for ranks in lists)])
        parts.append(f"{world_size} ranks on {host}:\n\n" + table(["Word", "Groups"], rows))
    return "\n\n".join(parts) + "\n"


def generate(package: griffe.Module, root: Path, output: Generated) -> None:
    """Add the tables that need no run.

    Args:
        package: The package as griffe read it.
        root: The repository.
        output: Where the files are collected.
    """
    output.add("states.md", states(package))
    output.add("errors.md", errors())
    output.add("process_groups.md", process_groups())
