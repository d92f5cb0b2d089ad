"""The command line of the prebuild: `python -m tools.prebuild [--fresh]`."""

from __future__ import annotations

import sys

from tools.paths import ROOT
from tools.prebuild import prebuild
from tools.prebuild.fragments import PrebuildError
from tools.snippet_files import SnippetError


def main() -> int:
    """Generate; print what changed, or what stands in the way."""
    try:
        changed = prebuild(ROOT, fresh="--fresh" in sys.argv[1:])
    except (PrebuildError, SnippetError, RuntimeError) as error:
        print(f"FAIL {error}")
        return 1
    print(f"site/generated: {len(changed)} files changed")
    for path in changed:
        print(f"  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
