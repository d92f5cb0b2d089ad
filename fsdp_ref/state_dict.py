"""The full state dict: the plain model's keys and shapes, whatever the number of ranks.

Export is a pure read and gathers one unit at a time. A unit's full values are copied, registered
under the parameters' names, and dropped from the module again once they are in the dict. So
hooks that were registered on the modules inside run as on the plain model: they get the plain
model's prefix, and find whole values under the plain model's keys. How a state dict is loaded
stands in [fsdp_ref.loading][].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_ref.errors import SummonContextError
from fsdp_ref.exact import exact_values
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.naming import WRAPPED
from fsdp_ref.originals import OriginalParameter
from fsdp_ref.unit import Unit


def clean_name(name: str) -> str:
    """Return a parameter's or module's name without the wrappers in between.

    Examples:
        >>> clean_name("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.weight")
        'layers.0.weight'
    """
    return name.replace(f"{WRAPPED}.", "")


@contextmanager
def full_copies_registered(unit: Unit) -> Iterator[None]:
    """Let a unit's modules register copies of the full parameters. Collective, unless summoned.

    Nothing stays gathered meanwhile: the next unit can be gathered inside.

    Args:
        unit: The unit.

    Yields:
        Nothing.

    Raises:
        SummonContextError: If it is summoned, and another rank is the only one to see it.
    """
    refuse_unseen(unit, "state_dict()")
    if unit.summoned:
        copies = {original: _copy(original.parameter) for original in _originals(unit)}
    else:
        with exact_values(unit):
            copies = {
                original: _copy(full, original.parameter.requires_grad)
                for flat_param in unit.flat_params
                for original, full in _whole(flat_param)
            }
    with registered_instead(unit, copies):
        yield


def refuse_unseen(unit: Unit, where: str) -> None:
    """Raise where a unit is summoned and this rank does not see it.

    Args:
        unit: The unit.
        where: What was called, for the message.

    Raises:
        SummonContextError: If so.
    """
    if unit.summoned and any(flat_param._exact is None for flat_param in unit.flat_params):
        raise SummonContextError.at(
            f"{where} of {unit.where}",
            expected="a call on the rank that sees the parameters",
            found="a rank that does not, inside summon_full_params(rank0_only=True)",
            fix="Make the call on that rank only, or on all ranks outside of the context.",
        )


@contextmanager
def registered_instead(unit: Unit, tensors: Mapping[OriginalParameter, Tensor]) -> Iterator[None]:
    """Let a unit's modules register other tensors under the parameters' names.

    Args:
        unit: The unit.
        tensors: What to register for each original parameter.

    Yields:
        Nothing; the order of names is that of the plain model.
    """
    with unit.registered.names_shown():
        places = [
            (module._parameters, attribute, tensor)
            for original, tensor in tensors.items()
            for module, attribute, _ in original.places
        ]
        before = [register.get(attribute) for register, attribute, _ in places]
        try:
            for register, attribute, tensor in places:
                register[attribute] = tensor  # type: ignore[assignment]  # no nn.Parameter, for a while
            yield
        finally:
            for (register, attribute, _), parameter in zip(places, before, strict=True):
                register[attribute] = parameter


def _originals(unit: Unit) -> list[OriginalParameter]:
    return [original for flat_param in unit.flat_params for original in flat_param._originals]


def _whole(flat_param: FlatParameter) -> Iterator[tuple[OriginalParameter, Tensor]]:
    for slot, original in zip(flat_param._layout.slots, flat_param._originals, strict=True):
        yield original, flat_param.shown[slot.offset : slot.stop].view(slot.shape)


def _copy(value: Tensor, requires_grad: bool | None = None) -> nn.Parameter:
    # Memory of its own: a view would keep the whole unit alive, and drag it into a file.
    trainable = value.requires_grad if requires_grad is None else requires_grad
    return nn.Parameter(value.detach().clone(), requires_grad=trainable)


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
