"""Write generated files only when they changed, and delete those no longer made.

`mkdocs serve` watches the folder: a file rewritten with the same bytes would rebuild forever.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Generated:
    """The files that should exist, by path below the generated folder."""

    files: dict[str, bytes] = field(default_factory=dict)

    def add(self, path: str, content: str | bytes) -> None:
        """Add one file; two makers of one path are a mistake in the tools."""
        assert path not in self.files, f"two generators write {path}"
        self.files[path] = content.encode() if isinstance(content, str) else content

    def write(self, folder: Path) -> list[str]:
        """Bring the folder in line.

        Args:
            folder: Where the files go; everything else in it is deleted.

        Returns:
            The paths that changed, sorted.
        """
        changed = []
        for path, content in self.files.items():
            target = folder / path
            if target.is_file() and target.read_bytes() == content:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            changed.append(path)
        return sorted(changed + self.delete_others(folder))

    def delete_others(self, folder: Path) -> list[str]:
        """Delete what is not among the files, and folders that are empty then."""
        deleted = []
        for found in sorted(folder.rglob("*"), reverse=True):
            path = found.relative_to(folder).as_posix()
            if found.is_dir() and not any(found.iterdir()):
                found.rmdir()
            elif found.is_file() and path not in self.files:
                found.unlink()
                deleted.append(path)
        return deleted
