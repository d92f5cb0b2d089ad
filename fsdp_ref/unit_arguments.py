"""Which arguments one unit gets: what several voices say, put in one order, and checked.

[fsdp_ref.wrapping][] has the order as a table. Nothing is wrapped here.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn

from fsdp_ref.errors import FSDPError, PolicyError
from fsdp_ref.marks import Wish, config_of, wish_of
from fsdp_ref.precision import as_precision

Wrapper: TypeAlias = Callable[..., nn.Module]

_ONE_OF_TWO = {"process_group": "device_mesh", "device_mesh": "process_group"}
_OF_ALL_UNITS = {
    "module": "It is the module that the unit wraps.",
    "auto_wrap_policy": "The policy that is being applied looks inside all modules.",
    "bucket_cap_mb": "Only the outermost unit's counts.",
}
"""Arguments that nobody can say for a single unit under a policy, and why."""


def layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Put arguments on top of each other; the later ones win. Local.

    Args:
        *layers: Arguments, the weakest first.

    Returns:
        All of them. A process group does away with a device mesh below it, and the other way
        around, because a unit takes only one of them.

    Examples:
        >>> layered({"device_mesh": "a mesh"}, {"process_group": "self"})
        {'process_group': 'self'}
    """
    chosen: dict[str, Any] = {}
    for layer in layers:
        for said, instead in _ONE_OF_TWO.items():
            if layer.get(said) is not None and layer.get(instead) is None:
                chosen.pop(instead, None)
        chosen |= layer
    return chosen


def marked_arguments(
    module: nn.Module, where: str, weaker: Iterable[tuple[str, Wish]] = ()
) -> list[tuple[str, dict[str, Any]]]:
    """Return who says which arguments for a module's own unit, the weakest voice first. Local.

    Args:
        module: The module.
        where: Its place, for messages.
        weaker: Names and answers of those whom the module itself overrules.

    Returns:
        Pairs of a name for messages and arguments.

    Raises:
        PolicyError: If a mark of the module is not what such a mark can be.
    """
    said: list[tuple[str, Any]] = [*weaker, ("_fsdp_wrap", wish_of(module, where))]
    said.append(("wrapper_config", config_of(module, where)))
    return [(who, dict(answer)) for who, answer in said if isinstance(answer, dict)]


def own_overrides(
    said: Iterable[tuple[str, dict[str, Any]]], wrapper_cls: Wrapper, where: str
) -> tuple[Wrapper, dict[str, Any]]:
    """Combine what several say for one unit, and check it against what the wrapper takes. Local.

    Args:
        said: Pairs of a name for messages and arguments, the weakest first.
        wrapper_cls: What to wrap with, unless one of them names another as `wrapper_cls`.
        where: The unit, for messages.

    Returns:
        What to wrap with, and the arguments of this unit alone.

    Raises:
        PolicyError: If the wrapper does not take an argument, or if it cannot differ per unit.
    """
    said = list(said)
    for _, arguments in said:
        wrapper_cls = arguments.pop("wrapper_cls", wrapper_cls)
    for who, arguments in said:
        refuse_shared(arguments, f"{where}, {who}")
        refuse_unknown_arguments(
            arguments, wrapper_cls, f"{where}, {who}", PolicyError, _OF_ALL_UNITS
        )
    return wrapper_cls, layered(*(arguments for _, arguments in said))


def refuse_shared(arguments: Mapping[str, Any], where: str) -> None:
    """Raise for an argument that cannot be another one for a single unit.

    Args:
        arguments: Arguments of one unit.
        where: Who says them, for messages.

    Raises:
        PolicyError: If there is one.
    """
    for name, why in _OF_ALL_UNITS.items():
        if name in arguments:
            raise PolicyError.at(
                where,
                expected="arguments that may differ from unit to unit",
                found=repr(name),
                fix=f"Leave it out. {why}",
            )


def refuse_unknown_arguments(
    arguments: Mapping[str, Any],
    wrapper_cls: Wrapper,
    where: str,
    error_class: type[FSDPError],
    hidden: Iterable[str] = (),
) -> None:
    """Raise if a wrapper does not take an argument, and name the nearest one that it takes.

    Args:
        arguments: The arguments.
        wrapper_cls: The wrapper.
        where: Who says them, for messages.
        error_class: What to raise.
        hidden: Arguments that it takes, but that may not be given here.
    """
    parameters = list(inspect.signature(wrapper_cls).parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [p.name for p in parameters[1:] if p.kind in kinds and p.name not in hidden]
    for key in arguments:
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            raise error_class.at(
                where,
                expected=f"arguments among {', '.join(known) or 'none'}",
                found=repr(key),
                fix=f"Did you mean {nearest[0]!r}?" if nearest else "The wrapper takes none.",
            )


def between_other_dtypes(
    overrides: dict[str, Any], defaults: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Let a unit that got a precision of its own, in one word, work between the other units. Local.

    Its inputs come in the dtype of the units around it, and these expect its outputs in theirs.
    Torch's object and a dict say themselves what is cast; a word means that it works.

    Args:
        overrides: The arguments of this unit alone.
        defaults: Those of all units.
        where: The unit, for messages.

    Returns:
        The same, with a `mixed_precision` that casts on the way in and back on the way out, if
        there is a word for one that differs from that of all units.

    Raises:
        PrecisionError: If a `mixed_precision` is not understood.
    """
    word = overrides.get("mixed_precision")
    if not isinstance(word, str | torch.dtype) and word is not True:
        return overrides
    own, common = (as_precision(given, where) for given in (word, defaults.get("mixed_precision")))
    if own == common:
        return overrides
    casting = replace(own, cast_forward_inputs=True, cast_forward_outputs=True)
    return {**overrides, "mixed_precision": casting}
