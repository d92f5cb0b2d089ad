"""Where things are in the repository, and how a path is shown to a reader."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The folder that holds `fsdp_ref`, `snippets`, `site` and `tools`."""


def pages(root: Path) -> list[Path]:
    """Return the hand-written Markdown pages of the site, in a fixed order."""
    generated = root / "site" / "generated"
    found = sorted((root / "site").rglob("*.md"))
    return [page for page in found if generated not in page.parents]


def sources(root: Path) -> list[Path]:
    """Return the Python files of the package, in a fixed order."""
    return sorted((root / "fsdp_ref").rglob("*.py"))


def shown(path: Path, root: Path) -> str:
    """Return the path as a reader of the repository would type it."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
