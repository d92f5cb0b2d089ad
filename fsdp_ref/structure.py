"""The structure of a sharded model in words, so that ranks can compare theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fsdp_ref.rank_group import Placement
from fsdp_ref.unit import Unit

_models: Counter[tuple[int, ...]] = Counter()


def count_models(placement: Placement) -> int:
    """Return how many units were built over the same ranks so far, equal on all of them."""
    ranks = tuple(rank for group in placement.groups for rank in group.ranks)
    _models[ranks] += 1
    return _models[ranks]


def describe_units(units: Sequence[Unit], number: int) -> str:
    """Write down what all ranks must have in common, one fact in each line.

    Args:
        units: All units of a model, root first.
        number: Which of the models built over these ranks it is.

    Returns:
        The lines.
    """
    lines = [f"model number {number} over these ranks"]
    for unit in units:
        # Not how many ranks share it: groups of one unit may differ in size.
        copied = "" if unit.placement.replicate is None else ", in copies"
        kept = "" if unit.placement.reshard_after_forward else ", kept whole after a forward"
        lines.append(f"{unit.where}{copied}{kept}")
        lines.append(f"{unit.where}: {unit.options}")
        for flat_param in unit.flat_params:
            kind = f"{flat_param.dtype}, {'trainable' if flat_param.requires_grad else 'frozen'}"
            lines += [
                f"{unit.where}: '{slot.name}' {slot.shape} {kind}"
                for slot in flat_param._layout.slots
            ]
    return "\n".join(lines)
