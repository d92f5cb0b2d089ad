"""Small units share messages: a bucket is a few consecutive units that are sent together.

A message costs the same below some size, however short it is. A model of many small units spends
its time on messages, not on bytes. So once all ranks have gone through one step in the same order,
consecutive small units of that order form buckets. The first unit of a bucket that is needed
gathers all of them, by one message per rank; each unit then takes its own parameters out when its
turn comes, and drops them alone. In the backward the gradients of a bucket wait for each other and
leave together.

# What it costs

What waits in a bucket is memory. So a bucket is bounded by a *cap* in bytes of full parameters, its
largest unit counted twice: that one is in memory once in the message and once unpacked. The cap is
one eighth of all parameters outside the root, or what `bucket_cap_mb` says. A cap above the size
of the model would gather it whole.

Under full sharding the full parameters in memory never exceed the root plus two times the larger of
the cap and the largest unit. Where a strategy keeps them, they exceed the whole model by the cap at
most, while units take theirs out of a message.

Tip: Let small units be small
    Units decide what is in memory at once, so small units are good for memory. Messages are
    shared, so they are not bad for time. If memory is tight, `bucket_cap_mb=0` gathers one at a
    time; if time is, a larger cap joins more of them.

    Proof: options/small_units

# What stays as it is

A unit keeps its flat parameters, and the optimizer sees the same as before. Numbers do not change,
to the last bit: a sum over ranks is the same sum, whatever lies beside it in a message. The
timeline lists every unit with its bytes; `together_with` names the unit in whose message it went.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp_ref.collectives import PendingReduction, explained, start_joint_reduce_scatter
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.unit import Unit
from fsdp_ref.unit_state import alike

_MEGABYTE = 1_000_000


def form_buckets(order: Sequence[Unit], root: Unit) -> None:
    """Put consecutive small units into buckets. Local, and the same on all ranks.

    Args:
        order: The units in the order of a forward that all ranks have gone through.
        root: The outermost unit, which stays on its own; its options say how large buckets are.
    """
    inner = [unit for unit in order if unit is not root]
    cap = _cap(inner, root)
    for bucket in _cut(inner, cap):
        for unit in bucket:
            unit.bucket = bucket if len(bucket) > 1 else ()


def _cap(inner: Sequence[Unit], root: Unit) -> float:
    if root.options.bucket_cap_mb is not None:
        return root.options.bucket_cap_mb * _MEGABYTE
    return sum(map(_bytes_of, inner)) / 8


def _cut(order: Sequence[Unit], cap: float) -> Iterator[list[Unit]]:
    bucket: list[Unit] = []
    for unit in order:
        sizes = [_bytes_of(member) for member in (*bucket, unit)]
        alone = bucket and _companions(bucket[0]) != _companions(unit)
        if bucket and (alone or sum(sizes) + max(sizes) > cap):
            yield bucket
            bucket = []
        bucket.append(unit)
    yield bucket


def _bytes_of(unit: Unit) -> int:
    """Return the bytes of the unit's full parameters, unsharded."""
    return sum(p._layout.padded_numel * p.compute_dtype.itemsize for p in unit.flat_params)


def _companions(unit: Unit) -> object:
    """Return what units must have in common to share messages; equal to nothing if they cannot."""
    device = {flat_param.compute_device for flat_param in unit.flat_params}
    if unit.has_comm_hook or unit.group.size == 1 or len(device) != 1:
        return object()
    return unit.group.ranks, device, unit.placement.reshard_after_forward


def start_reductions(units: Sequence[Unit]) -> Iterator[tuple[FlatParameter, PendingReduction]]:
    """Issue the reduce-scatters of units; those of several by one message per rank. Collective.

    Args:
        units: The units, in the same order on all ranks; several have a bucket in common.

    Yields:
        Each trainable flat parameter, and its reduction in flight.
    """
    sender = units[0]
    if len(units) == 1:
        trainable = [flat_param for flat_param in sender.flat_params if flat_param.requires_grad]
        yield from zip(trainable, sender.start_reduction(), strict=True)
        return
    for number, members in enumerate(alike(units, lambda p: p.gradient_dtype)):
        joined = [(unit, flat_param) for unit, flat_param in members if flat_param.requires_grad]
        if not joined:
            continue
        gradients = [flat_param.hand_over_gradient() for _, flat_param in joined]
        with explained(f"{sender.where}, reduce-scatter", [sender.group]):
            tag = sender.tag(number, reduction=True)
            pending = start_joint_reduce_scatter(gradients, sender.group, tag)
        for unit, flat_param in joined:
            unit.record_reduction(flat_param, sender)
        yield from zip((flat_param for _, flat_param in joined), pending, strict=True)
