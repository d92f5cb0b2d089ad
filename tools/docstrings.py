"""The package as its pages see it: objects, docstrings and tips, read without importing."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import griffe

from tools.paths import shown

PROOF = re.compile(r"^\s*Proof:\s*(?P<key>\S+)\s*$")


def load(root: Path) -> griffe.Module:
    """Read the package's sources.

    Args:
        root: The repository.

    Returns:
        The package, its docstrings ready to be parsed as Google style.
    """
    logging.getLogger("griffe").setLevel(logging.ERROR)  # mkdocs shows its warnings, strictly
    package = griffe.load(
        "fsdp_ref",
        search_paths=[root],
        docstring_parser="google",
        try_relative_path=False,
        allow_inspection=False,
        resolve_aliases=True,
        resolve_external=False,
    )
    assert isinstance(package, griffe.Module)
    return package


def objects(parent: griffe.Object) -> Iterator[griffe.Object]:
    """Yield the object and everything defined in it, private names too, in source order."""
    yield parent
    members = [member for member in parent.members.values() if not member.is_alias]
    for member in sorted(members, key=lambda member: (not member.is_module, member.lineno or 0)):
        assert isinstance(member, griffe.Object)
        yield from objects(member)


def is_public(obj: griffe.Object) -> bool:
    """Tell whether no part of the object's path begins with an underscore."""
    return not any(part.startswith("_") for part in obj.path.split("."))


def place(obj: griffe.Object, root: Path) -> str:
    """Return `file:line` of an object's docstring, or of the object when it has none."""
    line = obj.docstring.lineno if obj.docstring else obj.lineno
    file = obj.filepath
    return f"{shown(file, root) if isinstance(file, Path) else obj.path}:{line or 1}"


def sections(obj: griffe.Object) -> list[griffe.DocstringSection]:
    """Return the parsed sections of an object's docstring; none when it has none."""
    return obj.docstring.parsed if obj.docstring else []


@dataclass(frozen=True)
class Tip:
    """One `Tip:` section of a docstring."""

    obj: griffe.Object
    number: int
    title: str
    claim: str
    proof: str | None

    @property
    def anchor(self) -> str:
        """The tip's place on the Tips page; `tools/griffe_docstrings.py` links to it."""
        return tip_anchor(self.obj.path, self.number)


def tip_anchor(path: str, number: int) -> str:
    """Return the anchor of the object's tip with this number, counted from one."""
    return f"tip-{path.replace('.', '-')}-{number}"


def tips_of(obj: griffe.Object) -> list[Tip]:
    """Collect the tips of one docstring."""
    found: list[Tip] = []
    for section in sections(obj):
        if section.kind is griffe.DocstringSectionKind.admonition and section.value.kind == "tip":
            lines = section.value.description.splitlines()
            proofs = [match["key"] for line in lines if (match := PROOF.match(line))]
            claim = "\n".join(line for line in lines if not PROOF.match(line)).strip()
            title = section.title or claim.partition(". ")[0].rstrip(".")
            proof = proofs[-1] if proofs else None
            found.append(Tip(obj, len(found) + 1, title, claim, proof))
    return found


def tips(package: griffe.Module) -> list[Tip]:
    """Collect all tips of the package, module by module in the order of their sources."""
    return [tip for obj in objects(package) for tip in tips_of(obj)]
