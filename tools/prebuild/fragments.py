"""Snippets as the pages show them: three linked tabs, one per API.

A fragment is included by exactly the pages that name it, so its links are written for the
folder of those pages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from tools.paths import pages, shown
from tools.prebuild.writer import Generated
from tools.snippet_files import APIS, Snippet

INCLUDED = re.compile(
    r'^\s*--8<-- "site/generated/snippets/(?P<key>[\w/-]+)\.md"\s*$', re.MULTILINE
)


class PrebuildError(Exception):
    """Something that a page needs cannot be generated."""


def by_folder(snippets: Iterable[Snippet]) -> dict[str, list[Snippet]]:
    """Group snippet files by folder; each group in the order of the tabs."""
    groups: dict[str, list[Snippet]] = {}
    for snippet in snippets:
        groups.setdefault(snippet.key, []).append(snippet)
    return {key: sorted(group, key=lambda s: APIS.index(s.api)) for key, group in groups.items()}


def homes(root: Path, keys: Iterable[str]) -> dict[str, Path]:
    """Find the page that shows each snippet.

    Args:
        root: The repository.
        keys: The snippets, as `page/name`.

    Returns:
        The including page per snippet; snippets on no page are absent.

    Raises:
        PrebuildError: If a page includes a snippet that does not exist, or two pages show one.
    """
    known = set(keys)
    found: dict[str, Path] = {}
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        for match in INCLUDED.finditer(text):
            line = text.count("\n", 0, match.start("key")) + 1
            where = f"{shown(page, root)}:{line}"
            key = match["key"]
            wanted = [k for k in sorted(known) if k.startswith(key.removesuffix("all"))]
            members = wanted if key.endswith("/all") else [key]
            if not members or not known.issuperset(members):
                raise PrebuildError(f"{where}: there is no snippet {key}; see snippets/")
            for member in members:
                if member in found:
                    other = shown(found[member], root)
                    raise PrebuildError(
                        f"{where}: {member} is shown on {other} already; link to it"
                    )
                found[member] = page
    return found


def anchor(snippet: Snippet) -> str:
    """The anchor of a snippet's heading on its page."""
    return snippet.name.replace("_", "-")


def link_to(page: Path, root: Path, start: Path) -> str:
    """Return the relative link from the page `start` to `page`, both below `site`."""
    return Path(os.path.relpath(page, start.parent)).as_posix()


def fragment(group: list[Snippet], root: Path, page: Path) -> str:
    """Write the fragment of one snippet folder.

    Args:
        group: The folder's files, in the order of the tabs.
        root: The repository.
        page: The page that includes the fragment.

    Returns:
        Markdown: heading, why, and one tab per API.
    """
    first = group[0]
    parts = [f"## {first.title.rstrip('.')} {{ #{anchor(first)} }}", first.why, agreement(group)]
    parts += [tab(snippet, root, page, beside=first.why) for snippet in group]
    return "\n\n".join(part for part in parts if part) + "\n"


def agreement(group: list[Snippet]) -> str:
    """Say whether the three APIs print the same."""
    if len(group) < len(APIS):
        return ""
    first, *others = group
    equal = [first.api] + [other.api for other in others if other.promise == first.promise]
    different = [other.api for other in others if other.api not in equal]
    if not different:
        return "All three versions print the same."
    if len(equal) == 1:
        return "The three versions print different things: compare the tabs."
    return f"{' and '.join(equal)} print the same; {' and '.join(different)} prints something else."


def tab(snippet: Snippet, root: Path, page: Path, *, beside: str) -> str:
    """Write one tab: what is special about it, code by path, command, promised output, download.

    Args:
        snippet: The file.
        root: The repository.
        page: The page that includes the fragment.
        beside: What stands above all tabs, and is not repeated.

    Returns:
        Markdown.
    """
    download = root / "site" / "generated" / "downloads" / snippet.page / snippet.path.name
    target = link_to(download, root, page)
    button = f'{{ download="{snippet.path.name}" .md-button }}'
    own = [snippet.why, *snippet.notes] if snippet.why != beside else snippet.notes
    body = [
        *(line for note in own for line in (note, "")),
        f'```python title="{snippet.path.name}"',
        f'--8<-- "{shown(snippet.path, root)}:body"',
        "```",
        "",
        f'```shell title="{"Run it" if snippet.nodes == 1 else "Run it on each host"}"',
        *command_lines(snippet.command),
        "```",
        "",
        '```text title="It prints"',
        *snippet.promise,
        "```",
        "",
        f"[Download {snippet.path.name}]({target}){button}",
    ]
    return "\n".join([f'=== "{snippet.api}"', "", *(f"    {line}".rstrip() for line in body)])


def command_lines(command: str) -> list[str]:
    """Return a command for several hosts in two lines, as a shell reads them; others in one."""
    first, options, rest = command.partition(" --rdzv-backend")
    return [f"{first} \\", f"   {options}{rest}"] if options else [command]


def index(groups: dict[str, list[Snippet]], root: Path, found: dict[str, Path]) -> str:
    """Write the table of all snippets.

    Args:
        groups: All snippet folders.
        root: The repository.
        found: The page that shows each.

    Returns:
        Markdown: one table per page, a row per snippet.
    """
    start = root / "site" / "reference" / "snippets.md"
    lines: list[str] = []
    last = None
    for key, group in groups.items():
        first = group[0]
        if first.page != last:
            last = first.page
            lines += ["", f"## {heading(first.page)}", "", *table_head()]
        name = first.title.rstrip(".")
        if key in found:
            name = f"[{name}]({link_to(found[key], root, start)}#{anchor(first)})"
        apis = "<br>".join(snippet.api for snippet in group)
        count = f"{first.ranks}"
        lines.append(f"| {name} | `{first.command}` | {count} | {apis} |")
    return "\n".join(lines).strip() + "\n"


def table_head() -> list[str]:
    """The head of the snippet table."""
    return ["| Snippet | Command | Processes | Versions for |", "|---|---|---|---|"]


def heading(page: str) -> str:
    """Turn a snippet page's folder name into a heading."""
    return page.replace("_", " ").capitalize()


def generate(snippets: list[Snippet], root: Path, output: Generated) -> None:
    """Add every fragment, the index and the downloads.

    Args:
        snippets: All snippet files.
        root: The repository.
        output: Where the files are collected.
    """
    groups = by_folder(snippets)
    found = homes(root, groups)
    everything: dict[str, list[str]] = {}
    for key, group in groups.items():
        page = found.get(key)
        if page is not None:
            text = fragment(group, root, page)
            output.add(f"snippets/{key}.md", text)
            everything.setdefault(group[0].page, []).append(text)
        for snippet in group:
            output.add(f"downloads/{snippet.page}/{snippet.path.name}", snippet.path.read_bytes())
    for name, texts in everything.items():
        output.add(f"snippets/{name}/all.md", "\n".join(texts))
    output.add("snippet_index.md", index(groups, root, found))
