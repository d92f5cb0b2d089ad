"""Writes the safetensors format, one tensor after the other: a header in JSON, then plain bytes.

The format is small enough to write without its own package, which wants all tensors of a file in
memory at once. What is written here, that package reads, and so does everything that uses it.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import torch
from torch import Tensor

from fsdp_ref.errors import ConsolidationError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What the format calls torch's dtypes."""

_ALIGNMENT = 8


@dataclass(frozen=True)
class Kind:
    """What a tensor is, without its values.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def refuse_dtype(name: str, kind: Kind) -> None:
    """Raise if the format has no word for a tensor's dtype.

    Args:
        name: The tensor's name.
        kind: What it is.

    Raises:
        ConsolidationError: If so.
    """
    if kind.dtype not in DTYPES:
        raise ConsolidationError.at(
            f"'{name}'",
            expected=f"a dtype that safetensors knows: {', '.join(map(str, DTYPES))}",
            found=str(kind.dtype),
            fix="Convert it before it is saved, or leave it out.",
        )


class SafetensorsFile:
    """A file being written; its name appears when all of it is there.

    Args:
        path: The file.
        kinds: All tensors that will be in it, in the order in which they will be added.
    """

    def __init__(self, path: Path, kinds: Mapping[str, Kind]) -> None:
        self._path, self._unwritten = path, dict(kinds)
        self._beside = path.with_name(f".{path.name}.writing")

    def __enter__(self) -> Self:
        """Write the header."""
        self._file: IO[bytes] = self._beside.open("wb")
        self._file.write(_header(self._unwritten))
        return self

    def add(self, name: str, value: Tensor) -> None:
        """Write the values of the next tensor.

        Args:
            name: Its name.
            value: All of it, on the CPU.

        Raises:
            ConsolidationError: If it is not the one that was announced.
        """
        announced, kind = next(iter(self._unwritten.items()), ("nothing", None))
        if name != announced or kind != Kind(value.dtype, tuple(value.shape)):
            raise ConsolidationError.at(
                f"{self._path.name}, '{name}'",
                expected=f"'{announced}', {kind}",
                found=f"{value.dtype} of shape {tuple(value.shape)}",
                fix="Tensors come in the order of the header, as they were announced.",
            )
        del self._unwritten[name]
        dense = value.detach().contiguous()
        if dense.nbytes:  # straight from its memory, without a copy
            self._file.write((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr()))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the file its name, or remove what was written if there was an exception."""
        complete = error is None and not self._unwritten
        if complete:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        if complete:
            self._beside.replace(self._path)
        else:
            self._beside.unlink()


def _header(kinds: Mapping[str, Kind]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, kind in kinds.items():
        entries[name] = {
            "dtype": DTYPES[kind.dtype],
            "shape": list(kind.shape),
            "data_offsets": [at, at + kind.nbytes],
        }
        at += kind.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def split(kinds: Mapping[str, Kind], max_bytes: int) -> list[dict[str, Kind]]:
    """Return which tensors go into one file together, in order.

    Args:
        kinds: All tensors.
        max_bytes: How large the tensors of a file may be together; a larger one has its own.

    Returns:
        One dict per file, at least one.

    Examples:
        >>> three = {name: Kind(torch.float32, (2,)) for name in "abc"}
        >>> [list(part) for part in split(three, max_bytes=16)]
        [['a', 'b'], ['c']]
    """
    parts: list[dict[str, Kind]] = [{}]
    for name, kind in kinds.items():
        used = sum(one.nbytes for one in parts[-1].values())
        if parts[-1] and used + kind.nbytes > max_bytes:
            parts.append({})
        parts[-1][name] = kind
    return parts


def names_of_parts(path: Path, count: int) -> list[Path]:
    """Return the files' names, as Hugging Face's libraries expect them.

    Examples:
        >>> [part.name for part in names_of_parts(Path("model.safetensors"), 2)]
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    if count == 1:
        return [path]
    return [
        path.with_name(f"{path.stem}-{number:05}-of-{count:05}{path.suffix}")
        for number in range(1, count + 1)
    ]


def index_of(path: Path) -> Path:
    """Return where the index of several files is.

    Examples:
        >>> index_of(Path("model.safetensors")).name
        'model.safetensors.index.json'
    """
    return path.with_name(f"{path.name}.index.json")


def write_index(path: Path, parts: Iterable[tuple[Path, Mapping[str, Kind]]]) -> Path:
    """Write which file has which tensor, beside the files.

    Args:
        path: The name that was asked for, of which the parts' names were made.
        parts: Each file with its tensors.

    Returns:
        The index.
    """
    listed = list(parts)
    total = sum(kind.nbytes for _, kinds in listed for kind in kinds.values())
    where = {name: part.name for part, kinds in listed for name in kinds}
    index = index_of(path)
    beside = index.with_name(f".{index.name}.writing")
    text = {"metadata": {"total_size": total}, "weight_map": where}
    beside.write_text(json.dumps(text, indent=2) + "\n")
    beside.replace(index)
    return index
