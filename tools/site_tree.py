"""Looks at a built, versioned site as a browser would: which files a page points at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED_BY = {"script": "src", "img": "src", "link": "href", "source": "src", "iframe": "src"}


@dataclass(frozen=True)
class Reference:
    """One address on a page."""

    tag: str
    address: str
    relation: str

    @property
    def is_load(self) -> bool:
        """Whether a browser fetches it without being asked."""
        return self.tag in LOADED_BY and self.relation not in {"canonical", "prev", "next"}


class _References(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Reference] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get("href" if tag == "a" else LOADED_BY.get(tag, ""))
        if address:
            self.found.append(Reference(tag, address, given.get("rel") or ""))


def references(page: Path) -> list[Reference]:
    """Return every address that the page links to or loads."""
    parser = _References()
    parser.feed(page.read_text())
    return parser.found


def pages(version: Path) -> list[Path]:
    """Return a version's pages; 404.html is none, since a server shows it at any address."""
    return sorted(page for page in version.rglob("*.html") if page.name != "404.html")


def _target(page: Path, address: str) -> Path:
    path = unquote(urlsplit(address).path)
    if not path:
        return page
    target = (page.parent / path).resolve()
    return target / "index.html" if path.endswith(("/", ".", "..")) else target


def faults(version: Path) -> Iterator[str]:
    """Yield each address that leaves this version, leads nowhere in it, or loads from elsewhere."""
    version = version.resolve()
    for page in pages(version):
        shown = page.relative_to(version.parent)
        for reference in references(page):
            address = urlsplit(reference.address)
            if address.scheme or address.netloc:
                if reference.is_load and address.scheme != "data":
                    yield f"{shown} loads from elsewhere: {reference.address}"
                continue
            if reference.address.startswith("/"):
                yield f"{shown} points at the top of the server: {reference.address}"
                continue
            target = _target(page, reference.address)
            if not target.is_relative_to(version):
                yield f"{shown} leaves its version: {reference.address}"
            elif not target.is_file():
                yield f"{shown} points at nothing: {reference.address}"


def listed_versions(tree: Path) -> dict[str, list[str]]:
    """Return what the version selector will show: each version with its aliases."""
    entries = json.loads((tree / "versions.json").read_text())
    return {entry["version"]: entry["aliases"] for entry in entries}
