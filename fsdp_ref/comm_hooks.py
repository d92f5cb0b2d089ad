"""Communication hooks: functions of the reader that reduce gradients themselves."""

from __future__ import annotations

from typing import Any

from fsdp_ref.errors import OptionError
from fsdp_ref.unit import Unit


def refuse_comm_hook(unit: Unit, hook: Any) -> None:
    """Raise if a hook cannot reduce the gradient of a unit.

    Args:
        unit: The unit.
        hook: What is to be registered.

    Raises:
        OptionError: If it cannot be called, if the unit has a hook already, or if its gradient
            is reduced in two steps.
    """
    cut_and_copied = unit.group.size > 1 and unit.placement.copies > 1
    found = (
        f"{hook!r}, which cannot be called"
        if not callable(hook)
        else "a hook that was registered before"
        if unit.has_comm_hook
        else "a hybrid unit, whose gradient is reduced in two steps"
        if cut_and_copied
        else None
    )
    if found is not None:
        raise OptionError.at(
            f"{unit.where}, register_comm_hook",
            expected="a function, registered once, on units that are cut or copied, not both",
            found=found,
            fix="Combine everything into one function.",
        )
