"""The only file that moves tensor data between ranks.

Every function is collective: all ranks of the group call it, with equal sizes and tags.
On CPU, messages go from rank to rank straight into their final place, which sends as few
bytes as possible; the tag carries the unit's number, so ranks that are in different units
get a time-out that Python can catch instead of mixed-up weights. Other devices use their
backend's own all-gather and reduce-scatter, each on a group of its own: there nothing but the
order of the calls says what belongs together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from fsdp_ref.errors import FSDPError, SilentRanksError
from fsdp_ref.rank_group import RankGroup
from fsdp_ref.recording import record, watch


@contextmanager
def explained(where: str, groups: Sequence[RankGroup]) -> Iterator[None]:
    """Turn a backend's error inside the context into one that says who waited for whom.

    Args:
        where: The unit and what it was doing.
        groups: Who takes part.

    Yields:
        Nothing.

    Raises:
        SilentRanksError: If the backend raised, by a time-out or because a peer is gone.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, FSDPError):
            raise
        raise SilentRanksError.at(
            where,
            expected=f"ranks {' and '.join(str(list(g.ranks)) for g in groups)} to take part",
            found=f"no answer from some of them ({error})",
            fix="Do all ranks make the same calls in the same order? Has one of them failed?",
        ) from error


@dataclass(eq=False)
class Parcel:
    """What one message per rank brings to several flat parameters, until all have taken theirs."""

    rows: Tensor  # (group.size, sum of all shard_numel)

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of full parameters in it; they count as live memory."""
        return self.rows.nbytes


@dataclass
class PendingGather:
    """An all-gather in flight; the output may be read after `wait`."""

    works: list[dist.Work] = field(default_factory=list)
    parcel: Parcel | None = None
    columns: slice = field(
        default_factory=lambda: slice(0)
    )  # the part of the parcel that is for this flat parameter

    def wait(self) -> None:
        """Wait until the output is complete, or the parcel is there."""
        for work in self.works:
            work.wait()
        self.works.clear()

    def unpack(self, full: Tensor) -> None:
        """Fill ``full``, ``(group.size * shard_numel,)``, from the parcel; let go of it."""
        if self.parcel is not None:
            rows = self.parcel.rows
            full.view(len(rows), -1).copy_(rows[:, self.columns])
            self.parcel = None


@dataclass
class PendingReduction:
    """A reduce-scatter in flight; `wait` returns this rank's shard of the sum."""

    pieces: list[Tensor]  # (shard_numel,) each; their sum, in this order, is the result
    works: list[dist.Work] = field(default_factory=list)
    source: Tensor | None = None  # kept alive until sent

    def wait(self) -> Tensor:
        """Wait and return the summed shard, of shape ``(shard_numel,)``."""
        for work in self.works:
            work.wait()
        self.works.clear()
        # Cloned, because a view would keep the whole unsharded gradient alive.
        total = self.pieces[0].clone()
        for piece in self.pieces[1:]:
            total += piece
        self.pieces, self.source = [total], None
        return total


def bytes_per_gather(shard_numel: int, dtype: torch.dtype, group: RankGroup) -> int:
    """Return the bytes one rank sends in an all-gather or reduce-scatter of such shards."""
    return (group.size - 1) * shard_numel * dtype.itemsize


def _point_to_point(device: torch.device) -> bool:
    # Not a question of the group: one group may use gloo for CPU tensors and NCCL for others.
    return device.type == "cpu"


def pairs_by_order(device: torch.device) -> bool:
    """Return whether nothing but their order tells the messages of a group apart.

    Such a backend pairs a rank's first collective with the first of every other rank, whatever
    they are. Gathers and reductions then need a group each, since ranks differ in their order.

    Args:
        device: Where the tensors are that are sent.

    Returns:
        `False` on the CPU, where messages carry tags.
    """
    return not _point_to_point(device)


def _exchange(
    outgoing: Tensor, incoming: list[Tensor], group: RankGroup, tag: int
) -> list[dist.Work]:
    """Send row ``i`` of ``outgoing`` to rank ``i``; receive ``incoming[i]`` from rank ``i``."""
    works: list[dist.Work] = []
    for step in range(1, group.size):  # start with the next rank, so that no one is crowded
        target = (group.rank + step) % group.size
        source = (group.rank - step) % group.size
        sent = dist.isend(outgoing[target], group=group.live, group_dst=target, tag=tag)
        received = dist.irecv(incoming[source], group=group.live, group_src=source, tag=tag)
        works += [work for work in (sent, received) if work is not None]
    return works


