"""Whole weights from what many ranks have saved, on one machine, without ranks or GPU.

Two things can be put together. From a folder that `torch.distributed.checkpoint` wrote,
`consolidate_checkpoint` makes safetensors files that every library reads; on the command line:

    python -m fsdp_ref consolidate checkpoint/ model.safetensors

It reads and writes one tensor at a time, so it needs memory for the largest one and not for the
model. From the local dicts of all ranks and what `local_metadata_dict` says of them,
`consolidate_shard_weights` makes a state dict; the name is FairScale's.

Everything is looked through before anything is written. What is incomplete, or does not belong
together, is refused by name; a file gets its name when all of it is there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_ref.checkpoint_files import StoredCheckpoint, StoredTensor, open_checkpoint
from fsdp_ref.errors import ConsolidationError
from fsdp_ref.safetensors_file import (
    SafetensorsFile,
    index_of,
    names_of_parts,
    refuse_dtype,
    split,
    write_index,
)

Progress = Callable[[str, int], object]
"""Called with a tensor's name and its bytes once it is written."""

_MOST_NAMES_SHOWN = 5
_LOCAL = re.compile(r"@rank\d+of\d+$")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


# A checkpoint of torch's


def chosen_tensors(checkpoint: StoredCheckpoint, key: str | None = None) -> dict[str, StoredTensor]:
    """Return the tensors of a model in a checkpoint, by their names in the model.

    Needs no ranks.

    Args:
        checkpoint: What is in the folder.
        key: Where in the saved dict the model's state dict is, with dots between keys. By default
            under `"model"` if there is such a key, otherwise the dict itself.

    Returns:
        Names and tensors, sorted by name.

    Raises:
        ConsolidationError: If it is not clear what the model is, or nothing is there; if tensors
            are in the local form, as flat shards.
    """
    tops = {str(tensor.path[0]) for tensor in checkpoint.tensors if len(tensor.path) > 1}
    if key is None and "model" in tops:
        key = "model"
    wanted = [] if key is None else key.split(".")
    found = {}
    for tensor in checkpoint.tensors:
        path = [str(part) for part in tensor.path]
        if path[: len(wanted)] == wanted and (wanted or len(path) == 1):
            found[".".join(path[len(wanted) :])] = tensor
    where = f"{checkpoint.folder}, key {key!r}" if key else f"{checkpoint.folder}"
    if not found or (key is None and tops):
        raise ConsolidationError.at(
            where,
            expected="a model's state dict",
            found=f"the keys {', '.join(map(repr, sorted(tops)))}" if tops else "no tensors",
            fix="Say which key it was saved under, with --key.",
        )
    flat = [name for name in found if _LOCAL.search(name)]
    if flat:
        raise ConsolidationError.at(
            where,
            expected="weights, whole or cut by rows",
            found=f"flat shards, such as '{flat[0]}'",
            fix="Load each rank's local dict and hand them to consolidate_shard_weights(), "
            "together with what local_metadata_dict() said.",
        )
    return dict(sorted(found.items()))


