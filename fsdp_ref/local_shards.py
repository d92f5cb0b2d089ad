"""The local form: this rank's flat shards and buffers, and what is needed to put them together.

It is the fastest way to write a model down, as nothing is sent: each rank copies what it has. It
is also the least useful one, since a flat shard means nothing elsewhere. It loads on the same rank
of as many ranks, with the same wrapping. Whoever wants whole weights from it needs the local dicts
of all ranks and what `local_metadata_dict` says about them.

Every name ends in the rank and the number of ranks, such as `"layers.0._flat_param@rank1of4"`. A
checkpoint of torch's has one value per name: without the rank in the name it would keep one
rank's shard and drop the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_ref.errors import LoadError, SummonContextError
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.naming import WRAPPED
from fsdp_ref.row_shards import rows_of
from fsdp_ref.unit import Unit

Units = Sequence[tuple[str, Unit]]
"""Each unit with its dotted name, as seen from the outermost one; that itself first."""

_EXTRA = "_extra_state"  # torch's name for what `get_extra_state` returns
_TAG = re.compile(r"@rank(\d+)of(\d+)$")


def tagged(name: str) -> str:
    """Return a name of this rank's own, which no other rank uses.

    Args:
        name: For example of a flat parameter.

    Returns:
        The name with this rank and the number of ranks behind it.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return f"{name}@rank{rank}of{size}"


def is_local(names: Mapping[str, Any]) -> bool:
    """Return whether a dict has the local form, by its names.

    Examples:
        >>> is_local({"_flat_param@rank0of2": None}), is_local({"weight": None})
        (True, False)
    """
    return any(_TAG.search(name) for name in names)


def local_state(
    module: nn.Module, units: Units, device: torch.device | None = None
) -> dict[str, Any]:
    """Copy this rank's flat shards, its buffers, and parameters that no unit looks after. Local.

    Args:
        module: The outermost unit.
        units: All units in it.
        device: Where the copies go; `None` for where each tensor is.

    Returns:
        Plain tensors under tagged names.

    Raises:
        SummonContextError: If a unit is summoned: its shards may be older than what is shown.
    """
    _refuse_summoned(units, "local_state_dict()")
    copies = {
        name: tensor.detach().to(device or tensor.device, copy=True)
        for name, tensor in _live_tensors(module, units)
    }
    extras = {name: part.get_extra_state() for name, part in _with_extra_state(module)}
    return {tagged(name): value for name, value in {**copies, **extras}.items()}


def load_local_state(
    module: nn.Module, units: Units, state_dict: Mapping[str, Any], *, strict: bool
) -> tuple[list[str], list[str]]:
    """Copy flat shards and buffers back, all of them or nothing. Local.

    Args:
        module: The outermost unit.
        units: All units in it.
        state_dict: What `local_state` returned on this rank, with as many ranks.
        strict: Whether missing and unexpected names count.

    Returns:
        The missing and the unexpected names.

    Raises:
        LoadError: If it is from another rank, or another number of ranks, or does not fit.
        SummonContextError: If a unit is summoned.
    """
    _refuse_summoned(units, "load_local_state_dict()")
    where = f"{units[0][1].where}, load_local_state_dict"
    _refuse_strangers(state_dict, where)
    live = {tagged(name): tensor for name, tensor in _live_tensors(module, units)}
    extras = {tagged(name): part for name, part in _with_extra_state(module)}
    missing = [name for name in (*live, *extras) if name not in state_dict]
    unexpected = [name for name in state_dict if name not in live and name not in extras]
    found = [f"missing names {missing}"] if strict and missing else []
    found += [f"unexpected names {unexpected}"] if strict and unexpected else []
    found += [
        f"'{name}' of shape {list(getattr(state_dict[name], 'shape', ()))} for {list(one.shape)}"
        for name, one in live.items()
        if name in state_dict and getattr(state_dict[name], "shape", None) != one.shape
    ]
    if found:
        raise LoadError.at(
            where,
            expected="the shards of this model on this rank, wrapped in the same way",
            found="; ".join(found),
            fix="Nothing was loaded. Full and sharded state dicts load at other wrappings.",
        )
    for _, unit in units:
        unit.reshard()  # full parameters gathered earlier are stale from here on
    with torch.no_grad():
        for name in live.keys() & state_dict.keys():
            live[name].copy_(state_dict[name])
    for name in extras.keys() & state_dict.keys():
        extras[name].set_extra_state(state_dict[name])
    return missing, unexpected


