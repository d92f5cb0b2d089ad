"""The inventory through which our pages link to torch's documentation, without a network.

`python -m tools.prebuild.inventory` writes `inventories/torch.inv` from `torch_names.txt`.
The file is committed, and `docs-test` compares it with what would be written.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import zlib
from pathlib import Path

from tools.paths import ROOT, shown

NAMES = Path("tools/prebuild/torch_names.txt")
INVENTORY = Path("inventories/torch.inv")
HEADER = """# Sphinx inventory version 2
# Project: torch
# Version: {version}
# The remainder of this file is compressed using zlib.
"""


def role(name: str) -> str:
    """Import a dotted name and say what it is.

    Args:
        name: For example `torch.nn.Module`.

    Returns:
        The inventory's role: `class`, `function` or `attribute`.

    Raises:
        AttributeError: If torch has no such name.
    """
    found = importlib.import_module("torch")
    path = "torch"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        if not hasattr(found, part):
            importlib.import_module(path)  # a subpackage that nobody imported yet
        found = getattr(found, part)
    if inspect.isclass(found):
        return "class"
    return "function" if callable(found) else "attribute"


def entries(root: Path) -> str:
    """Return the inventory's lines, one per name."""
    lines = (root / NAMES).read_text(encoding="utf-8").splitlines()
    pairs = [line.split() for line in lines if line and not line.startswith("#")]
    return "".join(f"{name} py:{role(name)} 1 {page}#{name} -\n" for name, page in pairs)


def header() -> str:
    """Return the inventory's head for the torch that is installed."""
    version = importlib.import_module("torch").__version__.partition("+")[0]
    return HEADER.format(version=".".join(version.split(".")[:2]))


def difference(root: Path) -> str:
    """Compare the committed inventory with the names.

    Args:
        root: The repository.

    Returns:
        Empty when they agree, else what to do.
    """
    target = root / INVENTORY
    to_do = f"{shown(target, root)}:1: run `python -m tools.prebuild.inventory` and commit it"
    if not target.exists():
        return f"{to_do}: the file is missing"
    data = target.read_bytes()
    parts = data.split(b"\n", 4)
    try:
        known = zlib.decompress(parts[4]).decode()
    except (IndexError, zlib.error):
        return f"{to_do}: it cannot be read"
    head = b"\n".join(parts[:4]).decode() + "\n"
    if known != entries(root) or head != header():
        return f"{to_do}: it is not what {NAMES} gives"
    return ""


def write(root: Path) -> None:
    """Write the inventory if its contents changed; compressed bytes may differ by zlib."""
    if difference(root):
        target = root / INVENTORY
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(header().encode() + zlib.compress(entries(root).encode(), 9))


if __name__ == "__main__":
    write(ROOT)
    print(difference(ROOT) or f"{INVENTORY} holds the names of {NAMES}")
    sys.exit(1 if difference(ROOT) else 0)
