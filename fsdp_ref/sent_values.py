"""Values that only the first rank has: the others hear of them at once, and get each in its turn.

So a whole model can be loaded from one rank's memory, without a second copy of it anywhere.
"""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_ref.agreement import exchange_through
from fsdp_ref.collectives import broadcast, explained
from fsdp_ref.errors import LoadError
from fsdp_ref.rank_group import RankGroup
from fsdp_ref.recording import record
from fsdp_ref.row_shards import is_cut, whole
from fsdp_ref.stand_ins import StandIn


class SentValue(StandIn):
    """Stands for a value of the first rank until all ranks fetch it."""

    _mine: Tensor | None
    _groups: Sequence[RankGroup]

    @classmethod
    def of(
        cls,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        mine: Tensor | None,
        groups: Sequence[RankGroup],
    ) -> SentValue:
        """Stand for one value.

        Args:
            name: What it is called.
            shape: Its shape.
            dtype: Its dtype.
            mine: The value, on the first rank.
            groups: Who takes part: one group, or two that are the rows and columns of a grid.
        """
        self = cls(name, shape, torch.empty(0, dtype=dtype))
        self._mine, self._groups = mine, groups
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves out `func`
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Be its own detached self; refuse everything else."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def fetch(self) -> Tensor:
        """Return the value. Collective: all ranks fetch the same ones in the same order.

        Raises:
            SilentRanksError: If a rank does not take part.
        """
        full = torch.empty(self.shape, dtype=self.dtype) if self._mine is None else self._mine
        full = full.detach().contiguous()
        for group in self._groups:  # along the first row, then down all columns
            with explained(f"'{self._name}', from the first rank", [group]):
                sent = broadcast([full], group)
            record("load_state_dict()", "idle", "broadcast",
                   bytes_on_wire=sent, group=group.ranks, dtype=self.dtype)  # fmt: skip
        return full


def fetched(value: Any) -> Any:
    """Return a value that may be cut or with the first rank, whole and here. Then collective."""
    return value.fetch() if isinstance(value, SentValue) else whole(value)


def sent_by_first(state_dict: Mapping[str, Any], groups: Sequence[RankGroup]) -> dict[str, Any]:
    """Let the first rank tell all others what its state dict has. Collective.

    Args:
        state_dict: The dict; what other ranks hand in is not looked at.
        groups: Who takes part: one group, or two that are the rows and columns of a grid.

    Returns:
        The same keys on every rank. Tensors are sent when they are fetched; other values, such as
        extra state, are there.

    Raises:
        LoadError: On every rank, if the first rank has `DTensor`s, or an object in extra state
            that cannot be read back without running code.
        SilentRanksError: If a rank does not take part.
    """
    is_first = all(group.rank == 0 for group in groups)
    given = state_dict if is_first else {}
    blobs = {name: _packed(v) for name, v in given.items() if not isinstance(v, Tensor)}
    told = [
        [name, list(value.shape), str(value.dtype).removeprefix("torch.")]
        if isinstance(value, Tensor)
        else [name, None, blobs[name].numel()]
        for name, value in given.items()
    ]
    cut = [name for name, value in given.items() if is_cut(value)]
    unsafe = [name for name, blob in blobs.items() if not _can_be_read(blob)]
    text = json.dumps([told, getattr(state_dict, "_metadata", {}), cut, unsafe]) if is_first else ""
    heard = exchange_through("state dict to load", text, [group.ranks for group in groups])
    told, versions, cut, unsafe = json.loads(next(text for text in heard.values() if text))
    if cut or unsafe:
        raise LoadError.at(
            "state dict of the first rank",
            expected="whole tensors" if cut else "extra state of tensors, numbers and words",
            found=f"DTensors: {cut}" if cut else f"objects: {unsafe}",
            fix="Load it on every rank instead, without broadcast_from_rank0.",
        )
    result: Any = OrderedDict()
    result._metadata = versions
    for name, shape, kind in told:
        if shape is None:
            result[name] = _sent_object(name, kind, blobs.get(name), groups)
        else:
            result[name] = SentValue.of(name, shape, getattr(torch, kind), given.get(name), groups)
    received: dict[str, Any] = result
    return received


def _packed(value: Any) -> Tensor:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _read(blob: Tensor) -> Any:
    return torch.load(io.BytesIO(bytes(blob.tolist())), weights_only=True)


def _can_be_read(blob: Tensor) -> bool:
    try:
        _read(blob)
    except Exception:  # pickle raises several kinds
        return False
    return True


def _sent_object(name: str, nbytes: int, blob: Tensor | None, groups: Sequence[RankGroup]) -> Any:
    return _read(SentValue.of(name, [nbytes], torch.uint8, blob, groups).fetch())
