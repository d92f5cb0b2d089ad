"""Which modules become units: by hand, by size, by class, or by a rule of your own.

# Why nest units

A unit gathers all of its parameters before its forward and drops them after it. One unit
around a whole model therefore gathers the whole model at once, and makes the whole gradient
before it keeps a shard of it. At that peak it saves only optimizer state. Give each layer a
unit of its own, and only one or two layers are whole at any moment. The outermost unit keeps
what no inner unit holds, such as embeddings and the head.

Tip: Give each repeated layer a unit, and the whole model one around them
    The peak of unsharded memory is then the outermost unit and a layer or two, in place of
    the whole model. The price: each inner unit is gathered a second time, for the backward.

    Proof: tips/nest_for_memory

# enable_wrap: the same arguments everywhere

[wrap][fsdp_ref.wrap] stands in the model's own code, around the layers that should be units.
Outside of [enable_wrap][fsdp_ref.enable_wrap] it returns the layer as it is, so the same
code builds the plain model too. Inside, it calls the wrapper class that the context names,
with the arguments that the context names. They are written once, and no unit can be
forgotten.

# enable_wrap: a model too large to build whole

Wrapping shards a layer at once: the full weights are replaced by this rank's shard before the
next layer is built. So a model that does not fit into memory can still be built, one layer
after the other. Wrapping the finished model cannot help there, because it comes too late.

Tip: Wrap while you build if the whole model does not fit
    Call `wrap` on each layer in the model's constructor, inside `enable_wrap`. No more than
    the shards so far and one whole layer are ever alive.

    Proof: wrapping/build_piece_by_piece

# Initialise whole weights, never shards

Weights may be set before wrapping, or inside
[summon_full_params][fsdp_ref.FullyShardedDataParallel.summon_full_params]. In between, a loop
over `model.parameters()` sees shards. With one seed on all ranks it writes the same numbers
into each of them: as many identical shards as there are ranks, and a weight of low rank.
Nothing raises, and the model trains, badly. [A run shows it][initialise-after-sharding].

# What auto_wrap does with the remainder

[auto_wrap][fsdp_ref.auto_wrap] looks at the children first. With a size policy, a child with
at least `min_num_params` parameters becomes a unit. What its own children took does not
count any more. Whatever is too small stays with the module around it, up to the module that
was handed in. If even that is too small, it is returned as it is, and its parameters belong
to the *enclosing* unit.

So there must be an enclosing unit. Parameters that no unit holds are neither sharded nor
averaged: each rank trains its own version of them.

Tip: Put one unit around the whole, whatever the policy leaves over
    `auto_wrap` promises nothing about the parts that it leaves alone. The outermost unit takes
    them: in the example, at the large threshold, the whole transformer belongs to the root.

    Proof: wrapping/founding_example

# Policies

A policy says which modules become units. It is handed to `auto_wrap`, or to the class as
`auto_wrap_policy`.

- By size: [size_based_auto_wrap_policy][fsdp_ref.size_based_auto_wrap_policy], with
  `functools.partial` around it to set the threshold.
- By class: [ModuleWrapPolicy][fsdp_ref.ModuleWrapPolicy], with a set of classes. This is the
  one that most models want.
- By a rule: any function that takes a module, or [CustomPolicy][fsdp_ref.CustomPolicy] around
  it.
- Everything: [always_wrap_policy][fsdp_ref.always_wrap_policy].

Policies written for torch work here as well: its policy objects, and its functions of
`(module, recurse, nonwrapped_numel)`. So do FairScale's, of
`(module, recurse, unwrapped_params, module_is_root)`.

Some modules are never units, and a policy is not asked about them. A container without a
`forward`, such as `ModuleList`, has no moment at which it could gather; its elements are
looked at instead. `MultiheadAttention` may become a unit by class or by a rule, but nothing
inside it does, because it reads the weights inside without calling the module that holds them.

Tip: Look at the units before you train
    Three policies make three different models of one, and all of them compute the same. The
    units, and what each of them holds, say how much is gathered at once.

    Proof: wrapping/policies

# Arguments for one unit

A policy may return a dict in place of `True`. It holds constructor arguments for that unit
alone. All others keep the arguments of the outermost constructor or of the context. An empty
dict means the same as `True`. A key that the constructor does not know is refused, and the
nearest right one is named.

# Excluded is not unsharded

A policy only draws borders between units. A module that it leaves out belongs to the unit
around it, and is sharded there. To keep parameters whole on every rank, and averaged, let the
policy return `{"sharding_strategy": "NO_SHARD"}` for them. With a group of one rank they are
whole too, but their gradients are not averaged, see
[process groups][fsdp_ref.process_groups].

Tip: To keep a layer whole, ask for it; excluding it does not
    A policy that says `False` leaves the layer to the unit around it, which cuts it. In the
    run, the head gets a group of one rank from the policy, and every rank holds all of it.

    Proof: wrapping/policies

# Tied parameters

One parameter used by two modules must be held by one unit. Two units would each keep a copy,
and train the copies apart. So a policy that would cut a tie is refused before anything is
sharded. The message names both uses, and what the policy has to leave out so that both end up
in one unit.

# All or nothing

A policy is asked about the whole tree first. Only when all of its answers have been checked
is the first module wrapped. A refused model is still the plain model that it was. The order
is that of the tree, children before parents, and so the same on every rank.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from fsdp_ref.errors import (
    AlreadyWrappedError,
    FSDPError,
    PolicyError,
    PolicyMatchedNothingWarning,
    TiedParametersError,
    WrapContextError,
)
from fsdp_ref.naming import current_unit_name, unit_name_scope, where_is
from fsdp_ref.originals import collect_originals, is_unit, refuse_parameters
from fsdp_ref.policies import (
    DEFAULT_MIN_NUM_PARAMS,
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    answers_of,
    default_auto_wrap_policy,
    describe_policy,
    sees_sizes,
    size_based_auto_wrap_policy,
)
from fsdp_ref.strategies import PLACE_ARGUMENTS, place

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "PlannedUnit",
    "always_wrap_policy",
    "apply_policy",
    "auto_wrap",
    "default_auto_wrap_policy",
    "enable_wrap",
    "is_unit_class",
    "size_based_auto_wrap_policy",
    "wrap",
]

Wrapper: TypeAlias = Callable[..., nn.Module]

# By hand


@dataclass(frozen=True)
class _WrapContext:
    """What `enable_wrap` was given."""

    wrapper_cls: Wrapper
    arguments: dict[str, Any]


_context: ContextVar[_WrapContext | None] = ContextVar("fsdp_ref_wrap_context", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Wrapper, **kwargs: Any) -> Iterator[None]:
    """Make `wrap` and `auto_wrap` inside wrap for real, all with the same arguments.

    Not collective by itself. The wrapping inside is: every rank wraps the same modules in the
    same order.

    Args:
        wrapper_cls: What to wrap with, such as `FullyShardedDataParallel`.
        **kwargs: Arguments for each wrapper. An `auto_wrap_policy` among them is also the
            policy of each `auto_wrap` inside that is given none.

    Yields:
        Nothing.

    Raises:
        WrapContextError: If `wrapper_cls` cannot be called, does not take one of the
            arguments, or if a context is open already. Contexts do not nest, because then
            nobody could say which arguments a unit has.

    Examples:
        >>> class Unit(nn.Module):
        ...     def __init__(self, module, process_group=None):
        ...         super().__init__()
        ...         self.module, self.process_group = module, process_group
        >>> def layer():
        ...     return wrap(nn.Linear(2, 2))
        >>> type(layer()).__name__
        'Linear'
        >>> with enable_wrap(wrapper_cls=Unit, process_group="self"):
        ...     unit = layer()
        >>> type(unit).__name__, unit.process_group
        ('Unit', 'self')
    """
    if _context.get() is not None:
        raise WrapContextError.at(
            "enable_wrap",
            expected="no open enable_wrap context",
            found="one around this one",
            fix="Close it first, or give wrap() the arguments that should differ.",
        )
    if not callable(wrapper_cls):
        raise WrapContextError.at(
            "enable_wrap",
            expected="a wrapper_cls to call, such as FullyShardedDataParallel",
            found=repr(wrapper_cls),
            fix="Hand in the class itself.",
        )
    _refuse_unknown(kwargs, wrapper_cls, "enable_wrap", WrapContextError)
    token = _context.set(_WrapContext(wrapper_cls, kwargs))
    try:
        yield
    finally:
        _context.reset(token)


def wrap(module: nn.Module, **overrides: Any) -> nn.Module:
    """Wrap one module if `enable_wrap` is active; return it as it is otherwise.

    Every rank wraps the same modules in the same order. Inside the context this costs what
    the wrapper's constructor costs.

    Args:
        module: The module, changed in place by the wrapper.
        **overrides: Arguments for this wrapper, which win over those of the context.

    Returns:
        The wrapper around `module`, or `module`.

    Raises:
        WrapContextError: If the wrapper does not take one of the arguments.

    Examples:
        >>> layer = nn.Linear(2, 2)
        >>> wrap(layer) is layer
        True
    """
    context = _context.get()
    if context is None:
        return module
    _refuse_unknown(overrides, context.wrapper_cls, "wrap", WrapContextError)
    return context.wrapper_cls(module, **{**context.arguments, **overrides})


# By a policy


def auto_wrap(
    module: nn.Module,
    auto_wrap_policy: Any = None,
    *,
    min_num_params: float = DEFAULT_MIN_NUM_PARAMS,
    **overrides: Any,
) -> nn.Module:
    """Wrap the modules in a tree that a policy selects, if `enable_wrap` is active.

    Every rank calls this for the same modules in the same order. Children are wrapped before
    their parents, in place; `module` itself comes last, if the policy selects it too. What the
    wrapper would refuse later, such as a scalar parameter or an unknown word for a process
    group, is refused before anything is wrapped.

    Args:
        module: The tree.
        auto_wrap_policy: Which modules become units. By default the policy of the context,
            and otherwise the size policy with `min_num_params`.
        min_num_params: Parameters that a module must have, without those that its children
            took as units of their own, to become a unit.
        **overrides: Arguments for these wrappers, which win over those of the context.

    Returns:
        The wrapper around `module`, or `module` itself: outside the context, and if the policy
        does not select it. Then its remaining parameters belong to the enclosing unit.

    Raises:
        AlreadyWrappedError: If `module` is or contains a unit already.
        PolicyError: If the policy returns something else than a bool or a dict of arguments
            that the wrapper takes, or if both a policy and `min_num_params` are given.
        TiedParametersError: If the policy would put one parameter into two units.
        WrapContextError: If the wrapper does not take one of the arguments.

    Warns:
        PolicyMatchedNothingWarning: If a policy by class or by a rule selects no module.

    Examples:
        >>> block = nn.Sequential(nn.Linear(10, 20), nn.ReLU())
        >>> auto_wrap(block, min_num_params=100) is block
        True
    """
    context = _context.get()
    if context is None:
        return module
    _refuse_unknown(overrides, context.wrapper_cls, "auto_wrap", WrapContextError)
    arguments = {**context.arguments, **overrides}
    by_size = partial(size_based_auto_wrap_policy, min_num_params=min_num_params)
    of_context = arguments.pop("auto_wrap_policy", None)
    if min_num_params != DEFAULT_MIN_NUM_PARAMS:
        if auto_wrap_policy is not None:
            raise PolicyError.at(
                "auto_wrap",
                expected="a policy or min_num_params",
                found="both",
                fix="Give the threshold to the policy, with functools.partial.",
            )
        of_context = None
    policy = auto_wrap_policy or of_context or by_size
    units = _plan(module, policy, context.wrapper_cls, arguments)
    if not units and not sees_sizes(policy):
        _warn_that_nothing_matched(module, policy)
    return _wrap_all(module, units, context.wrapper_cls, arguments)


def apply_policy(
    module: nn.Module, policy: Any, wrapper_cls: Wrapper, defaults: Mapping[str, Any]
) -> None:
    """Wrap the modules inside `module` that a policy selects, in place, but not `module`.

    `FullyShardedDataParallel` calls it for its `auto_wrap_policy`. Every rank calls it for the
    same tree. Everything is checked before anything is wrapped, also what the wrapper would
    refuse later, such as a scalar parameter or an unknown word for a process group.

    Args:
        module: The tree.
        policy: Which modules become units.
        wrapper_cls: What to wrap with.
        defaults: Arguments for each wrapper, unless the policy returns others for it.

    Raises:
        AlreadyWrappedError: If `module` is or contains a unit already.
        PolicyError: If the policy is none, or returns something else than a bool or a dict of
            arguments that the wrapper takes.
        TiedParametersError: If the policy would put one parameter into two units.

    Warns:
        PolicyMatchedNothingWarning: If the policy selects no module.

    Examples:
        >>> class Unit(nn.Module):
        ...     def __init__(self, module):
        ...         super().__init__()
        ...         self.module = module
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> apply_policy(model, ModuleWrapPolicy({nn.Linear}), Unit, {})
        >>> [type(child).__name__ for child in model]
        ['Unit', 'ReLU']
    """
    units = _plan(module, policy, wrapper_cls, defaults)
    if not units:
        _warn_that_nothing_matched(module, policy)
    _wrap_all(module, [unit for unit in units if unit.name], wrapper_cls, defaults)


def _warn_that_nothing_matched(module: nn.Module, policy: Any) -> None:
    warning = PolicyMatchedNothingWarning.at(
        where_is(""),
        expected=f"modules in {type(module).__name__} that {describe_policy(policy)} selects",
        found="none",
        fix="Everything goes into the enclosing unit. Is the class or the size right?",
    )
    warnings.warn(warning, stacklevel=4)


# The plan


@dataclass(frozen=True)
class PlannedUnit:
    """A module that will become a unit.

    Attributes:
        name: Its dotted name from the module that the policy was applied to; empty for that.
        module: The module.
        overrides: Arguments that the policy wants for this unit.
    """

    name: str
    module: nn.Module
    overrides: dict[str, Any] = field(default_factory=dict)


def _plan(
    root: nn.Module, policy: Any, wrapper_cls: Wrapper, defaults: Mapping[str, Any]
) -> list[PlannedUnit]:
    """Ask the policy about the whole tree, and refuse what could not work. Changes nothing."""
    _refuse_wrapped(root, wrapper_cls)
    units = [
        PlannedUnit(name, module, _arguments(answer, name, module, wrapper_cls))
        for name, module, answer in answers_of(root, policy, defaults)
    ]
    _refuse_split_ties(root, units)
    if is_unit_class(wrapper_cls):
        refuse_parameters(collect_originals(root), where_is(""))
        for unit in units:
            chosen = {**defaults, **unit.overrides}
            ranks = {key: chosen.get(key) for key in PLACE_ARGUMENTS}
            place(**ranks, where=where_is(unit.name))
    return units


# Refusals


def is_unit_class(wrapper_cls: Any) -> bool:
    """Return whether a wrapper makes units of `fsdp_ref`.

    Args:
        wrapper_cls: A class, or a `functools.partial` of one.

    Returns:
        `True` for `FullyShardedDataParallel` and what derives from it.
    """
    return bool(getattr(getattr(wrapper_cls, "func", wrapper_cls), "_is_fsdp_unit", False))


def _refuse_wrapped(root: nn.Module, wrapper_cls: Any) -> None:
    wrapper = getattr(wrapper_cls, "func", wrapper_cls)
    for name, module in root.named_modules():
        if is_unit(module) or (isinstance(wrapper, type) and isinstance(module, wrapper)):
            raise AlreadyWrappedError.at(
                where_is(""),
                expected="a model without units",
                found=f"the unit '{name}'" if name else "a unit",
                fix="Use the wrapped model as it is, or build it again to wrap it differently.",
            )


def _arguments(answer: Any, name: str, module: nn.Module, wrapper_cls: Wrapper) -> dict[str, Any]:
    """Check what a policy returned for a module that it selects."""
    if answer is True:
        return {}
    if not isinstance(answer, dict):
        raise PolicyError.at(
            where_is(name) + f" ({type(module).__name__})",
            expected="True, False or a dict of arguments from the policy",
            found=repr(answer),
            fix="Does the policy return something for every module?",
        )
    _refuse_unknown(answer, wrapper_cls, where_is(name), PolicyError, inner=True)
    return answer


def _refuse_unknown(
    arguments: Mapping[str, Any],
    wrapper_cls: Wrapper,
    where: str,
    error_class: type[FSDPError],
    inner: bool = False,
) -> None:
    """Raise if a wrapper does not take an argument, and name the nearest one that it takes."""
    parameters = list(inspect.signature(wrapper_cls).parameters.values())
    known = [p.name for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if inner and "auto_wrap_policy" in known:
        known.remove("auto_wrap_policy")  # the policy that runs has looked inside already
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    for key in arguments:
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            raise error_class.at(
                where,
                expected=f"arguments among {', '.join(known) or 'none'}",
                found=repr(key),
                fix=f"Did you mean {nearest[0]!r}?" if nearest else "The wrapper takes none.",
            )


@dataclass(frozen=True)
class _Use:
    """One place where a parameter is used, and the planned units around it, outer first."""

    name: str
    units: tuple[str, ...]


def _refuse_split_ties(root: nn.Module, units: list[PlannedUnit]) -> None:
    """Raise if a parameter would belong to two units, and say what would keep it in one."""
    names = {unit.module: unit.name for unit in units}
    first_uses: dict[int, _Use] = {}
    for key, use in _uses(root, "", (), names):
        first = first_uses.setdefault(key, use)
        if first.units[-1:] == use.units[-1:]:
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
) -> Iterator[tuple[int, _Use]]:
    """Yield each parameter under each of its names, with the planned units around it."""
    if module in names:
        around = (*around, names[module])
    prefix = f"{name}." if name else ""
    for attribute, parameter in module._parameters.items():
        if parameter is not None:
            yield id(parameter), _Use(prefix + attribute, around)
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _uses(child, prefix + child_name, around, names)


# The deed


def _wrap_all(
    root: nn.Module,
    units: list[PlannedUnit],
    wrapper_cls: Wrapper,
    defaults: Mapping[str, Any],
) -> nn.Module:
    """Replace each planned module by its wrapper, wherever it hangs; return the new root."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in root.modules():
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, name))
    outer = current_unit_name()
    for unit in units:
        name = f"{outer}.{unit.name}" if outer else unit.name
        with unit_name_scope(name) if name else nullcontext():
            wrapped = wrapper_cls(unit.module, **{**defaults, **unit.overrides})
        for parent, child_name in places.get(unit.module, []):
            setattr(parent, child_name, wrapped)
        if unit.module is root:
            root = wrapped
    return root