def start_all_gather(full: Tensor, shard: Tensor, group: RankGroup, tag: int) -> PendingGather:
    """Start to fill ``full`` with the shards of all ranks, in rank order.

    Args:
        full: Output, ``(group.size * shard_numel,)``.
        shard: This rank's piece, ``(shard_numel,)``.
        group: Who takes part.
        tag: Number that keeps messages of different units apart.

    Returns:
        The gather in flight.
    """
    rows = full.view(group.size, -1)
    if group.size == 1 or shard.numel() == 0:
        rows[group.rank].copy_(shard)
        return PendingGather()
    if not _point_to_point(shard.device):
        work = dist.all_gather_single(full, shard, group=group.live, async_op=True)
        return PendingGather([work])
    rows[group.rank].copy_(shard)
    outgoing = shard.expand(group.size, -1)  # the same piece to everyone
    return PendingGather(_exchange(outgoing, list(rows), group, tag))


def start_joint_all_gather(
    shards: Sequence[Tensor], group: RankGroup, tag: int
) -> list[PendingGather]:
    """Start to gather several flat parameters by one message per rank.

    For many small ones: below some size a message costs the same, however short it is.

    Args:
        shards: This rank's pieces, of one dtype and device.
        group: Who takes part.
        tag: Number that keeps messages of different units apart.

    Returns:
        The gathers in flight, one for each shard. Each has to `wait`, and to `unpack`.
    """
    message = torch.cat(list(shards))
    parcel = Parcel(message.new_empty(group.size, message.numel()))
    watch(parcel)
    pending = start_all_gather(parcel.rows.view(-1), message, group, tag)
    return [PendingGather(pending.works, parcel, columns) for columns in _columns(shards)]


def _columns(shards: Iterable[Tensor]) -> list[slice]:
    """Return which part of a long row each shard is, if they lie end to end."""
    stops = list(itertools.accumulate(shard.numel() for shard in shards))
    return [slice(start, stop) for start, stop in itertools.pairwise([0, *stops])]


@dataclass(frozen=True)
class CommHook:
    """A function that reduces gradients in place of the reduce-scatter.

    Attributes:
        state: Handed to it first.
        hook: Takes the state, the whole gradient and, where the unit is cut, the shard to fill.
    """

    state: Any
    hook: Callable[..., Any]


