"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Result:
    """The outcome of one check."""

    counted: str
    """What was looked at, with its number: `36 files`."""
    problems: list[str] = field(default_factory=list)
    """One text per problem: `file:line: what is wrong. What to do.`"""
    notes: list[str] = field(default_factory=list)
    """What the reader should know although it is no failure, such as a backend not available."""
