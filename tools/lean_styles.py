"""Takes out of the theme's style sheets what applies to no page of the built site.

MkDocs calls `on_post_build` at the end (`hooks:` in mkdocs.yml). A rule goes when a class, a colour
or a number of tabs that it asks for does not occur, or when it is for scripts written from right to
left. Then go variables that nothing reads. In doubt, all stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLASS_NAME = re.compile(r"\.([a-zA-Z][\w-]*)")
COLOUR = re.compile(r"\[data-md-color-(?:primary|accent|scheme)=([\w-]+)\]")
COLOUR_OF_A_PAGE = re.compile(r'data-md-color-(?:primary|accent|scheme)="([\w-]+)"')
NTH_TAB = re.compile(r"tabbed.*:nth(?:-last)?-child\((\d+)\)")
INNERMOST = re.compile(r"\([^()]*\)")
DECLARED = re.compile(r"""(--[\w-]+):(?:'[^']*'|"[^"]*"|[^;}'"])*;?""")
READ = re.compile(r"--[a-zA-Z][\w-]*")
PUT_TOGETHER = re.compile(r"([a-zA-Z][\w-]*-)\$\{")
"""The beginning of a class whose end a script adds, such as `tabbed-control--${side}`."""
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True)
class Needless:
    """What no page has.

    Attributes:
        classes: Names that sheets use and nothing has.
        colours: Values of the attributes that choose colours.
        tabs: The largest number of tabs in one place.
    """

    classes: Set[str]
    colours: Set[str] = frozenset()
    tabs: int = 99


def on_post_build(config: Any, **_: Any) -> None:
    """Rewrite the style sheets of the built site.

    Args:
        config: MkDocs' configuration.
    """
    site = Path(config["site_dir"])
    pages = "".join(path.read_text("utf-8") for path in site.rglob("*.html"))
    scripts = "".join(path.read_text("utf-8") for path in site.rglob("*.js"))
    theme = sorted((site / "assets" / "stylesheets").glob("*.css"))
    sheets = {path: path.read_text("utf-8") for path in theme}
    needless = what_is_needless("".join(sheets.values()), pages, scripts)
    sheets = {path: "".join(used_rules(text, needless)) for path, text in sheets.items()}
    own = {path: path.read_text("utf-8") for path in site.rglob("*.css") if path not in sheets}
    own = {path: re.sub(r"\n\s*", "\n", COMMENT.sub("", text)) for path, text in own.items()}
    sheets = without_unread(sheets, "".join(own.values()) + pages + scripts)
    for path, text in {**sheets, **own}.items():
        path.write_text(text, "utf-8")


def what_is_needless(sheets: str, pages: str, scripts: str) -> Needless:
    """Compare what sheets ask for with what pages have and scripts may add."""
    had: set[str] = set()
    for found in re.findall(r'class="([^"]*)"', pages):
        had.update(found.split())
    beginnings = tuple(set(PUT_TOGETHER.findall(scripts)))
    classes = {name for name in CLASS_NAME.findall(sheets) if name not in had}
    return Needless(
        {name for name in classes if name not in scripts and not name.startswith(beginnings)},
        set(COLOUR.findall(sheets)) - set(COLOUR_OF_A_PAGE.findall(pages)),
        max((int(tabs) for tabs in re.findall(r'data-tabs="\d+:(\d+)"', pages)), default=0),
    )


def used_rules(text: str, needless: Needless) -> Iterator[str]:
    """Yield the rules of a style sheet, those inside `@media` too, that can apply to something.

    Args:
        text: The sheet, with nothing between its rules.
        needless: What nothing has.
    """
    for rule in rules(text):
        head, _, inside = rule.partition("{")
        if head.startswith(("@media", "@supports")):
            kept = "".join(used_rules(inside.removesuffix("}"), needless))
            if kept:
                yield f"{head}{{{kept}}}"
        elif head.startswith("@") or not inside:
            yield rule
        elif selectors := [one for one in split(head) if can_apply(one, needless)]:
            yield f"{','.join(selectors)}{{{inside}"


def split(selectors: str) -> list[str]:
    """Return what stands between those commas that are in no bracket."""
    found, depth = [""], 0
    for character in selectors:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return found


def can_apply(selector: str, needless: Needless) -> bool:
    """Say whether all that a selector asks for exists; what it asks in brackets is let pass."""
    if any(int(number) > needless.tabs for number in NTH_TAB.findall(selector)):
        return False
    while INNERMOST.search(selector):
        selector = INNERMOST.sub("", selector)
    return (
        "[dir=rtl]" not in selector
        and needless.classes.isdisjoint(CLASS_NAME.findall(selector))
        and needless.colours.isdisjoint(COLOUR.findall(selector))
    )


def without_unread(sheets: dict[Path, str], others: str) -> dict[Path, str]:
    """Return the sheets without variables that neither they nor the other texts read."""
    while True:
        values = "".join(DECLARED.sub(value_of, text) for text in sheets.values())
        read = frozenset(READ.findall(values + others))
        lean = {path: without(text, read) for path, text in sheets.items()}
        if lean == sheets:
            return lean
        sheets = lean


def value_of(declared: re.Match[str]) -> str:
    """Return a declaration's value, which may read other variables."""
    return declared[0].partition(":")[2]


def without(text: str, read: Set[str]) -> str:
    """Return a sheet without the declarations of variables that are not read."""
    return DECLARED.sub(lambda found: found[0] if found[1] in read else "", text)


def rules(text: str) -> Iterator[str]:
    """Yield the outermost rules of a style sheet; what follows the last one as well."""
    depth = start = 0
    for position, character in enumerate(text):
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                yield text[start : position + 1]
                start = position + 1
    if text[start:]:
        yield text[start:]
