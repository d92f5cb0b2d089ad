"""Builds the wheel of `fsdp_ref` that a version of the site offers for download.

The pages of a version were tested with exactly this code, so a reader who installs it gets what
the pages show.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

SITE_VERSION = "FSDP_REF_SITE_VERSION"
"""Environment variable that names the version of the site being built; `dev` where it is unset."""

METADATA = ("pyproject.toml", "README.md", "LICENSE")
FIXED_TIME = "1767225600"  # the same sources give the same bytes, whenever they are built

OFFER = """\
[Download the wheel](generated/wheel/{name}){{ download="{name}" .md-button }}

```shell
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


def packed_files(root: Path) -> list[Path]:
    """Return the files that decide what is in the wheel, in a fixed order."""
    package = [path for path in (root / "fsdp_ref").rglob("*") if path.suffix in {".py", ".typed"}]
    return sorted([*package, *(root / name for name in METADATA)])


def build(root: Path, version: str, folder: Path) -> Path:
    """Build the wheel of `root` under this version into `folder` and return its path."""
    with tempfile.TemporaryDirectory() as temporary:
        # From a copy: setuptools leaves a build/lib behind, and would pack deleted modules from it.
        copy, made = Path(temporary) / "source", Path(temporary) / "made"
        for path in packed_files(root):
            target = copy / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        metadata = copy / "pyproject.toml"
        stated = f'version = "{project_version(root)}"'
        metadata.write_text(metadata.read_text().replace(stated, f'version = "{version}"', 1))
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
        return Path(shutil.copy(wheel, folder / wheel.name))


def cached(root: Path, version: str) -> Path:
    """Return the wheel from `build/cache`, where it is kept under a hash of all that is in it."""
    digest = hashlib.sha256(version.encode())
    for path in packed_files(root):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    folder = root / "build" / "cache" / "wheel" / digest.hexdigest()[:16]
    found = list(folder.glob("*.whl"))
    return found[0] if found else build(root, version, folder)


def offer(root: Path) -> dict[str, bytes]:
    """Return what the site needs to offer the wheel, by path below `site/generated`.

    Returns:
        The wheel, and `wheel.md`: lines to include on a page that lies directly in `site/`, since
        their link is relative.
    """
    version = wheel_version(project_version(root), os.environ.get(SITE_VERSION, "dev"))
    wheel = cached(root, version)
    text = OFFER.format(name=wheel.name)
    return {f"wheel/{wheel.name}": wheel.read_bytes(), "wheel.md": text.encode()}