def consolidate_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    key: str | None = None,
    max_shard_size: str | int = "5GB",
    progress: Progress | None = None,
) -> list[Path]:
    """Write a model's weights from a checkpoint into safetensors files. Needs no ranks.

    Memory stays near the largest tensor. Objects that are no tensors, such as extra state, are left
    out: the format has no place for them.

    Args:
        checkpoint: A folder that `torch.distributed.checkpoint` has written, of a full or a sharded
            state dict, by any number of ranks.
        out: The file to write, such as `"model.safetensors"`. Above `max_shard_size` it becomes
            `model-00001-of-00003.safetensors` and so on, with an index beside them.
        key: Where in the saved dict the model is; see
            [chosen_tensors][fsdp_ref.consolidate.chosen_tensors].
        max_shard_size: The most that a file may hold: a number, or one with KB, MB or GB behind it.
        progress: Called after each tensor with its name and bytes.

    Returns:
        The files, the index last if there is one.

    Raises:
        ConsolidationError: If the checkpoint is incomplete, damaged or not understood, or if one
            file would come beside several from before, or several beside one. Files that were
            complete before that keep their names.
    """
    limit = parse_size(max_shard_size)
    tensors = chosen_tensors(open_checkpoint(Path(checkpoint)), key)
    for name, tensor in tensors.items():
        refuse_dtype(name, tensor.kind)
    target = Path(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    parts = split({name: tensor.kind for name, tensor in tensors.items()}, limit)
    paths = names_of_parts(target, len(parts))
    _refuse_other_form(target, len(parts))
    for path, kinds in zip(paths, parts, strict=True):
        with SafetensorsFile(path, kinds) as file:
            for name, kind in kinds.items():
                file.add(name, tensors[name].read())
                if progress is not None:
                    progress(name, kind.nbytes)
    if len(parts) > 1:
        paths = [*paths, write_index(target, zip(paths, parts, strict=True))]
    return paths


def _refuse_other_form(target: Path, count: int) -> None:
    """Raise if libraries that read what is written would find something older instead."""
    older = target if count > 1 else index_of(target)
    if older.exists():
        raise ConsolidationError.at(
            str(target),
            expected="a place without weights from before",
            found=f"{older.name}, which other libraries might read instead",
            fix="Remove the older files, or write to another folder.",
        )


def parse_size(size: str | int) -> int:
    """Return a number of bytes.

    Args:
        size: A number, or one with KB, MB, GB or TB behind it.

    Returns:
        The bytes.

    Raises:
        ConsolidationError: If it is no size above 0.

    Examples:
        >>> parse_size("2KB")
        2000
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B?)\s*", str(size).upper())
    unit = "" if match is None else match[2].removesuffix("B")
    total = 0 if match is None else int(float(match[1]) * _UNITS[f"{unit}B" if unit else ""])
    if total < 1:
        raise ConsolidationError.at(
            "max_shard_size", expected="a size such as '5GB' or a number of bytes",
            found=repr(size), fix="Units are KB, MB, GB and TB.",
        )  # fmt: skip
    return total


# Local dicts


def consolidate_shard_weights(
    shard_weights: Sequence[Mapping[str, Any]],
    shard_metadata: Sequence[Mapping[str, Any]],
    with_module_buffers: bool = True,
    strict: bool = True,
) -> dict[str, Any]:
    """Return whole weights from the local dicts of all ranks. Needs no ranks.

    Args:
        shard_weights: What `local_state_dict()` returned on each rank, in any order.
        shard_metadata: What `local_metadata_dict()` returned on each rank, in the same order.
        with_module_buffers: Include buffers, parameters outside of units and extra state, of the
            lowest rank; they may differ between ranks.
        strict: Raise if shards are missing. Otherwise weights are left out that lack any.

    Returns:
        Weights under the plain model's names, a tied one under each of its names, in memory of
        their own. Where groups of ranks have different versions of a weight, each is there under
        the name and the first rank that has it, such as `"expert.weight@rank2"`.

    Raises:
        ConsolidationError: If dicts and metadata do not belong together, ranks are there twice
            or missing, or shards have another size or dtype than was noted.
    """
    dicts = _by_rank(shard_weights, shard_metadata, strict=strict)
    first = min(dicts)
    result: dict[str, Any] = {}
    for number in range(len(dicts[first][1]["units"])):
        result |= _whole_unit(number, dicts, strict=strict)
    if with_module_buffers:
        weights, metadata = dicts[first]
        for which in ("parameters", "buffers", "extra_state"):
            for name, local in metadata[which].items():
                if strict or local in weights:
                    result[name] = _copied(_found(weights, local, first))
    return result


Dicts = Mapping[int, tuple[Mapping[str, Any], Mapping[str, Any]]]
"""Local dict and metadata by rank."""


def _by_rank(
    weights: Sequence[Mapping[str, Any]], metadata: Sequence[Mapping[str, Any]], *, strict: bool
) -> Dicts:
    where = "consolidate_shard_weights"
    if len(weights) != len(metadata) or not metadata:
        raise _mixed(
            where, "one metadata for each local dict", f"{len(metadata)} for {len(weights)}"
        )
    known = "fsdp_ref local 1"
    for one in metadata:
        if one.get("format") != known:
            raise _mixed(where, f"metadata of the format '{known}'", repr(one.get("format")))
    sizes = {one["world_size"] for one in metadata}
    if len(sizes) > 1:
        raise _mixed(where, "dicts of one run", f"such of {sorted(sizes)} ranks")
    ranks = [one["rank"] for one in metadata]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    missing = sorted(set(range(sizes.pop())) - set(ranks))
    if twice or (missing and strict):
        found = f"rank {twice[0]} twice" if twice else f"none of rank {missing[0]}"
        raise _mixed(where, "one local dict of each rank", found)
    structures = {rank: _structure(one) for rank, one in zip(ranks, metadata, strict=True)}
    for rank, structure in structures.items():
        if structure != structures[ranks[0]]:
            raise _mixed(where, "the same units on every rank", f"rank {rank} with others")
    pairs = zip(ranks, zip(weights, metadata, strict=True), strict=True)
    return dict(sorted(pairs))


def _structure(metadata: Mapping[str, Any]) -> list[Any]:
    """Return what ranks must have in common; their keys differ, and so may their groups."""
    return [
        (unit["name"], len(unit["ranks"]), [{**f, "key": ""} for f in unit["flat_parameters"]])
        for unit in metadata["units"]
    ]


def _whole_unit(number: int, dicts: Dicts, *, strict: bool) -> dict[str, Tensor]:
    """Return all weights of one unit, in all versions if they differ."""
    versions: dict[int, dict[str, Tensor]] = {}
    rows = {tuple(map(tuple, m["units"][number]["copies"])) for _, m in dicts.values()}
    for copies in sorted(rows):
        ranks = copies[0]  # the others hold the same
        versions[min(min(row) for row in copies)] = _weights(number, ranks, dicts, strict=strict)
    first, *others = versions.values()
    if all(_equal(first, other) for other in others):
        return first
    return {
        f"{name}@rank{rank}": value
        for rank, version in versions.items()
        for name, value in version.items()
    }


def _weights(number: int, ranks: Sequence[int], dicts: Dicts, *, strict: bool) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    anybody = next(iter(dicts.values()))[1]["units"][number]
    for at, flat in enumerate(anybody["flat_parameters"]):
        shards = []
        for rank in ranks:
            weights, metadata = dicts.get(rank, ({}, None))
            key = metadata["units"][number]["flat_parameters"][at]["key"] if metadata else ""
            if strict or key in weights:
                shards.append(_checked(_found(weights, key, rank), flat, key))
        if len(shards) == len(ranks):
            whole = torch.cat(shards)
            for slot in flat["slots"]:
                shape = torch.Size(slot["shape"])
                value = whole[slot["offset"] : slot["offset"] + shape.numel()].view(shape).clone()
                found |= dict.fromkeys([slot["name"], *slot["aliases"]], value)
    return found


def _found(weights: Mapping[str, Any], key: str, rank: int) -> Any:
    if key not in weights:
        expected = f"'{key}' in the local dict of rank {rank}"
        raise _mixed("consolidate_shard_weights", expected, _listed(list(weights)) or "nothing")
    return weights[key]


def _checked(shard: Any, flat: Mapping[str, Any], key: str) -> Tensor:
    expected = f"{flat['shard_numel']} elements of {flat['dtype']}"
    if not isinstance(shard, Tensor):
        raise _mixed(f"'{key}'", expected, f"a {type(shard).__name__}")
    dtype = str(shard.dtype).removeprefix("torch.")
    if tuple(shard.shape) != (flat["shard_numel"],) or dtype != flat["dtype"]:
        raise _mixed(f"'{key}'", expected, f"shape {tuple(shard.shape)} of {dtype}")
    return shard.detach().cpu()


def _equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:_MOST_NAMES_SHOWN])


def _mixed(where: str, expected: str, found: str) -> ConsolidationError:
    return ConsolidationError.at(
        where,
        expected=expected,
        found=found,
        fix="Hand over the local dicts and the metadata of all ranks of one save.",
    )
