"""The plan: which modules will become units, with which arguments, and why it could not work.

Everything is asked and checked here before the first module is wrapped. A refused model is
still the plain model that it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fsdp_ref.asking import AnyOf, answers_of
from fsdp_ref.errors import AlreadyWrappedError, PolicyError, TiedParametersError
from fsdp_ref.initialize import refuse_deferred
from fsdp_ref.marks import Wish, root_says_wrap
from fsdp_ref.naming import where_is
from fsdp_ref.options import as_options
from fsdp_ref.originals import (
    NOTHING_IGNORED,
    Ignored,
    collect_originals,
    is_unit,
    refuse_parameters,
)
from fsdp_ref.precision import Precision, as_precision
from fsdp_ref.strategies import PLACE_ARGUMENTS, place
from fsdp_ref.unit_arguments import (
    Wrapper,
    between_other_dtypes,
    layered,
    marked_arguments,
    own_overrides,
)


@dataclass(frozen=True)
class PlannedUnit:
    """A module that will become a unit.

    Attributes:
        name: Its dotted name from the module that the policy was applied to; empty for that.
        module: The module.
        wrapper_cls: What it will be wrapped with.
        overrides: Arguments for this unit that differ from those of all others.
        is_chosen: Whether the policy selected it, rather than an exemption from mixed precision.
    """

    name: str
    module: nn.Module
    wrapper_cls: Wrapper
    overrides: dict[str, Any] = field(default_factory=dict)
    is_chosen: bool = True


class _Exemption(dict[str, Any]):
    """The arguments of a unit that no policy selected, but that needs another precision."""


def plan_units(
    root: nn.Module,
    policy: Any,
    wrapper_cls: Wrapper,
    defaults: Mapping[str, Any],
    ignored: Ignored = NOTHING_IGNORED,
) -> list[PlannedUnit]:
    """Ask a policy about a whole tree, and refuse what could not work. Changes nothing. Local.

    Args:
        root: The tree.
        policy: Which modules become units.
        wrapper_cls: What to wrap with.
        defaults: Arguments for each wrapper, unless the policy returns others for it.
        ignored: What units leave alone.

    Returns:
        The units, inner before outer; the last one may be `root` itself.

    Raises:
        AlreadyWrappedError: If `root` is or contains a unit already.
        PolicyError: If the policy is none, or returns something else than a bool or a dict of
            arguments that the wrapper takes for one unit; or if a mark is not such an answer.
        PrecisionError: If a `mixed_precision` is not understood.
        OptionError: If another argument for a unit is not understood.
        TiedParametersError: If the policy would put one parameter into two units.
    """
    _refuse_wrapped(root, wrapper_cls, ignored)
    asked = AnyOf([policy, _exempt_from(defaults)]) if is_unit_class(wrapper_cls) else policy
    of_root = root_says_wrap(root)
    units = [
        _planned(answer, name, module, wrapper_cls, of_root)
        for name, module, answer in answers_of(root, asked, defaults, ignored)
    ]
    _refuse_split_ties(root, units, ignored)
    if is_unit_class(wrapper_cls):
        originals = collect_originals(root, ignored)
        refuse_parameters(originals, where_is(""), may_be_on_meta=True)  # the wrapper knows
        units = [_for_a_unit(unit, defaults) for unit in units]
    return units


def _for_a_unit(unit: PlannedUnit, defaults: Mapping[str, Any]) -> PlannedUnit:
    """Check the arguments of a real unit as its constructor will."""
    where = where_is(unit.name)
    overrides = between_other_dtypes(unit.overrides, defaults, where)
    chosen = layered(defaults, overrides)
    place(**{key: chosen.get(key) for key in PLACE_ARGUMENTS}, where=where)
    as_options(chosen, where)
    return replace(unit, overrides=overrides)


def _exempt_from(defaults: Mapping[str, Any]) -> Callable[[nn.Module], bool | _Exemption]:
    """Return the rule by which modules become units because they need full precision."""
    precision = as_precision(defaults.get("mixed_precision"), where_is(""))

    def rule(module: nn.Module) -> bool | _Exemption:
        if not precision.exempts(module):
            return False
        return _Exemption(mixed_precision=Precision.of_exempt(module))

    return rule


def refuse_uninitialized(
    units: Sequence[PlannedUnit], defaults: Mapping[str, Any], ignored: Ignored = NOTHING_IGNORED
) -> None:
    """Raise if planned units hold something on meta to which nothing gives values. Local.

    Args:
        units: What will be wrapped.
        defaults: Arguments for each wrapper.
        ignored: What units leave alone.

    Raises:
        NoValuesError: If a module has no `reset_parameters` and no function is given.
        OptionError: If a `param_init_fn` cannot be called.
    """
    planned = Ignored(modules=frozenset(unit.module for unit in units)) | ignored
    for unit in units:
        chosen = layered(defaults, unit.overrides)
        if is_unit_class(unit.wrapper_cls) and not chosen.get("sync_module_states"):
            init, where = chosen.get("param_init_fn"), where_is(unit.name)
            refuse_deferred(unit.module, init, where=where, ignored=planned)


def is_unit_class(wrapper_cls: Any) -> bool:
    """Return whether a wrapper makes units of `fsdp_ref`.

    Args:
        wrapper_cls: A class, or a `functools.partial` of one.

    Returns:
        `True` for `FullyShardedDataParallel` and what derives from it.
    """
    return bool(getattr(getattr(wrapper_cls, "func", wrapper_cls), "_is_fsdp_unit", False))


def _planned(
    answer: Any, name: str, module: nn.Module, wrapper_cls: Wrapper, of_root: Callable[..., Wish]
) -> PlannedUnit:
    """Check what a policy returned for a module that it selects, and add what marks say."""
    where = f"{where_is(name)} ({type(module).__name__})"
    if answer is not True and not isinstance(answer, dict):
        raise PolicyError.at(
            where,
            expected="True, False or a dict of arguments from the policy",
            found=repr(answer),
            fix="Does the policy return something for every module?",
        )
    weaker = [("auto_wrap_policy", answer), ("fsdp_wrap_fn", of_root(module, where))]
    said = marked_arguments(module, where, weaker)
    wrapper_cls, overrides = own_overrides(said, wrapper_cls, where)
    is_chosen = not isinstance(answer, _Exemption)
    return PlannedUnit(name, module, wrapper_cls, overrides, is_chosen)


# Refusals


def _refuse_wrapped(root: nn.Module, wrapper_cls: Any, ignored: Ignored) -> None:
    wrapper = getattr(wrapper_cls, "func", wrapper_cls)
    for name, module in root.named_modules():
        wrapped = is_unit(module) or (isinstance(wrapper, type) and isinstance(module, wrapper))
        if wrapped and module not in ignored.modules:
            raise AlreadyWrappedError.at(
                where_is(""),
                expected="a model without units",
                found=f"the unit '{name}'" if name else "a unit",
                fix="Use the wrapped model as it is, or build it again to wrap it differently.",
            )


@dataclass(frozen=True)
class _Use:
    """One place where a parameter is used, and the planned units around it, outer first."""

    name: str
    units: tuple[str, ...]


def _refuse_split_ties(root: nn.Module, units: list[PlannedUnit], ignored: Ignored) -> None:
    """Raise if a parameter would belong to two units, and say what would keep it in one."""
    names = {unit.module: unit.name for unit in units}
    first_uses: dict[nn.Parameter, _Use] = {}
    for parameter, use in _uses(root, "", (), names):
        first = first_uses.setdefault(parameter, use)
        if first.units[-1:] == use.units[-1:] or parameter in ignored.parameters:
            continue
        shared = [a for a, b in zip(first.units, use.units, strict=False) if a == b]
        leave_out = sorted({*first.units, *use.units} - set(shared))
        raise TiedParametersError.at(
            where_is(""),
            expected="tied parameters in one unit",
            found=f"'{first.name}' in {_unit(first)} and '{use.name}' in {_unit(use)}, "
            "which are one parameter",
            fix=f"Let the policy leave out {' and '.join(map(repr, leave_out))}, so that both "
            f"belong to {_unit(_Use('', tuple(shared)))}.",
        )


def _unit(use: _Use) -> str:
    inner = use.units[-1] if use.units else ""
    return f"unit '{inner}'" if inner else "the enclosing unit"


def _uses(
    module: nn.Module, name: str, around: tuple[str, ...], names: dict[nn.Module, str]
) -> Iterator[tuple[nn.Parameter, _Use]]:
    """Yield each parameter under each of its names, with the planned units around it."""
    if module in names:
        around = (*around, names[module])
    prefix = f"{name}." if name else ""
    for attribute, parameter in module._parameters.items():
        if parameter is not None:
            yield parameter, _Use(prefix + attribute, around)
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _uses(child, prefix + child_name, around, names)
