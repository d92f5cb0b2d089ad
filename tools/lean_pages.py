"""Takes out of the built site what no reader sees, so that a page loads in one go.

MkDocs calls `on_post_page` for every page (`hooks:` in mkdocs.yml).
Nothing depends on it: without it the pages look the same and are larger.
"""

from __future__ import annotations

import re
from typing import Any

PLAIN = re.compile(r'<span class="(?:n|w|p|o|err|normal)">([^<]*)</span>')
"""Names, blanks, brackets and operators, which have the colour of plain code."""

COLOURED = re.compile(r'<span class="([a-z][a-z0-9]?)">([^<]*)</span>')
"""A piece of code with a colour of its own."""

SAME_AGAIN = re.compile(r"<i class=(\w+)>([^<]*)</i>((?:<i class=\1>[^<]*</i>)+)")
BETWEEN = re.compile(r"</?i[^>]*>")

SOURCE = re.compile(r'<details class="mkdocstrings-source">.*?</details>', re.DOTALL)
LINK = re.compile(r'(<a class="autorefs autorefs-internal") title="[^"]*" href=')
"""A link to a name, whose title repeats the name in full."""

SPAN = re.compile(r"</?span[^>]*>")
WHOLE_CLASS = re.compile(r"<code>(?:@\w[^\n]*\n)*class \w")
LONG_CLASS = 60
VERBATIM = re.compile(r"(<(pre|textarea|script|style|svg)\b.*?</\2>)", re.DOTALL | re.IGNORECASE)
INDENT = re.compile(r"\n\s+")


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
    output = COLOURED.sub(r"<i class=\1>\2</i>", output)
    output = SAME_AGAIN.sub(
        lambda found: f"<i class={found[1]}>{found[2]}{BETWEEN.sub('', found[3])}</i>", output
    )
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
