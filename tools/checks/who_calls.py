"""Does every public docstring say who must call?"""

from __future__ import annotations

from pathlib import Path

from tools import docstrings
from tools.checks.docstring_form import resolve
from tools.checks.result import Result
from tools.prebuild.who_calls import calls


def check_who_calls(root: Path) -> Result:
    """Check that each public function that has to do with ranks says who calls it."""
    package = docstrings.load(root)
    found = calls(root, package)
    problems = []
    for call in found:
        if call.kind is None:
            obj = resolve(call.path, package)
            where = docstrings.place(obj, root) if obj else call.path
            problems.append(
                f"{where}: {call.path} does not say who must call it; above `Args:`, begin a "
                "sentence with 'Collective', 'Every rank', 'Not collective', 'Local' or "
                "'Needs no ranks'"
            )
    return Result(f"{len(found)} functions", problems)
