"""Is the built site whole: links, anchors, ids, images, and nothing loaded from elsewhere?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tools.checks.result import Result
from tools.paths import shown

LOADED = {
    ("img", "src"),
    ("script", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("video", "src"),
    ("audio", "src"),
    ("embed", "src"),
    ("object", "data"),
    ("use", "href"),
    ("image", "href"),
}
QUIET_LINKS = {"canonical", "alternate", "prev", "next", "author", "license"}
CSS_LOAD = re.compile(r"""(?:url\(\s*['"]?|@import\s+['"])\s*((?:https?:)?//[^'")\s]+)""")


# A table or list made from a section has the title alone; running text goes on behind it.
RAW_SECTION = re.compile(
    r"\s*((?:Args|Attributes|Returns|Yields|Raises|Examples?|Tip(?:: [^\n]*)?):)\s*\n\s*\S"
)


@dataclass
class Page(HTMLParser):
    """What one HTML file refers to and offers."""

    path: Path
    ids: list[str] = field(default_factory=list)
    links: list[tuple[int, str]] = field(default_factory=list)
    loads: list[tuple[int, str]] = field(default_factory=list)
    headings: list[tuple[int, int]] = field(default_factory=list)
    raw_sections: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Read the file."""
        super().__init__(convert_charrefs=True)
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note ids, links, loads and headings."""
        line = self.getpos()[0]
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.ids.append(values["id"])
        if tag == "a" and "href" in values:
            self.links.append((line, values["href"]))
        if tag == "link" and "href" in values:
            quiet = QUIET_LINKS & set(values.get("rel", "").split())
            (self.links if quiet else self.loads).append((line, values["href"]))
        for name, value in values.items():
            if (tag, name) in LOADED:
                self.loads.append((line, value))
            if name == "srcset":
                self.loads += [(line, part.split()[0]) for part in value.split(",") if part.strip()]
            if name == "style":
                self.loads += [(line, url) for url in CSS_LOAD.findall(value)]
        if re.fullmatch("h[1-6]", tag):
            self.headings.append((line, int(tag[1])))

    def handle_data(self, data: str) -> None:
        """Note sections of a docstring that were not understood as such."""
        if match := RAW_SECTION.match(data):
            self.raw_sections.append((self.getpos()[0], match[1]))


def check_links(root: Path) -> Result:
    """Check every reference of the built site, as a browser would follow it."""
    site = root / "build" / "site"
    # 404.html is served at any depth, so its links are absolute on purpose.
    pages = {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    if not pages:
        return Result("0 pages", ["build/site:1: there is no built site; run the build first"])
    problems: list[str] = []
    count = 0
    for page in pages.values():
        count += len(page.links) + len(page.loads)
        problems += [
            f"{shown(page.path, root)}:{line}: {text}" for line, text in faults(page, pages)
        ]
    problems += list(stylesheet_faults(site, root))
    return Result(f"{count} references on {len(pages)} pages", problems)


def faults(page: Page, pages: dict[Path, Page]) -> Iterator[tuple[int, str]]:
    """Yield line and text of every fault of one page."""
    for name, times in Counter(page.ids).items():
        if times > 1:
            yield 1, f"id '{name}' appears {times} times; a link to it is ambiguous"
    for line, url in page.links:
        yield from ((line, fault) for fault in link_faults(page, url, pages))
    for line, url in page.loads:
        if is_elsewhere(url):
            yield line, f"loads {url}; the reader's browser must not ask another host"
        else:
            yield from ((line, fault) for fault in link_faults(page, url, pages))
    yield from heading_faults(page)
    for line, section in page.raw_sections:
        yield line, f"shows '{section}' as plain text; put a blank line before it in the docstring"


def heading_faults(page: Page) -> Iterator[tuple[int, str]]:
    """A page has one first-level heading and skips no level below it."""
    if sum(level == 1 for _, level in page.headings) != 1:
        yield 1, "a page needs exactly one first-level heading"
    for (_, above), (line, level) in zip(page.headings, page.headings[1:], strict=False):
        if level > above + 1:
            yield line, f"a heading of level {level} follows one of level {above}"


def is_elsewhere(url: str) -> bool:
    """Tell whether a URL names another host."""
    parts = urlsplit(url)
    return bool(parts.netloc) or parts.scheme in ("http", "https")


def link_faults(page: Page, url: str, pages: dict[Path, Page]) -> Iterator[str]:
    """Yield what is wrong with one reference within the site."""
    parts = urlsplit(url)
    if is_elsewhere(url) or parts.scheme in ("mailto", "data"):
        return
    if parts.path.startswith("/"):
        yield f"{url} is absolute, and leads out of this version of the site; make it relative"
        return
    target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
    if target.is_dir():
        target = target / "index.html"
    if not target.exists():
        yield f"{url} leads nowhere; mend the link in the page's source"
        return
    known = pages.get(target)
    anchor = unquote(parts.fragment)
    if anchor and known is not None and anchor not in known.ids and anchor != "__tabbed":
        yield f"{url}: the page has no anchor '{anchor}'; was a heading renamed?"


def stylesheet_faults(site: Path, root: Path) -> Iterator[str]:
    """Yield what stylesheets load from other hosts."""
    for path in sorted(site.rglob("*.css")):
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
            for url in CSS_LOAD.findall(line):
                yield f"{shown(path, root)}:{number}: loads {url[:80]} from another host"
