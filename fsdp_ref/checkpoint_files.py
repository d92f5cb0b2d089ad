"""Reads a checkpoint of `torch.distributed.checkpoint` without ranks, tensor by tensor.

Such a checkpoint is a folder: a file `.metadata`, which is a pickle, and data files, in which each
piece of a tensor is an archive of its own. Torch unpickles the first without restriction, so
whoever can write to the folder can run code. Here it is read with a list of what may be in it:
torch's own records of names, shapes, dtypes and places. Pieces are read with torch's
`weights_only`. Nothing else of the folder is trusted: a piece that is missing, of another shape, or
beyond the end of its file is an error that names tensor and file.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_ref.errors import ConsolidationError
from fsdp_ref.safetensors_file import Kind

_METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"
_RECORDS = (
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata"),
    *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
)
_ALLOWED = {
    *((f"{_DCP}.metadata", name) for name in _RECORDS),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _Careful(pickle.Unpickler):
    """Finds torch's records and dtypes, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, and where it is.

    Attributes:
        offsets: Its first element in the tensor, one number per dimension.
        shape: Its shape.
        file: The data file.
        start: First byte in the file.
        nbytes: Bytes in the file.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint.

    Attributes:
        name: The whole key.
        path: The same as a path through nested dicts.
        kind: Dtype and shape.
        pieces: What it is made of.
    """

    name: str
    path: tuple[Any, ...]
    kind: Kind
    pieces: Sequence[Piece]

    def read(self) -> Tensor:
        """Return the whole tensor.

        Raises:
            ConsolidationError: If a piece cannot be read, or is another than was noted.
        """
        full = torch.empty(self.kind.shape, dtype=self.kind.dtype)
        for piece in self.pieces:
            place = tuple(
                slice(at, at + size) for at, size in zip(piece.offsets, piece.shape, strict=True)
            )
            full[place] = self._load(piece)
        return full

    def _load(self, piece: Piece) -> Tensor:
        with piece.file.open("rb") as file:
            file.seek(piece.start)
            raw = io.BytesIO(file.read(piece.nbytes))
        try:
            value = torch.load(raw, map_location="cpu", weights_only=True)
        except Exception as error:  # torch and zip raise many kinds
            raise _unreadable(self.name, piece.file, str(error).split("\n")[0]) from error
        found = Kind(value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else None
        if found != Kind(self.kind.dtype, piece.shape):
            raise _unreadable(self.name, piece.file, f"{found} where {piece.shape} was noted")
        tensor: Tensor = value
        return tensor


def _unreadable(name: str, file: Path, found: str) -> ConsolidationError:
    return ConsolidationError.at(
        f"'{name}' in {file}",
        expected="the piece that the checkpoint's metadata describes",
        found=found,
        fix="The file is damaged, or belongs to another checkpoint: copy the whole folder again.",
    )


@dataclass(frozen=True)
class StoredCheckpoint:
    """What a checkpoint has.

    Attributes:
        folder: The folder.
        tensors: All tensors, in the order of the metadata.
        objects: Keys of everything else.
    """

    folder: Path
    tensors: Sequence[StoredTensor]
    objects: Sequence[str]


def open_checkpoint(folder: Path) -> StoredCheckpoint:
    """Read what a checkpoint has, and make sure that all of it is there. Needs no ranks.

    Args:
        folder: A folder that `torch.distributed.checkpoint` has written.

    Returns:
        Its tensors, none of them read yet.

    Raises:
        ConsolidationError: If it is no checkpoint, if its metadata has what does not belong there,
            or if pieces of a tensor are missing, overlap, or lie in files that are not there.
    """
    metadata = _metadata(folder)
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    places: dict[str, dict[tuple[int, ...], Any]] = {}
    for index, info in metadata.storage_data.items():
        places.setdefault(index.fqn, {})[tuple(index.offset or ())] = info
    tensors, objects = [], []
    for name, stored in metadata.state_dict_metadata.items():
        if not hasattr(stored, "chunks"):
            objects.append(name)
            continue
        kind = Kind(stored.properties.dtype, tuple(stored.size))
        pieces = tuple(_pieces(folder, name, stored, places.get(name, {})))
        _refuse_gaps(name, kind, pieces)
        tensors.append(StoredTensor(name, tuple(paths.get(name, (name,))), kind, pieces))
    return StoredCheckpoint(folder, tensors, objects)


def _metadata(folder: Path) -> Any:
    path = folder / _METADATA
    if not path.is_file():
        raise ConsolidationError.at(
            str(folder),
            expected=f"a checkpoint of {_DCP}, with a file {_METADATA}",
            found="none" if folder.is_dir() else "no such folder",
            fix="The metadata is written last: without it the checkpoint was never finished.",
        )
    try:
        with path.open("rb") as file:
            metadata = _Careful(file).load()
    except Exception as error:  # a broken pickle may raise nearly anything
        raise _not_metadata(path, str(error)) from error
    wanted = ("state_dict_metadata", "storage_data")
    if not all(isinstance(getattr(metadata, name, None), dict) for name in wanted):
        raise _not_metadata(path, f"a {type(metadata).__name__}")
    return metadata


def _not_metadata(path: Path, found: str) -> ConsolidationError:
    return ConsolidationError.at(
        str(path),
        expected="torch's description of a checkpoint, and nothing else",
        found=found,
        fix="The file is damaged, or not what it says: do not load it by other means.",
    )


def _pieces(
    folder: Path, name: str, stored: Any, places: Mapping[tuple[int, ...], Any]
) -> Iterator[Piece]:
    for chunk in stored.chunks:
        info = places.get(tuple(chunk.offsets))
        if info is None:
            raise _incomplete(name, f"nowhere the piece at {tuple(chunk.offsets)}")
        file = folder / info.relative_path
        if folder.resolve() not in file.resolve().parents:
            raise _incomplete(name, f"a piece outside of the folder, in {info.relative_path}")
        if not file.is_file():
            raise _incomplete(name, f"no file {info.relative_path}")
        if file.stat().st_size < info.offset + info.length:
            raise _incomplete(name, f"that {info.relative_path} ends before its piece does")
        if getattr(info, "transform_descriptors", None):
            raise _incomplete(name, f"a piece that was transformed: {info.transform_descriptors}")
        yield Piece(tuple(chunk.offsets), tuple(chunk.sizes), file, info.offset, info.length)


def _refuse_gaps(name: str, kind: Kind, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        ends = [at + size for at, size in zip(piece.offsets, piece.shape, strict=True)]
        if any(end > size for end, size in zip(ends, kind.shape, strict=True)):
            raise _incomplete(name, f"a piece of shape {piece.shape} at {piece.offsets}")
    if any(_overlap(a, b) for a, b in combinations(pieces, 2)):
        raise _incomplete(name, "two pieces with the same elements")
    covered = sum(torch.Size(piece.shape).numel() for piece in pieces)
    wanted = torch.Size(kind.shape).numel()
    if covered != wanted:
        raise _incomplete(name, f"pieces with {covered} of {wanted} elements")


def _overlap(a: Piece, b: Piece) -> bool:
    ranges = zip(a.offsets, a.shape, b.offsets, b.shape, strict=True)
    return all(max(x, y) < min(x + m, y + n) for x, m, y, n in ranges)


def _incomplete(name: str, found: str) -> ConsolidationError:
    return ConsolidationError.at(
        f"'{name}'",
        expected="every piece of it once, in a file of the checkpoint",
        found=found,
        fix="Copy the whole folder, with the files of all ranks, of one checkpoint.",
    )
