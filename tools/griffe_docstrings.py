"""A griffe extension: makes docstrings that read well in a terminal read well on a page.

- The `Proof:` line of a tip becomes a link to the tip's entry on the Tips page.
- An example with its output becomes a code block. In `help()` it needs no marks; Markdown
  would take `>>>` for quotations inside quotations.

The sources stay as they are. mkdocs.yml names this file.
"""

from __future__ import annotations

import re
from itertools import count
from typing import Any

import griffe

PROOF = re.compile(r"^(?P<indent>\s*)Proof:[ \t]*(?P<key>\S+)[ \t]*$", re.MULTILINE)

SECTION = re.compile(r"^\s*(?:Examples?|Note|Tip|Warning|See also)\b[^:]*:")


class ReadableDocstrings(griffe.Extension):
    """Rewrites docstrings after loading."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is None:
            return
        text = link_proofs(obj.docstring.value, obj.path.replace(".", "-"))
        obj.docstring.value = "\n".join(fence_examples(text.splitlines()))


def link_proofs(text: str, name: str) -> str:
    """Turn each `Proof: page/name` into a link to the tip's anchor."""
    numbers = count(1)
    return PROOF.sub(
        lambda match: f"{match['indent']}Proof: [{match['key']}][tip-{name}-{next(numbers)}]", text
    )


def fence_examples(lines: list[str]) -> list[str]:
    """Put a fence around each run of lines that begins with a prompt."""
    result: list[str] = []
    by_hand = False
    number = 0
    while number < len(lines):
        line = lines[number]
        by_hand ^= line.lstrip().startswith("```")
        if by_hand or not line.lstrip().startswith(">>> "):
            result.append(line)
            number += 1
            continue
        stop = number
        while stop < len(lines) and lines[stop].strip():
            stop += 1
        result += fenced(lines[number:stop], in_section=SECTION.match(owner(lines, number)))
        number = stop
    return result


def owner(lines: list[str], number: int) -> str:
    """Return the nearest line above that is less indented: a section's heading, or prose."""
    depth = indentation(lines[number])
    above = (line for line in reversed(lines[:number]) if line.strip())
    return next((line for line in above if indentation(line) < depth), "")


def fenced(block: list[str], *, in_section: object) -> list[str]:
    """Fence one example; an indented example in plain prose loses its indentation."""
    depth = indentation(block[0])
    if not in_section:
        block = [line[depth:] for line in block]
        depth = 0
    mark = " " * depth + "```"
    return [f"{mark}pycon", *block, mark]


def indentation(line: str) -> int:
    """Count the blanks in front of a line."""
    return len(line) - len(line.lstrip())
