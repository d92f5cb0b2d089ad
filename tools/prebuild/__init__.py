"""Generated pages and tables: everything under `site/generated`.

`python -m tools.prebuild` runs before every build of the site. The folder is ignored by git;
nothing in it is edited by hand. The result depends on the sources alone: no dates, no order
left to chance.
"""

from __future__ import annotations

from pathlib import Path

from tools import docstrings, wheel
from tools.prebuild import attributes, fragments, group_figures, tables, tips, who_calls
from tools.prebuild.writer import Generated
from tools.snippet_files import read_all
from tools.steps import charts, figure, one_step


def prebuild(root: Path, *, fresh: bool = False) -> list[str]:
    """Bring `site/generated` in line with the sources.

    Args:
        root: The repository.
        fresh: Repeat recorded runs instead of taking them from `build/cache`.

    Returns:
        The paths below `site/generated` that changed.

    Raises:
        PrebuildError: If something that a page needs cannot be generated.
        SnippetError: If a snippet's docstring lacks its command or promise.
    """
    output = Generated()
    snippets = read_all(root)
    package = docstrings.load(root)
    fragments.generate(snippets, root, output)
    tips.generate(docstrings.tips(package), snippets, root, output)
    tables.generate(package, root, output)
    who_calls.generate(package, root, output)
    attributes.generate(snippets, root, output, fresh=fresh)
    group_figures.generate(snippets, root, output, fresh=fresh)
    ways = figure.generate(root, output, fresh=fresh)
    charts.generate(ways, output)
    one_step.generate(ways, output)
    for path, content in wheel.offer(root).items():
        output.add(path, content)
    return output.write(root / "site" / "generated")
