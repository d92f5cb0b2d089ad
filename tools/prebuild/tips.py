"""The Tips page: every `Tip:` section of the package, each with its proof's output."""

from __future__ import annotations

from pathlib import Path

from tools.docstrings import Tip
from tools.prebuild.fragments import anchor, by_folder, homes, link_to
from tools.prebuild.writer import Generated
from tools.snippet_files import Snippet


def generate(tips: list[Tip], snippets: list[Snippet], root: Path, output: Generated) -> None:
    """Add the fragment with all tips, grouped by module.

    Args:
        tips: All tips of the package.
        snippets: All snippet files.
        root: The repository.
        output: Where the files are collected.
    """
    groups = by_folder(snippets)
    found = homes(root, groups)
    page = root / "site" / "guides" / "tips.md"
    lines: list[str] = []
    module = None
    for tip in tips:
        if tip.obj.module.path != module:
            module = tip.obj.module.path
            lines += [f"## `{module}`", ""]
        lines += [f"### {tip.title.rstrip('.')} {{ #{tip.anchor} }}", "", tip.claim, ""]
        lines += [f"From the docstring of [{short(tip)}][{tip.obj.path}].", ""]
        group = groups.get(tip.proof or "")
        if group:
            lines += proof(tip, group[0], found, root, page)
    output.add("tips.md", "\n".join(lines).rstrip() + "\n" if lines else "\n")


def short(tip: Tip) -> str:
    """Name the object that gives the tip as a reader would write it."""
    return f"`{tip.obj.path.removeprefix('fsdp_ref.')}`"


def proof(tip: Tip, snippet: Snippet, found: dict[str, Path], root: Path, page: Path) -> list[str]:
    """Write a tip's proof: a link to the snippet and what it prints."""
    name = f"`{tip.proof}`"
    if tip.proof in found:
        home = found[tip.proof]
        base = "" if home == page else link_to(home, root, page)
        name = f"[{tip.proof}]({base}#{anchor(snippet)})"
    return [f"Proof: {name} prints", "", "```text", *snippet.promise, "```", ""]
