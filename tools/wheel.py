"""Builds the wheel of `fsdp_ref` that a version of the site offers for download.

    python -m tools.wheel

The pages of a version were tested with exactly this code, so a reader who installs it gets what
the pages show. The wheel and a line of Markdown that offers it are written to
`site/generated/wheel/`, and only when they changed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from tools.paths import ROOT, shown

SITE_VERSION = "FSDP_REF_SITE_VERSION"
"""Environment variable that names the version of the site being built; `dev` where it is unset."""

SOURCES = ("pyproject.toml", "README.md", "LICENSE")
FIXED_TIME = "1767225600"  # the same sources give the same bytes, whenever they are built

OFFER = """\
[Download the wheel](generated/wheel/{name}){{ download="{name}" .md-button }}

```console
pip install ./{name}
```
"""


def project_version(root: Path) -> str:
    """Return the version that pyproject.toml states."""
    return str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])


def wheel_version(stated: str, site_version: str) -> str:
    """Return the wheel's version: the stated one on a release's pages, else with a `+label`.

    Two versions of the site must not offer different code under one name, or pip would take the
    second for the first.
    """
    if site_version == stated:
        return stated
    label = re.sub(r"[^a-z0-9]+", ".", site_version.lower()).strip(".")
    return f"{stated}+{label}"


def build(root: Path, folder: Path, version: str) -> Path:
    """Build the wheel of `root` under this version into `folder` and return its path."""
    with tempfile.TemporaryDirectory() as temporary:
        # From a copy: setuptools leaves a build/lib behind, and would pack deleted modules from it.
        copy = Path(temporary) / "source"
        shutil.copytree(
            root / "fsdp_ref", copy / "fsdp_ref", ignore=shutil.ignore_patterns("__pycache__")
        )
        for name in SOURCES:
            shutil.copy(root / name, copy / name)
        metadata = copy / "pyproject.toml"
        stated = f'version = "{project_version(root)}"'
        metadata.write_text(metadata.read_text().replace(stated, f'version = "{version}"', 1))
        made = Path(temporary) / "made"
        options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(made))
        done = subprocess.run(
            [sys.executable, "-m", "pip", "wheel", *options, str(copy)],
            env={**os.environ, "SOURCE_DATE_EPOCH": FIXED_TIME},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the wheel could not be built:\n{done.stdout}{done.stderr}")
        (wheel,) = made.glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return _replace_if_different(folder / wheel.name, wheel.read_bytes())


def _replace_if_different(path: Path, content: bytes) -> Path:
    if not path.is_file() or path.read_bytes() != content:
        path.write_bytes(content)
    return path


def offer(root: Path) -> Path:
    """Put the wheel and the lines that offer it where the site's pages find them.

    Returns:
        The wheel, in `site/generated/wheel/`. The lines are in `site/generated/wheel.md`, to be
        included on a page that lies directly in `site/`, since their link is relative.
    """
    folder = root / "site" / "generated" / "wheel"
    version = wheel_version(project_version(root), os.environ.get(SITE_VERSION, "dev"))
    wheel = build(root, folder, version)
    for other in folder.iterdir():
        if other != wheel:
            other.unlink()
    text = OFFER.format(name=wheel.name)
    _replace_if_different(folder.parent / "wheel.md", text.encode())
    return wheel


if __name__ == "__main__":
    print(f"wrote {shown(offer(ROOT), ROOT)}")
