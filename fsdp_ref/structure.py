"""The structure of a sharded model in words, so that ranks can compare theirs."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_ref.unit import Unit


def describe_units(units: Sequence[Unit]) -> str:
    """Write down what all ranks must have in common, one fact in each line."""
    lines = []
    for unit in units:
        copies = f" in {unit.placement.copies} copies" if unit.placement.copies > 1 else ""
        lines.append(f"{unit.where} over {unit.group.size} ranks{copies}")
        for flat_param in unit.flat_params:
            kind = f"{flat_param.dtype}, {'trainable' if flat_param.requires_grad else 'frozen'}"
            lines += [
                f"{unit.where}: '{slot.name}' {slot.shape} {kind}"
                for slot in flat_param._layout.slots
            ]
    return "\n".join(lines)
