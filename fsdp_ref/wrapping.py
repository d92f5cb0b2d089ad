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
[A run shows it][initialise-after-sharding]. The first forward refuses such shards; torch's
classes train with them, badly. All ways to equal and whole weights are in
[fsdp_ref.initialize][].

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

- By class: [ModuleWrapPolicy][fsdp_ref.ModuleWrapPolicy], with a set of classes. This is the
  one that most models want.
- By a rule: any function that takes a module, or [CustomPolicy][fsdp_ref.CustomPolicy] around
  it.
- By size: [size_based_auto_wrap_policy][fsdp_ref.size_based_auto_wrap_policy], with
  `functools.partial` around it to set the threshold.
- By what the modules say themselves:
  [config_auto_wrap_policy][fsdp_ref.config_auto_wrap_policy] and
  [composer_auto_wrap_policy][fsdp_ref.composer_auto_wrap_policy].
- Everything: [always_wrap_policy][fsdp_ref.always_wrap_policy].
- Several of these: [or_policy][fsdp_ref.or_policy] selects what one of them selects.

# Policies from other libraries

Each of these works here as it is. The names are those of this package, too.

| from | what you have |
| --- | --- |
| torch | `ModuleWrapPolicy`, `CustomPolicy`, also torch's own objects |
| torch | `transformer_auto_wrap_policy`, `lambda_auto_wrap_policy`, `always_wrap_policy` |
| torch | `size_based_auto_wrap_policy` |
| torch | `_or_policy`, here also `or_policy`, of policies of any form |
| FairScale | `default_auto_wrap_policy`, or `auto_wrap(model, min_num_params=...)` |
| FairScale | `module.wrapper_config` with `config_auto_wrap_policy` |
| Composer | a function of a module that returns `True`, `False` or a dict |
| Composer | `module._fsdp_wrap` and `fsdp_wrap_fn`, with `composer_auto_wrap_policy` |

For torch's `fully_shard` you write a loop over modules. `ModuleWrapPolicy` is that loop.

A function is recognised by its arguments: with `recurse` it is asked twice, whether to look
inside and whether the module becomes a unit; otherwise it is asked about the module alone.

Some modules are never units, and a policy is not asked about them. A container without a
`forward`, such as `ModuleList`, has no moment at which it could gather; its elements are
looked at instead. `MultiheadAttention` may become a unit, but nothing inside it does, because it
reads the weights inside without calling the module that holds them. With torch's
`always_wrap_policy` and class, that fails in the first forward.

One thing becomes a unit that no policy selected: batch norm under mixed precision, see
[there][fsdp_ref.precision].

Tip: Look at the units before you train
    Three policies make three different models of one, and all of them compute the same. The
    units, and what each of them holds, say how much is gathered at once.

    Proof: wrapping/policies

# Arguments for one unit

Any unit may have arguments of its own: another process group, strategy, precision, offload,
prefetch or divisor. A policy returns them as a dict in place of `True`, or the modules say them.
All arguments that nobody says for the unit are those of the outermost constructor, or of the
context. An empty dict means the same as `True`.

A rule that returns `{"process_group": "self", "gradient_divisor": 8}` for experts, and `True` for
blocks, is such a policy; [or_policy][fsdp_ref.or_policy] joins it with others.

Where several speak, the nearest to the module wins, argument by argument:

| rank | who says it | with what |
| --- | --- | --- |
| 1 | a call for this module | `wrap(module, ...)` |
| 2 | the module, in FairScale's way | `module.wrapper_config`, a dict |
| 3 | the module, in Composer's way | `module._fsdp_wrap`, a bool or a dict |
| 4 | the root, in Composer's way | its `fsdp_wrap_fn(module)`, which returns a bool or a dict |
| 5 | the policy | the dict that it returns |
| 6 | the call or context for all | the constructor, `auto_wrap(...)`, then `enable_wrap(...)` |
| 7 | nobody | the defaults of the constructor |