def run_hook(comm_hook: CommHook, gradient: Tensor, group: RankGroup) -> PendingReduction:
    """Let a hook reduce ``gradient``; the result may be read at once.

    Args:
        comm_hook: The hook and its state.
        gradient: Input, ``(group.size * shard_numel,)``, not divided by anything.
        group: Who shares the unit.

    Returns:
        The finished reduction.
    """
    if group.size == 1:
        comm_hook.hook(comm_hook.state, gradient)
        return PendingReduction([gradient])
    shard = gradient.new_empty(gradient.numel() // group.size)
    comm_hook.hook(comm_hook.state, gradient, shard)
    return PendingReduction([shard])


def start_reduce_scatter(gradient: Tensor, group: RankGroup, tag: int) -> PendingReduction:
    """Start to sum ``gradient`` over the ranks, each rank keeping its own slice.

    Args:
        gradient: Input, ``(group.size * shard_numel,)``; do not touch it before `wait`.
        group: Who takes part.
        tag: Number that keeps messages of different units apart.

    Returns:
        The reduction in flight.
    """
    rows = gradient.view(group.size, -1)
    mine = rows[group.rank]
    if group.size == 1 or mine.numel() == 0:
        return PendingReduction([mine])
    if not _point_to_point(mine.device):
        total = torch.empty_like(mine)
        on = group.live_for_reductions
        work = dist.reduce_scatter_single(total, gradient, group=on, async_op=True)
        return PendingReduction([total], [work], gradient)
    pieces = [mine if i == group.rank else torch.empty_like(mine) for i in range(group.size)]
    return PendingReduction(pieces, _exchange(rows, pieces, group, tag), gradient)


def start_joint_reduce_scatter(
    gradients: Sequence[Tensor], group: RankGroup, tag: int
) -> list[PendingReduction]:
    """Start to sum several gradients over the ranks, by one message per rank.

    Args:
        gradients: Inputs of one dtype and device, each ``(group.size * shard_numel,)``.
        group: Who takes part.
        tag: Number that keeps messages of different units apart.

    Returns:
        The reductions in flight, one for each gradient.
    """
    rows = [gradient.view(group.size, -1) for gradient in gradients]
    joint = start_reduce_scatter(torch.cat(rows, dim=1).view(-1), group, tag)
    return [
        PendingReduction([piece[columns] for piece in joint.pieces], joint.works, joint.source)
        for columns in _columns(row[0] for row in rows)
    ]


def gather_versions_of_my_slice(full: Tensor, group: RankGroup, tag: int) -> list[Tensor]:
    """Ask every rank what it holds in the slice that this rank owns.

    Args:
        full: This rank's copy of everything, ``(group.size * shard_numel,)``.
        group: Who takes part.
        tag: Number that keeps messages of different units apart.

    Returns:
        One tensor ``(shard_numel,)`` per rank, in rank order; the own one is a view.
    """
    rows = full.view(group.size, -1)
    mine = rows[group.rank]
    if group.size == 1 or mine.numel() == 0:
        return [mine]
    versions = [mine if i == group.rank else torch.empty_like(mine) for i in range(group.size)]
    if _point_to_point(mine.device):
        for work in _exchange(rows, versions, group, tag):
            work.wait()
        return versions
    received = torch.empty_like(full)
    dist.all_to_all_single(received, full, group=group.live)
    return list(received.view(group.size, -1))


def start_gather(
    full: Tensor | None, shard: Tensor, group: RankGroup, receiver: int, tag: int
) -> PendingGather:
    """Start to fill ``full`` on one rank only; the others send their shard and pay nothing.

    Args:
        full: Output on the receiver, ``(group.size * shard_numel,)``; `None` on the others.
        shard: This rank's piece, ``(shard_numel,)``.
        group: Who takes part.
        receiver: Position in the group of the rank that wants it.
        tag: Number that keeps messages of different units apart.

    Returns:
        The gather in flight; keep ``shard`` until it is over.
    """
    rows = None if full is None else list(full.view(group.size, -1))
    if rows is not None:
        rows[group.rank].copy_(shard)
    if group.size == 1 or shard.numel() == 0:
        return PendingGather()
    if not _point_to_point(shard.device):
        work = dist.gather(shard, rows, group=group.live, group_dst=receiver, async_op=True)
        return PendingGather([work])
    if rows is None:
        works = [dist.isend(shard, group=group.live, group_dst=receiver, tag=tag)]
    else:
        senders = [rank for rank in range(group.size) if rank != receiver]
        works = [dist.irecv(rows[i], group=group.live, group_src=i, tag=tag) for i in senders]
    return PendingGather([work for work in works if work is not None])


def scatter(full: Tensor | None, mine: Tensor, group: RankGroup, sender: int, tag: int) -> None:
    """Fill ``mine`` on every rank with its slice of what one rank holds.

    Args:
        full: Input on the sender, ``(group.size * shard_numel,)``; `None` on the others.
        mine: Output, ``(shard_numel,)``.
        group: Who takes part.
        sender: Position in the group of the rank that holds it.
        tag: Number that keeps messages of different units apart.
    """
    rows = None if full is None else list(full.view(group.size, -1))
    if rows is not None:
        mine.copy_(rows[group.rank])
    if group.size == 1 or mine.numel() == 0:
        return
    if not _point_to_point(mine.device):
        dist.scatter(mine, rows, group=group.live, group_src=sender)
        return
    if rows is None:
        works = [dist.irecv(mine, group=group.live, group_src=sender, tag=tag)]
    else:
        receivers = [rank for rank in range(group.size) if rank != sender]
        works = [dist.isend(rows[i], group=group.live, group_dst=i, tag=tag) for i in receivers]
    PendingGather([work for work in works if work is not None]).wait()


def bytes_per_all_reduce(values: Tensor, group: RankGroup) -> int:
    """Return the bytes one rank sends in an all-reduce of ``values``, done in a ring."""
    return 2 * (group.size - 1) * values.nbytes // group.size


def record_all_reduce(call: str, values: Tensor, groups: Sequence[RankGroup]) -> None:
    """Record an all-reduce that concerns the model as a whole, not one unit.

    Args:
        call: The method on whose behalf, such as ``"clip_grad_norm_()"``.
        values: What is about to be combined.
        groups: Who takes part.
    """
    for group in groups:
        sent = bytes_per_all_reduce(values, group)
        record(call, "idle", "all-reduce",
               bytes_on_wire=sent, group=group.ranks, dtype=values.dtype)  # fmt: skip


def add_up_gradients(shard: Tensor, group: RankGroup) -> Tensor:
    """Add up a reduced gradient shard over the copies of a unit, in place, and return it.

    Args:
        shard: This rank's shard, ``(shard_numel,)``, summed over the ranks of its copy.
        group: The ranks that hold the same shard of each copy.

    Returns:
        ``shard``, summed over all copies.
    """
    if group.size > 1:
        dist.all_reduce(shard, op=dist.ReduceOp.SUM, group=group.live_for_reductions)
    return shard


def all_reduce(values: Tensor, op: dist.ReduceOp.RedOpType, groups: Sequence[RankGroup]) -> Tensor:
    """Combine ``values`` over the ranks of all groups, in place, and return them.

    Args:
        values: Any shape, equal on all ranks.
        op: For example ``dist.ReduceOp.SUM``.
        groups: Who takes part: one group, or two that are the rows and columns of a grid.

    Returns:
        ``values``, combined.
    """
    for group in groups:
        if group.size > 1:
            dist.all_reduce(values, op=op, group=group.live)
    return values


_BROADCAST_TAG = 2**31 - 1  # no unit's number


def travel_device(tensor: Tensor, device: torch.device | None) -> torch.device:
    """Return from which device a tensor can be sent through the default process group.

    Args:
        tensor: What is to be sent.
        device: Where it will live, if that is known.

    Returns:
        ``device``, or the tensor's own; the accelerator if the backend does not serve that.
    """
    preferred = device or tensor.device
    served = distributed_c10d._get_default_group()._device_types
    if preferred in served or torch.device(preferred.type) in served:
        return preferred
    return torch.device(served[0].type, torch.accelerator.current_device_index())


def broadcast(
    tensors: Sequence[Tensor], group: RankGroup, device: torch.device | None = None
) -> int:
    """Overwrite ``tensors`` on every rank with what the group's first rank holds.

    The group need not be live: then the tensors go from rank to rank through the default
    process group, each rank handing on what it got, so that no rank sends to all others.

    Args:
        tensors: Of any shapes and dtypes, equal on all ranks; written in place.
        group: Who takes part.
        device: Where the tensors will live, if they have to be sent from there.

    Returns:
        The bytes that this rank has sent.
    """
    if group.size == 1:
        return 0
    targets = _targets_in_tree(group)
    for tensor in tensors:
        travelling = tensor.detach().to(travel_device(tensor, device)).contiguous()
        # As bytes, so that any dtype can be sent.
        raw = travelling.as_strided((travelling.numel(),), (1,)).view(torch.uint8)
        if group.process_group is not None:
            dist.broadcast(raw, group=group.live, group_src=0)
        else:
            if group.rank > 0:
                source = group.ranks[group.rank & (group.rank - 1)]
                dist.recv(raw, source, tag=_BROADCAST_TAG)
            works = [dist.isend(raw, group.ranks[i], tag=_BROADCAST_TAG) for i in targets]
            for work in works:
                if work is not None:
                    work.wait()
        if group.rank > 0:
            tensor.detach().copy_(travelling)
    return len(targets) * sum(tensor.nbytes for tensor in tensors)


def _targets_in_tree(group: RankGroup) -> list[int]:
    """Return the positions to which this rank hands on what it got: a binomial tree from 0."""
    steps = [1 << bit for bit in reversed(range(group.size.bit_length()))]
    lowest = group.rank & -group.rank or group.size
    return [group.rank + s for s in steps if s < lowest and group.rank + s < group.size]
