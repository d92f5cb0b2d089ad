"""Takes out of the built site what no reader sees, so that a page loads in one go.

MkDocs calls `on_post_page` for every page and `on_post_build` at the end (`hooks:` in mkdocs.yml).
Nothing depends on it: without it the pages look the same and are larger.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

PLAIN = re.compile(r'<span class="(?:n|w|p|o|err|normal)">([^<]*)</span>')
"""Names, blanks, brackets and operators, which have the colour of plain code."""

SOURCE = re.compile(r'<details class="mkdocstrings-source">.*?</details>', re.DOTALL)
LINK = re.compile(r'(<a class="autorefs autorefs-internal") title="[^"]*" href=')
"""A link to a name, whose title repeats the name in full."""

SPAN = re.compile(r"</?span[^>]*>")
WHOLE_CLASS = re.compile(r"<code>(?:@\w[^\n]*\n)*class \w")
LONG_CLASS = 60
VERBATIM = re.compile(r"(<(pre|textarea|script|style|svg)\b.*?</\2>)", re.DOTALL | re.IGNORECASE)
INDENT = re.compile(r"\n\s+(?=<|\Z)")
CLASS_NAME = re.compile(r"\.([a-zA-Z][\w-]*)")


def on_post_page(output: str, **_: Any) -> str:
    """Return the page without marks that change nothing and without indentation.

    Args:
        output: The page as HTML.

    Returns:
        The page; what stands in `pre` keeps every character.
    """
    output = PLAIN.sub(r"\1", output)
    output = LINK.sub(r"\1 href=", output)
    output = SOURCE.sub(lambda found: lean_source(found[0]), output)
    parts = VERBATIM.split(output)  # in turn: text, a verbatim element, that element's name
    kept = []
    for index, part in enumerate(parts):
        if index % 3 == 0:
            kept.append(INDENT.sub("\n", part))
        elif index % 3 == 1:
            kept.append(part)
    return "".join(kept)


def lean_source(details: str) -> str:
    """Return the source of one object without colours; nothing for a long class.

    Each method of such a class shows its own source a little further down.
    """
    plain = SPAN.sub("", details)
    is_class = WHOLE_CLASS.search(plain) is not None
    return "" if is_class and plain.count("\n") > LONG_CLASS else plain


def on_post_build(config: Any, **_: Any) -> None:
    """Take rules out of the theme's style sheet that apply to no page of this site.

    Args:
        config: MkDocs' configuration.
    """
    site = Path(config["site_dir"])
    scripts = "".join(path.read_text("utf-8") for path in site.rglob("*.js"))
    names: set[str] = set()
    for page in site.rglob("*.html"):
        for found in re.findall(r'class="([^"]*)"', page.read_text("utf-8")):
            names.update(found.split())
    for sheet in (site / "assets" / "stylesheets").glob("main.*.css"):
        text = sheet.read_text("utf-8")
        unused = {name for name in CLASS_NAME.findall(text) if name not in names}
        unused = {name for name in unused if name not in scripts}
        sheet.write_text("".join(used_rules(text, unused)), "utf-8")


def used_rules(text: str, unused: Set[str]) -> Iterator[str]:
    """Yield the rules of a style sheet, those inside `@media` too, that can apply to something.

    Args:
        text: The sheet, with nothing between its rules.
        unused: Names of classes that nothing has.
    """
    for rule in rules(text):
        head, _, inside = rule.partition("{")
        if head.startswith(("@media", "@supports")):
            kept = "".join(used_rules(inside.removesuffix("}"), unused))
            if kept:
                yield f"{head}{{{kept}}}"
        elif head.startswith("@") or any(can_apply(one, unused) for one in head.split(",")):
            yield rule


def can_apply(selector: str, unused: Set[str]) -> bool:
    """Say whether every class that the selector asks for exists; in doubt, yes."""
    return "(" in selector or unused.isdisjoint(CLASS_NAME.findall(selector))


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