*Whether* a module becomes a unit is for the policy alone. There are two exceptions. The mark
`module._fsdp_wrap = False` keeps a module from becoming a unit under any policy, and from `wrap`.
And with [composer_auto_wrap_policy][fsdp_ref.composer_auto_wrap_policy] the marks are the policy:
first that of the module, then the answer of the root. Under another policy `False` from the root's
function is no veto, because such a function says `False` about most modules. Without a policy
nobody looks inside, and marks have no effect: a model that carries them can be wrapped by hand.

A process group for one unit takes the place of a device mesh for all, and the other way around. A
word for the precision, such as `"mixed_precision": "FULL"`, also lets the unit cast its inputs, and
its outputs back, so that it works among units of other dtypes; an object or a dict says that
itself. `use_orig_params` may differ from unit to unit, which torch refuses.

What cannot differ is refused by name: `auto_wrap_policy`, and `bucket_cap_mb`, of which the root's
counts. An argument that the constructor does not know is refused too; the message names the module,
who said it, and the nearest right name. With the key `wrapper_cls` a dict names another class to
wrap with. `wrap` and `auto_wrap` take `wrapper_cls` too, for one call, and then also wrap without a
context.

Examples:
    The module overrules the root, and the root the constructor.

    >>> import torch.distributed as dist
    >>> from fsdp_ref import FullyShardedDataParallel, unit_tree
    >>> dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, backend="gloo")
    >>> class Model(nn.Sequential):
    ...     def fsdp_wrap_fn(self, module):
    ...         is_layer = isinstance(module, nn.Linear)
    ...         return {"sharding_strategy": "SHARD_GRAD_OP"} if is_layer else False
    >>> model = Model(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Linear(2, 2))
    >>> model[2]._fsdp_wrap = {"sharding_strategy": "NO_SHARD", "mixed_precision": "FULL"}
    >>> model[3]._fsdp_wrap = False
    >>> model = FullyShardedDataParallel(model, auto_wrap_policy=composer_auto_wrap_policy)
    >>> [(unit.name, unit.strategy) for unit in unit_tree(model)]
    [('root', 'FULL_SHARD'), ('0', 'SHARD_GRAD_OP'), ('2', 'NO_SHARD')]
    >>> dist.destroy_process_group()

# Recompute activations by mark

`module._activation_checkpointing = True`, or `True` from the root's
`activation_checkpointing_fn(module)`, lets a module's forward run again in the backward, in place
of keeping what it computed. The module's own mark wins, also with `False`. Marks for this are read
where those for units are: under a policy, and by `wrap`. It costs no further gather and changes no
name; [fsdp_ref.recomputing][] says why, and which modules to mark.

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

# Ignored modules and parameters

`ignored_modules` takes modules that are left alone with everything inside them, and
`ignored_states` takes parameters or modules. Left alone means whole on every rank: not sharded,
not moved, not cast, not counted in sizes, and never a unit under a policy. It also means *not
averaged*: each rank gets the gradient of its own part of the batch. So it suits what is frozen,
what another mechanism looks after, and what cannot be sharded, such as integer, complex or scalar
parameters. A trainable layer whose gradients nobody averages drifts apart over the ranks.

Units inside are told what the outer one ignores, and the outer one heeds what they ignore. What is
not inside the wrapped module has no effect, so one list may go to several constructors. A unit
cannot be ignored, nor a parameter that one has sharded.

# Tied parameters

One parameter used by two modules must be held by one unit. Two units would each keep a copy,
and train the copies apart. So a policy that would cut a tie is refused before anything is
sharded. The message names both uses, and what the policy has to leave out so that both end up
in one unit. [A run shows][tied-weights] what becomes of a tie that is cut.

# All or nothing

