"""Reads CHANGELOG.md: which releases it names, newest first."""

from __future__ import annotations

import re

HEADING = re.compile(r"^## +\[?(?P<version>\d+(?:\.\d+)+)\]?(?:\s.*)?$", re.MULTILINE)


def releases(text: str) -> list[str]:
    """Return the released versions in the order of the text; `Unreleased` is none."""
    return [match["version"] for match in HEADING.finditer(text)]


def newest_release(text: str) -> str:
    """Return the first release the text names.

    Raises:
        ValueError: If it names none.
    """
    found = releases(text)
    if not found:
        raise ValueError("CHANGELOG.md names no release: expected a heading such as '## 0.1.0'")
    return found[0]
