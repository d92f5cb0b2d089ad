"""Parameters in their own dtype, for a unit that computes in a lower one.

Where the dtypes are equal, the parameters to compute with are the exact ones, and nothing is
gathered twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fsdp_ref.unit import Unit


@contextmanager
def exact_parameters(unit: Unit) -> Iterator[None]:
    """Let a unit's original parameters hold their full values in their own dtype. Collective.

    The unit is unsharded on the way in and left so; resharding it is up to the caller.

    Args:
        unit: The unit.

    Yields:
        Nothing.
    """
    unit.unshard()
    lower, gathers = [], []
    for number, flat_param in enumerate(unit.flat_params):
        if flat_param.compute_dtype != flat_param.dtype:
            lower.append(flat_param)
            gathers.append(flat_param.start_exact_unshard(unit.tag(number, reduction=False)))
            unit.record_collective("all-gather", flat_param, flat_param.dtype)
    for gather in gathers:
        gather.wait()
    try:
        yield
    finally:
        for flat_param in lower:
            flat_param.free_exact()
