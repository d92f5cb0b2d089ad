"""Runs whose output becomes part of a page, kept in `build/cache` while nothing changed.

The key is a hash of the snippet, of the package's sources and of torch's version. Building the
site uses the cache; `docs-test` runs everything again. While somebody edits live, the last
recording is good enough.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from pathlib import Path

from tools.paths import shown, sources
from tools.prebuild.fragments import PrebuildError
from tools.running import LIMIT_SECONDS, Run, package_folder, run_literally
from tools.snippet_files import Snippet


def key(snippet: Snippet, root: Path) -> str:
    """Hash all that a run's output may depend on."""
    digest = hashlib.sha256(importlib.metadata.version("torch").encode())
    for path in [snippet.path, *sources(root)]:
        digest.update(shown(path, root).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kept(cache: Path, pattern: str, *, fresh: bool) -> Path | None:
    """Return the file of a recording that may be used in place of a run, if there is one.

    Args:
        cache: Where the recording is kept while nothing that it depends on has changed.
        pattern: Matches the names of recordings of the same thing in the same folder.
        fresh: Whether to use none.
    """
    if fresh:
        return None
    older = sorted(cache.parent.glob(pattern)) if os.environ.get("FSDP_REF_LIVE") else []
    return next((path for path in (cache, *older) if path.exists()), None)


def recorded_output(snippet: Snippet, root: Path, *, fresh: bool) -> list[str]:
    """Return what a snippet prints on this machine's CPU.

    Args:
        snippet: The file.
        root: The repository.
        fresh: Run it even when its output is in the cache.

    Returns:
        The printed lines.

    Raises:
        PrebuildError: If the run fails.
    """
    cache = root / "build" / "cache" / f"{snippet.name}-{key(snippet, root)[:16]}.txt"
    if found := kept(cache, f"{snippet.name}-*.txt", fresh=fresh):
        return found.read_text(encoding="utf-8").splitlines()
    with package_folder(root) as package:
        run = Run(snippet, "gloo", literal=True)
        outcome = run_literally(run, package, LIMIT_SECONDS)
    # An abort while Python shuts down comes after everything was printed.
    if outcome.code != 0 and not outcome.aborted_at_exit:
        told = "\n".join(outcome.errors.values())
        raise PrebuildError(f"{shown(snippet.path, root)}:1: the recorded run failed:\n{told}")
    cache.parent.mkdir(parents=True, exist_ok=True)
    for old in cache.parent.glob(f"{snippet.name}-*.txt"):
        old.unlink()
    cache.write_text("\n".join(outcome.printed) + "\n", encoding="utf-8")
    return outcome.printed
