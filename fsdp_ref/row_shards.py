"""Weights cut by rows, as torch's own tools pass them around: `DTensor`s.

A flat shard means nothing outside of its unit: it may begin in the middle of one weight and end in
the next. Checkpoints and torch's `fully_shard` cut each weight by itself, along its first
dimension, and wrap the piece as a `DTensor`, which knows the whole shape and who holds what. Here
weights take that form and come back from it.

A unit whose ranks are not the whole world exists in several versions, one in each group. A file
has one value per name, so such weights are stored under names of their own.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_ref import agreement
from fsdp_ref.rank_group import Placement, RankGroup

if TYPE_CHECKING:  # it takes long to import, and only those who save or load need it
    from torch.distributed.tensor import DTensor

_rows: WeakKeyDictionary[Placement, list[list[int]]] = WeakKeyDictionary()
_meshes: dict[tuple[Any, ...], DeviceMesh] = {}


def rows_of(placement: Placement) -> list[list[int]]:
    """Return who has the copies of a unit, one row per copy, in the order of their first ranks.

    Under a hybrid strategy collective when a unit asks for the first time: ranks that hold the
    same shard tell each other, through the key-value store, with whom they share their copy. Local
    otherwise.

    Args:
        placement: Where the unit's weights are.

    Returns:
        Global ranks; the same list each time.

    Raises:
        SilentRanksError: If a rank does not ask.
    """
    shard, replicate = placement.shard, placement.replicate
    if replicate is None:
        return [list(shard.ranks)]
    if shard.size == 1:
        return [[rank] for rank in replicate.ranks]
    if placement not in _rows:
        topic = f"copies of what ranks {list(replicate.ranks)} hold"
        texts = agreement.exchange(topic, json.dumps(shard.ranks), replicate.ranks)
        _rows[placement] = sorted(json.loads(text) for text in texts)
    return _rows[placement]


def _dimensions(placement: Placement) -> list[RankGroup]:
    """Return the groups that become dimensions: copies first, then shards, none without need."""
    if placement.replicate is None:
        return [placement.shard]
    if placement.shard.size == 1:
        return [placement.replicate]
    return [placement.replicate, placement.shard]


def mesh_of(placement: Placement, device: torch.device | None = None) -> DeviceMesh:
    """Return the ranks of a unit as torch's device mesh, made from the unit's live groups.

    Local, but for a hybrid strategy at first use: see [rows_of][fsdp_ref.row_shards.rows_of].

    Args:
        placement: Where the unit's weights are; its groups are live.
        device: On what kind of device the weights are; by default the CPU if the group serves it.

    Returns:
        One dimension, over the ranks that share the unit, or over its copies where nothing is cut.
        Two for a hybrid strategy: copies, then the ranks that share one. The same object each time.

    Raises:
        GroupNotCreatedError: If a group was not created yet.
    """
    groups, rows = _dimensions(placement), rows_of(placement)
    live = [group.live for group in groups]
    served = [device.type for device in live[-1]._device_types]
    wanted = "cpu" if device is None else device.type
    kind = wanted if wanted in served else served[0]
    key = (kind, json.dumps(rows), *(group.group_name for group in live))
    mesh = _meshes.get(key)
    # A group may have the name of one that was destroyed.
    if mesh is None or any(mesh.get_group(dim) is not group for dim, group in enumerate(live)):
        if len(groups) == 1:
            mesh = DeviceMesh.from_group(live[0], kind)
        else:
            mesh = DeviceMesh.from_group(live, kind, rows, mesh_dim_names=("replicate", "shard"))
        _meshes[key] = mesh
    return mesh


def cut(full: Tensor, placement: Placement) -> DTensor:
    """Keep this rank's rows of a whole tensor, as torch's `fully_shard` would.

    Local, but for a hybrid strategy at first use: see [rows_of][fsdp_ref.row_shards.rows_of].

    Args:
        full: The whole, the same on all ranks of the unit.
        placement: Where the unit's weights are; its groups are live.

    Returns:
        A `DTensor` of the whole shape, cut along the first dimension as `torch.chunk` does: the
        last ranks may hold fewer rows, or none. Copied instead of cut where the unit is, and
        where there is no dimension. It owns its memory, and lies where `full` does.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    full = full.detach()
    mesh, group = mesh_of(placement, full.device), placement.shard
    placements: list[Any] = [Replicate()] * mesh.ndim
    local = full
    if full.dim() > 0 and _dimensions(placement)[-1] is group:
        placements[-1] = Shard(0)
        pieces = full.chunk(group.size)
        local = pieces[group.rank] if group.rank < len(pieces) else full[:0]
    # Cloned, because a view would keep the whole unit alive.
    local = local.clone(memory_format=torch.contiguous_format)
    stride = torch.empty(full.shape, device="meta").stride()
    shared: Any = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=stride
    )
    at_rest: DTensor = shared if shared.device == full.device else shared.to(full.device)
    return at_rest


def is_cut(value: object) -> bool:
    """Return whether a value is a `DTensor`, without importing what that is."""
    return hasattr(value, "full_tensor") and hasattr(value, "device_mesh")


def whole(value: Tensor) -> Tensor:
    """Return the whole of a tensor that may be cut. Collective for a `DTensor`.

    Args:
        value: A `DTensor` on any mesh that this rank is in, cut in any way; or a plain tensor.

    Returns:
        All of it, on every rank of the mesh. A plain tensor as it is.
    """
    if not is_cut(value):
        return value
    cut_value: Any = value.detach()
    # Sent from where the mesh is, if it was offloaded since.
    full: Tensor = cut_value.to(cut_value.device_mesh.device_type).full_tensor()
    return full.to(value.device)


def stored_name(name: str, placement: Placement) -> str:
    """Return the name under which a file holds this rank's version of a weight.

    Local, but for a hybrid strategy at first use: see [rows_of][fsdp_ref.row_shards.rows_of].

    Args:
        name: The plain model's name.
        placement: Where the unit's weights are.

    Returns:
        The name itself if the unit is shared, or copied, over all ranks. Otherwise the name and
        the first rank that has this version, such as `"experts.0.weight@rank2"`.
    """
    if placement.size == dist.get_world_size():
        return name
    return f"{name}@rank{min(map(min, rows_of(placement)))}"
