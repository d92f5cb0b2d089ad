"""The table of who has to call what: read from the docstrings, which have to say it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import griffe

from tools.checks.docstring_form import shown_objects
from tools.prebuild.tables import table
from tools.prebuild.writer import Generated

NO_RANKS_IN_IT = {
    "fsdp_ref.errors": "makes texts",
    "fsdp_ref.layout": "is arithmetic",
    "fsdp_ref.ledger": "formats a row of a table",
    "fsdp_ref.options": "reads an argument of the constructor",
    "fsdp_ref.policies": "answers a question about a module",
    "fsdp_ref.places": "formats a row of a table",
    "fsdp_ref.precision": "is about dtypes",
    "fsdp_ref.rank_words": "is arithmetic",
    "fsdp_ref.strategies": "reads an argument of the constructor",
}
"""Modules whose functions need not say who calls them, each with its reason."""

KINDS = {
    "collective": "Every rank, at the same place: messages are sent",
    "depends": "Depends on what is asked for: when in doubt, every rank",
    "alike": "Every rank, with the same arguments: nothing is sent yet, but later steps rely on it",
    "local": "Any rank, or one alone: nothing is sent",
    "offline": "A process of its own, without ranks",
}
"""Who calls a function, in the order of the tables."""

_STARTS = (
    ("offline", re.compile(r"Needs no ranks")),
    ("depends", re.compile(r"Collective at first|Collective, if|Local (as a rule|for)|Local, but")),
    ("collective", re.compile(r"Collective\b")),
    ("alike", re.compile(r"Every rank\b")),
    ("local", re.compile(r"(Not collective|Local)\b")),
)
_SECTION = re.compile(r"^(Args|Attributes|Examples|Raises|Returns|Tip|Yields):", re.MULTILINE)
_PLAIN = re.compile(r"(Collective|Not collective|Local|Needs no ranks)\.")


@dataclass(frozen=True)
class Call:
    """One public function or method, and who calls it.

    Attributes:
        path: Where it is defined.
        kind: A key of `KINDS`; `None` if the docstring does not say.
        sentences: What the docstring says about it, beyond one word.
        first_alone: With what the first rank alone has what goes in or comes out.
    """

    path: str
    kind: str | None
    sentences: tuple[str, ...]
    first_alone: str

    @property
    def name(self) -> str:
        """The name as a reader would write it."""
        owner, name = self.path.rsplit(".", 2)[-2:]
        return f"{owner}.{name}" if owner[0].isupper() and owner in _RESULTS else name


_RESULTS = {"Timeline", "Unsharding"}  # objects that a call returns; their methods need the owner


def calls(root: Path, package: griffe.Module) -> list[Call]:
    """Return all public functions and methods that have to do with ranks.

    Args:
        root: The repository.
        package: The package as griffe read it.
    """
    return [
        call_of(obj)
        for obj in shown_objects(root, package)
        if isinstance(obj, griffe.Function)
        and "property" not in obj.labels
        and obj.module.path not in NO_RANKS_IN_IT
    ]


def call_of(obj: griffe.Function) -> Call:
    """Read one docstring."""
    text = obj.docstring.value if obj.docstring else ""
    found = list(said(_SECTION.split(text, maxsplit=1)[0]))
    kinds = [kind for kind, _ in found]
    kind = next((kind for kind in dict(_STARTS) if kind in kinds), None)
    sentences = tuple(s for _, s in found if not _PLAIN.fullmatch(s))
    return Call(obj.path, kind, sentences, first_alone(text) if kind != "local" else "")


def said(text: str) -> Iterator[tuple[str, str]]:
    """Yield each sentence that says who calls, with its kind."""
    for sentence in re.split(r"(?<=\.)\s+", " ".join(text.split())):
        for kind, start in _STARTS:
            if start.match(sentence):
                alike = kind == "local" and "every rank" in sentence
                yield "alike" if alike else kind, sentence
                break


def first_alone(text: str) -> str:
    """Say with which settings the first rank alone has the values."""
    if "rank0_only" in text:
        return "with `rank0_only`"
    if "broadcast_from_rank0" in text:
        return "with `broadcast_from_rank0`"
    if "full_state_dict" in text and "cpu_offload" in text:
        return "with `full_state_dict` and `cpu_offload`"
    return ""


def written(found: Iterable[Call]) -> str:
    """Write one table for each kind."""
    parts = []
    by_kind: dict[str | None, list[Call]] = {}
    for call in found:
        by_kind.setdefault(call.kind, []).append(call)
    for kind, title in KINDS.items():
        rows = [
            [f"[`{call.name}`][{call.path}]", " ".join(call.sentences), call.first_alone]
            for call in sorted(by_kind.get(kind, []), key=lambda call: call.name.lower())
        ]
        head = ["Call", "In its own words", "The first rank alone has the values"]
        width = 3 if any(row[2] for row in rows) else 2 if any(row[1] for row in rows) else 1
        lines = table(head[:width], [row[:width] for row in rows])
        parts.append(f"## {title.partition(':')[0]}\n\n{title}.\n\n{lines}")
    return "\n\n".join(parts) + "\n"


def generate(package: griffe.Module, root: Path, output: Generated) -> None:
    """Add the tables.

    Args:
        package: The package as griffe read it.
        root: The repository.
        output: Where the files are collected.
    """
    output.add("who_calls.md", written(calls(root, package)))
