"""The attribute table: one training step, looked at moment by moment, from a recorded run."""

from __future__ import annotations

import re
from pathlib import Path

from tools.prebuild.fragments import PrebuildError
from tools.prebuild.recorded import recorded_output
from tools.prebuild.tables import table
from tools.prebuild.writer import Generated
from tools.snippet_files import Snippet

SNIPPET = "attributes/walk_one_step"


def generate(snippets: list[Snippet], root: Path, output: Generated, *, fresh: bool) -> None:
    """Add the table that `walk_one_step` printed.

    Args:
        snippets: All snippet files.
        root: The repository.
        output: Where the files are collected.
        fresh: Run the snippet again, whatever the cache holds.

    Raises:
        PrebuildError: If what it printed is not a table.
    """
    walk = next((s for s in snippets if s.key == SNIPPET and s.api == "fsdp_ref"), None)
    if walk is None:
        output.add("attributes.md", "\n")
        return
    printed = recorded_output(walk, root, fresh=fresh)
    lines = [line for line in printed if " | " in line]
    rows = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    if not rows or any(len(row) != len(rows[0]) for row in rows):
        raise PrebuildError(f"{walk.path}:1: printed no table with ' | ' between its columns")
    moment, *attributes = rows[0]
    head = [moment.capitalize(), *map(_breakable, attributes)]
    output.add("attributes.md", table(head, rows[1:]) + "\n")


def _breakable(name: str) -> str:
    """Return a name as code that may go on in a new line before each word: `_full_param_padded`."""
    return f"<code>{re.sub('(?<=[a-z0-9])_', '<wbr>_', name)}</code>"
