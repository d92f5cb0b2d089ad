"""Do pages and docstrings show only code that ran and numbers that were computed?"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.checks.result import Result
from tools.paths import pages, shown, sources

FENCE = re.compile(r"^(?P<indent>\s*)(?P<ticks>`{3,}|~{3,})\s*(?P<language>[\w+-]*)")
INCLUDE = re.compile(r'^\s*--8<-- "snippets/[\w/]+\.py:[\w-]+"\s*$')
PYTHON = {"python", "py", "python3", "pycon"}
LANGUAGES = {"text", "shell", "console", "toml", "yaml", "json", "markdown"}
LOOSE_CODE = re.compile(
    r"^(?: {4,}|\t)(?:import \w|from \w[\w.]* import |def \w+\(|class \w+[(:]|>>> )"
)


@dataclass(frozen=True)
class Text:
    """Prose to check: a page, or one docstring."""

    path: Path
    first_line: int
    lines: tuple[str, ...]
    is_page: bool

    def at(self, index: int, root: Path) -> str:
        """Return `file:line` of a line of the text."""
        return f"{shown(self.path, root)}:{self.first_line + index}"


def page_texts(root: Path) -> list[Text]:
    """Return the hand-written pages, and the changelog, which a page includes."""
    found = [*pages(root), root / "CHANGELOG.md"]
    found = [path for path in found if path.exists()]
    return [Text(path, 1, tuple(path.read_text("utf-8").splitlines()), True) for path in found]


def generated_texts(root: Path) -> list[Text]:
    """Return the generated Markdown, as far as it has been generated."""
    found = sorted((root / "site" / "generated").rglob("*.md"))
    return [Text(path, 1, tuple(path.read_text("utf-8").splitlines()), False) for path in found]


def docstring_texts(root: Path) -> list[Text]:
    """Return every docstring of the package, attribute docstrings too."""
    found = []
    for path in sources(root):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            for statement in body if isinstance(body, list) else []:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    value = statement.value.value
                    if isinstance(value, str):
                        lines = tuple(value.splitlines())
                        found.append(Text(path, statement.lineno, lines, False))
    return found


def outside_fences(text: Text) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not in a fenced block."""
    fence = ""
    for index, line in enumerate(text.lines):
        match = FENCE.match(line)
        if match and not fence:
            fence = match["ticks"]
        elif fence:
            fence = "" if line.strip() == fence else fence
        else:
            yield index, line


def outside_code(text: Text) -> Iterator[tuple[int, str]]:
    """Yield the lines that are prose: not in fences, not examples and their output."""
    example = False
    for index, line in outside_fences(text):
        example = line.lstrip().startswith(">>> ") or (example and bool(line.strip()))
        if not example:
            yield index, line


def check_fences(root: Path) -> Result:
    """Check that every block of Python comes from a snippet or an example that is run."""
    problems: list[str] = []
    count = 0
    for text in page_texts(root) + generated_texts(root) + docstring_texts(root):
        for index, language, body in fences(text):
            count += 1
            problems += [
                f"{text.at(index, root)}: {fault}" for fault in fence_faults(language, body)
            ]
        if text.is_page:
            for index, line in outside_fences(text):
                if LOOSE_CODE.match(line):
                    problems.append(f"{text.at(index, root)}: code that nothing runs; {REMEDY}")
    return Result(f"{count} blocks", problems)


REMEDY = 'include a snippet\'s section: --8<-- "snippets/page/name/name.py:body"'


def fences(text: Text) -> Iterator[tuple[int, str, list[str]]]:
    """Yield index, language and lines of each fenced block."""
    start, ticks, language = 0, "", ""
    body: list[str] = []
    for index, line in enumerate(text.lines):
        match = FENCE.match(line)
        if not ticks and match:
            start, ticks, language, body = index, match["ticks"], match["language"].lower(), []
        elif ticks and line.strip() == ticks:
            yield start, language, body
            ticks = ""
        elif ticks:
            body.append(line)
    if ticks:
        yield start, "never closed", body


def fence_faults(language: str, body: list[str]) -> Iterator[str]:
    """Yield what is wrong with one block."""
    code = [line for line in body if line.strip()]
    if language in PYTHON:
        examples = code and code[0].lstrip().startswith(">>> ") and language == "pycon"
        if not (code and all(INCLUDE.match(line) for line in code)) and not examples:
            yield f"Python that nothing runs; {REMEDY}"
    elif language not in LANGUAGES:
        name = language or "no language"
        yield f"a block with {name}; say which of {', '.join(sorted(LANGUAGES | {'python'}))} it is"


WORDS = r"(?:two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|fifty|hundred|thousand)"
UNITS = (
    r"(?:%|percent\b|(?:kilo|mega|giga|tera)?bytes?\b|[kKMGT]i?B\b"
    r"|(?:nano|micro|milli)?seconds?\b|secs?\b|ms\b|[µu]s\b|ns\b|minutes?\b|hours?\b"
    r"|GB/s\b|[TG]?FLOPS?\b)"
)
FIGURE = re.compile(
    rf"(?<![\w.-])(?:\d[\d.,]*\s?-?{UNITS}|\d[\d.,]* s\b|{WORDS} {UNITS}"
    rf"|\d[\d.,]*[x\u00d7](?![\w\d])|\d[\d.,]* times\b|\d[\d.,]*-fold\b)",
)


def check_figures(root: Path) -> Result:
    """Check that no page or docstring states a figure with a unit by hand."""
    problems = []
    texts = page_texts(root) + docstring_texts(root)
    for text in texts:
        for index, line in outside_code(text):
            if line.lstrip().startswith("--8<--"):
                continue
            for match in FIGURE.finditer(line):
                problems.append(
                    f"{text.at(index, root)}: '{match[0].strip()}' is written by hand; let a "
                    "snippet print it, or say which way and why instead of how much"
                )
    return Result(f"{len(texts)} pages and docstrings", problems)