A policy is asked about the whole tree first. Only when all of its answers have been checked
is the first module wrapped. A refused model is still the plain model that it was. The order
is that of the tree, children before parents, and so the same on every rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from fsdp_ref.asking import describe_policy, may_look_at_sizes
from fsdp_ref.errors import PolicyError, PolicyMatchedNothingWarning, WrapContextError
from fsdp_ref.marks import is_left_out, should_recompute
from fsdp_ref.naming import current_unit_name, unit_name_scope, where_is
from fsdp_ref.originals import NOTHING_IGNORED, Ignored, resolve_ignored
from fsdp_ref.plan import PlannedUnit, is_unit_class, plan_units, refuse_uninitialized
from fsdp_ref.policies import (
    DEFAULT_MIN_NUM_PARAMS,
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    always_wrap_policy,
    composer_auto_wrap_policy,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    lambda_auto_wrap_policy,
    or_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from fsdp_ref.recomputing import marked_for_recomputing, recompute
from fsdp_ref.unit_arguments import (
    Wrapper,
    layered,
    marked_arguments,
    refuse_unknown_arguments,
)

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "_or_policy",
    "always_wrap_policy",
    "apply_policy",
    "auto_wrap",
    "composer_auto_wrap_policy",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "or_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

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
    refuse_unknown_arguments(kwargs, wrapper_cls, "enable_wrap", WrapContextError)
    token = _context.set(_WrapContext(wrapper_cls, kwargs))
    try:
        yield
    finally:
        _context.reset(token)


def wrap(module: nn.Module, *, wrapper_cls: Wrapper | None = None, **overrides: Any) -> nn.Module:
    """Wrap one module if `enable_wrap` is active; return it as it is otherwise.

    Every rank wraps the same modules in the same order. Inside the context this costs what
    the wrapper's constructor costs.

    Args:
        module: The module, changed in place by the wrapper. Arguments that it carries itself,
            in `module.wrapper_config` or `module._fsdp_wrap`, win over those of the context.
            Marked with `_fsdp_wrap = False`, it is returned as it is.
        wrapper_cls: Wrap with this, in place of the context's, and also without a context.
        **overrides: Arguments for this wrapper, which win over all others.

    Returns:
        The wrapper around `module`, or `module`.

    Raises:
        WrapContextError: If the wrapper does not take one of the arguments.
        PolicyError: If a mark of the module is not what such a mark can be.

    Examples:
        >>> layer = nn.Linear(2, 2)
        >>> wrap(layer) is layer
        True
    """
    context, where = _in_force(wrapper_cls), f"wrap ({type(module).__name__})"
    if context is None or is_left_out(module):
        return module
    marks = [arguments for _, arguments in marked_arguments(module, where)]
    arguments = layered(context.arguments, *marks, overrides)
    wrapper_cls = wrapper_cls or arguments.pop("wrapper_cls", context.wrapper_cls)
    arguments.pop("wrapper_cls", None)
    refuse_unknown_arguments(arguments, wrapper_cls, where, WrapContextError)
    if should_recompute(module, where):
        recompute(module)
    return wrapper_cls(module, **arguments)


def _in_force(wrapper_cls: Wrapper | None) -> _WrapContext | None:
    """Return the open context with the class named here, if one is; `None` to wrap nothing."""
    context = _context.get()
    if wrapper_cls is None:
        return context
    return _WrapContext(wrapper_cls, {} if context is None else context.arguments)


# By a policy


def auto_wrap(
    module: nn.Module,
    auto_wrap_policy: Any = None,
    *,
    min_num_params: float = DEFAULT_MIN_NUM_PARAMS,
    wrapper_cls: Wrapper | None = None,
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
        wrapper_cls: Wrap with this, in place of the context's, and also without a context.
        **overrides: Arguments for these wrappers, which win over those of the context. Those
            that a module or the root says for one unit win over them.

    Returns:
        The wrapper around `module`, or `module` itself: outside the context, and if the policy
        does not select it. Then its remaining parameters belong to the enclosing unit.

    Raises:
        AlreadyWrappedError: If `module` is or contains a unit already.
        PolicyError: If the policy returns something else than a bool or a dict of arguments
            that the wrapper takes, or if both a policy and `min_num_params` are given.
        PrecisionError: If a `mixed_precision` is not understood.
        TiedParametersError: If the policy would put one parameter into two units.
        WrapContextError: If the wrapper does not take one of the arguments.

    Warns:
        PolicyMatchedNothingWarning: If a policy by class or by a rule selects no module.

    Examples:
        >>> block = nn.Sequential(nn.Linear(10, 20), nn.ReLU())
        >>> auto_wrap(block, min_num_params=100) is block
        True
    """
    context = _in_force(wrapper_cls)
    if context is None:
        return module
    arguments = layered(context.arguments, overrides)
    refuse_unknown_arguments(arguments, context.wrapper_cls, "auto_wrap", WrapContextError)
    policy = _policy_of_call(
        auto_wrap_policy, arguments.pop("auto_wrap_policy", None), min_num_params
    )
    ignored = NOTHING_IGNORED
    if is_unit_class(context.wrapper_cls):
        modules, states = (arguments.pop(f"ignored_{what}", None) for what in ("modules", "states"))
        ignored = resolve_ignored(module, modules, states, "auto_wrap")
    units = plan_units(module, policy, context.wrapper_cls, arguments, ignored)
    if not any(unit.is_chosen for unit in units) and not may_look_at_sizes(policy):
        _warn_that_nothing_matched(module, policy)
    refuse_uninitialized(units, arguments, ignored)
    return _wrap_all(module, units, arguments, ignored)


def _policy_of_call(given: Any, of_context: Any, min_num_params: float) -> Any:
    """Choose the policy of an `auto_wrap`: the nearest one that was asked for."""
    by_size = partial(size_based_auto_wrap_policy, min_num_params=min_num_params)
    if min_num_params == DEFAULT_MIN_NUM_PARAMS:
        return given or of_context or by_size
    if given is not None:
        raise PolicyError.at(
            "auto_wrap",
            expected="a policy or min_num_params",
            found="both",
            fix="Give the threshold to the policy, with functools.partial.",
        )
    return by_size


def apply_policy(
    module: nn.Module,
    policy: Any,
    wrapper_cls: Wrapper,
    defaults: Mapping[str, Any],
    ignored: Ignored = NOTHING_IGNORED,
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
        ignored: What units leave alone. Nothing of it is asked about, wrapped or counted, and
            the wrappers are told, as `ignored_states`.

    Raises:
        AlreadyWrappedError: If `module` is or contains a unit already.
        PolicyError: If the policy is none, or returns something else than a bool or a dict of
            arguments that the wrapper takes.
        PrecisionError: If a `mixed_precision` is not understood.
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
    units = plan_units(module, policy, wrapper_cls, defaults, ignored)
    if not any(unit.is_chosen for unit in units):
        _warn_that_nothing_matched(module, policy)
    inner = [unit for unit in units if unit.name]
    refuse_uninitialized([*inner, PlannedUnit("", module, wrapper_cls)], defaults, ignored)
    _wrap_all(module, inner, defaults, ignored)


def _warn_that_nothing_matched(module: nn.Module, policy: Any) -> None:
    warning = PolicyMatchedNothingWarning.at(
        where_is(""),
        expected=f"modules in {type(module).__name__} that {describe_policy(policy)} selects",
        found="none",
        fix="Everything goes into the enclosing unit. Is the class or the size right?",
    )
    warnings.warn(warning, stacklevel=4)


# The deed


def _wrap_all(
    root: nn.Module, units: list[PlannedUnit], defaults: Mapping[str, Any], ignored: Ignored
) -> nn.Module:
    """Replace each planned module by its wrapper, wherever it hangs; return the new root."""
    for module in marked_for_recomputing(root, ignored):
        recompute(module)
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in root.modules():
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, name))
    outer = current_unit_name()
    for unit in units:
        name = f"{outer}.{unit.name}" if outer else unit.name
        arguments = layered(defaults, unit.overrides, _passed_on(unit, ignored))
        with unit_name_scope(name) if name else nullcontext():
            wrapped = unit.wrapper_cls(unit.module, **arguments)
        for parent, child_name in places.get(unit.module, []):
            setattr(parent, child_name, wrapped)
        if unit.module is root:
            root = wrapped
    return root


def _passed_on(unit: PlannedUnit, ignored: Ignored) -> dict[str, Any]:
    """Return the argument that tells a wrapper what to ignore, on top of what its policy said."""
    inside = ignored.inside(unit.module)
    if not inside:
        return {}
    own = unit.overrides.get("ignored_states")
    return {"ignored_states": inside | resolve_ignored(unit.module, None, own, where_is(unit.name))}