def _refuse_strangers(state_dict: Mapping[str, Any], where: str) -> None:
    mine = _TAG.search(tagged(""))
    for name in state_dict:
        tag = _TAG.search(name)
        if tag is None or mine is None or tag.groups() != mine.groups():
            raise LoadError.at(
                where,
                expected=f"names that end in '{tagged('')}'",
                found=f"'{name}'" if tag is None else f"'{name}', of another rank or world size",
                fix="A local state dict loads on the rank it is from, with as many ranks. Load "
                "others with load_state_dict(), or put them together with consolidate first.",
            )


def _refuse_summoned(units: Units, where: str) -> None:
    for _, unit in units:
        if unit.summoned:
            raise SummonContextError.at(
                f"{where} of {unit.where}",
                expected="a call outside of summon_full_params",
                found="one inside it, where shards are older than what is shown",
                fix="Leave the context first, or use state_dict().",
            )


# What there is on this rank


def _dotted(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _flat_parameters(units: Units) -> Iterator[tuple[str, str, FlatParameter]]:
    """Yield the dotted name of each flat parameter, that of its unit, and the parameter."""
    for unit_name, unit in units:
        for name, flat_param in unit.registered.flat.items():
            yield _dotted(unit_name, name), unit_name, flat_param


def _clean(name: str) -> str:
    return name.replace(f"{WRAPPED}.", "").removesuffix(WRAPPED).removesuffix(".")


def _live_tensors(module: nn.Module, units: Units) -> Iterator[tuple[str, Tensor]]:
    flat = list(_flat_parameters(units))
    for name, _, flat_param in flat:
        flat_param.take_back_edits()
        yield name, flat_param
    looked_after = {id(flat_param) for _, _, flat_param in flat}
    looked_after |= {id(o.parameter) for _, _, flat_param in flat for o in flat_param._originals}
    for prefix, part in module.named_modules():
        kept = {k: b for k, b in part._buffers.items() if k not in part._non_persistent_buffers_set}
        for name, tensor in {**part._parameters, **kept}.items():
            if tensor is not None and id(tensor) not in looked_after:
                yield _dotted(_clean(prefix), name), tensor


def _with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield _dotted(_clean(prefix), _EXTRA), part


# What others need to know


def local_metadata(module: nn.Module, units: Units) -> dict[str, Any]:
    """Say what each of the local names holds, so that whole weights can be made of them.

    Under a hybrid strategy collective when it is first asked for; see
    [rows_of][fsdp_ref.row_shards.rows_of]. Local otherwise.

    Args:
        module: The outermost unit.
        units: All units in it.

    Returns:
        What [local_metadata_dict][fsdp_ref.FullyShardedDataParallel.local_metadata_dict] returns.
    """
    flat_names = {name for name, _, _ in _flat_parameters(units)}
    others = [name for name, _ in _live_tensors(module, units) if name not in flat_names]
    parameters = [_clean(name) for name, _ in module.named_parameters(remove_duplicate=False)]
    return {
        "format": "fsdp_ref local 1",
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "units": [_describe_unit(name, unit) for name, unit in units],
        "buffers": {name: tagged(name) for name in others if name not in parameters},
        "parameters": {name: tagged(name) for name in others if name in parameters},
        "extra_state": {name: tagged(name) for name, _ in _with_extra_state(module)},
    }


def _describe_unit(name: str, unit: Unit) -> dict[str, Any]:
    return {
        "name": name,
        "ranks": list(unit.group.ranks),
        "position": unit.group.rank,
        "copies": rows_of(unit.placement),
        "flat_parameters": [
            _describe_flat(name, flat_name, flat_param)
            for flat_name, flat_param in unit.registered.flat.items()
        ],
    }


def _describe_flat(unit_name: str, name: str, flat_param: FlatParameter) -> dict[str, Any]:
    layout = flat_param._layout
    return {
        "key": tagged(_dotted(unit_name, name)),
        "dtype": str(flat_param.dtype).removeprefix("torch."),
        "numel": layout.total_numel,
        "padding": layout.padding_numel,
        "shard_numel": layout.shard_numel,
        "trainable": flat_param.requires_grad,
        "slots": [
            {
                "name": _dotted(unit_name, slot.name),
                "aliases": [_dotted(unit_name, alias) for _, _, alias in original.places[1:]],
                "shape": list(slot.shape),
                "offset": slot.offset,
            }
            for slot, original in zip(layout.slots, flat_param._originals, strict=True)
        ],
    }
