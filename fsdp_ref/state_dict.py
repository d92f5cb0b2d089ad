"""The full state dict: the plain model's keys and shapes, whatever the number of ranks.

Export is a pure read and gathers one unit at a time. Loading needs no communication: each
rank copies its own part of every full value.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fsdp_ref.exact import exact_parameters
from fsdp_ref.unit import Unit

WRAPPED = "_fsdp_wrapped_module."
"""What wrapping inserts into names; the name of the attribute that holds the module."""


def clean_name(name: str) -> str:
    """Return a parameter's or module's name without the wrappers in between.

    Examples:
        >>> clean_name("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.weight")
        'layers.0.weight'
    """
    return name.replace(WRAPPED, "")


def fill_in_full_values(unit: Unit, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace a unit's parameters in ``state_dict`` by copies of their full values. Collective.

    Args:
        unit: The unit, whose parameters are in ``state_dict`` as objects, perhaps without
            memory behind them.
        state_dict: The dict to change, in place; the order of keys stays.
        prefix: What the unit's names begin with.
    """
    was_sharded = unit.unsharded_bytes == 0
    with nullcontext() if unit.summoned else exact_parameters(unit):
        for original in [o for flat_param in unit.flat_params for o in flat_param._originals]:
            # One copy per parameter: aliases of a tied parameter share it, as in a plain model.
            value = original.parameter.detach().clone()
            value.requires_grad_(original.parameter.requires_grad)
            for _, _, name in original.places:
                if prefix + name in state_dict:
                    state_dict[prefix + name] = value
    if was_sharded:
        unit.reshard()


def strip_wrapped(state_dict: dict[str, Any], prefix: str) -> None:
    """Remove the wrapper's part from all keys that begin with ``prefix``, keeping the order."""
    metadata = getattr(state_dict, "_metadata", {})  # torch's note of each module's version
    for keyed in (state_dict, metadata):
        items = list(keyed.items())
        keyed.clear()
        for key, value in items:
            if f"{key}." == prefix + WRAPPED:
                key = prefix.removesuffix(".")
            elif key.startswith(prefix):
                key = prefix + key[len(prefix) :].removeprefix(WRAPPED)
            keyed[key] = value


def restore_dtypes(
    state_dict: dict[str, Any], prefix: str, dtypes: Mapping[str, torch.dtype]
) -> None:
    """Give exported buffers the dtypes that they had before they were cast.

    Args:
        state_dict: The dict to change, in place.
        prefix: What the unit's names begin with.
        dtypes: Names and dtypes.
    """
    for name, dtype in dtypes.items():
        if prefix + name in state_dict:
            state_dict[prefix + name] = state_dict[prefix + name].to(dtype)


def take_own_values(
    unit: Unit,
    state_dict: dict[str, Any],
    prefix: str,
    missing: list[str],
    errors: list[str],
) -> None:
    """Load a unit's own parameters out of ``state_dict`` and remove them from it. Local.

    Args:
        unit: The unit to load.
        state_dict: Full values under the plain model's names, prefixed.
        prefix: What the unit's names begin with.
        missing: Receives the keys that are not there.
        errors: Receives one message per value of the wrong shape.
    """
    unit.reshard()  # full parameters gathered earlier are stale from here on
    for flat_param in unit.flat_params:
        for index, original in enumerate(flat_param._originals):
            for _, _, name in original.places:
                key = prefix + name
                if key not in state_dict:
                    missing.append(key)
                    continue
                value = state_dict.pop(key)
                if not isinstance(value, Tensor) or value.shape != original.parameter.shape:
                    found = tuple(value.shape) if isinstance(value, Tensor) else type(value)
                    errors.append(
                        f"size mismatch for {key}: expected {tuple(original.parameter.shape)} "
                        f"as in the model, found {found} in the state dict."
                    )
                    continue
                with torch.no_grad():
                    flat_param.write_slice(index, value)


def insert_wrapped(state_dict: dict[str, Any], prefix: str) -> None:
    """Undo `strip_wrapped`, so that the wrapped module finds its keys when it is loaded."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[prefix + WRAPPED + key[len(prefix) :]] = state_dict.pop(key)
