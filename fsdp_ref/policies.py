"""Policies: which modules become units. They only answer; `plan.py` acts on the answers.

A policy is asked about every module of a tree that could be a unit, and answers `False`,
`True`, or a dict of constructor arguments for that unit. It takes one of three forms:

- a function of a module, or an object that is called with one, such as
  [ModuleWrapPolicy][fsdp_ref.ModuleWrapPolicy]: does the module become a unit?
- a function that hears sizes too, in torch's words `(module, recurse, nonwrapped_numel)` or in
  FairScale's `(module, recurse, unwrapped_params, module_is_root)`. It is asked twice: shall I
  look inside? And, with so many elements left, does it become a unit?
- one of torch's objects, which is asked about the whole tree at once.

[or_policy][fsdp_ref.or_policy] combines policies of any form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from torch import nn

from fsdp_ref.asking import FORCE_LEAF_MODULES, AnyOf, describe_policy
from fsdp_ref.errors import ContainerWithoutForwardError, PolicyError
from fsdp_ref.marks import function_of, mark_of, wish_of
from fsdp_ref.originals import has_forward

DEFAULT_MIN_NUM_PARAMS = int(1e8)
EXCLUDE_WRAP_MODULES: frozenset[type[nn.Module]] = frozenset({nn.ModuleList, nn.ModuleDict})

Answer: TypeAlias = bool | dict[str, Any]


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: float = DEFAULT_MIN_NUM_PARAMS,
    force_leaf_modules: Iterable[type[nn.Module]] | None = None,
    exclude_wrap_modules: Iterable[type[nn.Module]] | None = None,
) -> bool:
    """Select modules with at least `min_num_params` parameters that no inner unit holds.

    Set the arguments after `nonwrapped_numel` with `functools.partial`. Not collective.

    Args:
        module: The module asked about.
        recurse: Whether to look inside (`True`), or to make the module a unit (`False`).
        nonwrapped_numel: Its number of parameters, without those of units inside it.
        min_num_params: The threshold.
        force_leaf_modules: Classes to not look inside of, and to leave to the module around
            them; `MultiheadAttention` by default.
        exclude_wrap_modules: Classes that never become units; `ModuleList` and `ModuleDict` by
            default.

    Returns:
        The answer to the question that `recurse` says.

    Examples:
        A linear layer of ten inputs and five outputs has 55 parameters, bias included.

        >>> size_based_auto_wrap_policy(nn.Linear(10, 5), False, 55, min_num_params=50)
        True
        >>> size_based_auto_wrap_policy(nn.Linear(10, 5), False, 55, min_num_params=100)
        False
    """
    if nonwrapped_numel < min_num_params:
        return False
    given, default = (
        (force_leaf_modules, FORCE_LEAF_MODULES)
        if recurse
        else (exclude_wrap_modules, EXCLUDE_WRAP_MODULES)
    )
    return not isinstance(module, tuple(default if given is None else given))


def default_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    module_is_root: bool,
    min_num_params: float = DEFAULT_MIN_NUM_PARAMS,
    force_leaf_modules: Iterable[type[nn.Module]] | None = None,
    exclude_wrap_modules: Iterable[type[nn.Module]] | None = None,
    skip_params_check_for_root: bool = False,
) -> bool:
    """Select by size, in FairScale's words.

    The same as [size_based_auto_wrap_policy][fsdp_ref.size_based_auto_wrap_policy], which says
    more. Not collective.

    Args:
        module: The module asked about.
        recurse: Whether to look inside (`True`), or to make the module a unit (`False`).
        unwrapped_params: Its number of parameters, without those of units inside it.
        module_is_root: Whether it is the module that was handed to `auto_wrap`.
        min_num_params: The threshold.
        force_leaf_modules: Classes to not look inside of.
        exclude_wrap_modules: Classes that never become units.
        skip_params_check_for_root: Select the root however small it is.

    Returns:
        The answer to the question that `recurse` says.

    Examples:
        >>> default_auto_wrap_policy(nn.ReLU(), False, 0, True, skip_params_check_for_root=True)
        True
    """
    if module_is_root and skip_params_check_for_root:
        min_num_params = 0
    return size_based_auto_wrap_policy(
        module, recurse, unwrapped_params, min_num_params, force_leaf_modules, exclude_wrap_modules
    )


for _by_size in (size_based_auto_wrap_policy, default_auto_wrap_policy):
    # In torch and FairScale these sets hang on the functions; existing code extends copies.
    vars(_by_size).update(
        FORCE_LEAF_MODULES=FORCE_LEAF_MODULES, EXCLUDE_WRAP_MODULES=EXCLUDE_WRAP_MODULES
    )


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Select every module.

    Every leaf becomes a unit too, which costs many small collectives: for tests and for
    demonstrations. Not collective itself.

    Args:
        *args: Ignored.
        **kwargs: Ignored.

    Returns:
        `True`.

    Examples:
        >>> always_wrap_policy(nn.Linear(2, 2), recurse=False, nonwrapped_numel=6)
        True
    """
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], Answer],
) -> Answer:
    """Select by a rule, in torch's words for functions.

    Set `lambda_fn` with `functools.partial`, or hand the rule itself to `auto_wrap`. Not
    collective.

    Args:
        module: The module asked about.
        recurse: Whether to look inside (`True`), or to make the module a unit (`False`).
        nonwrapped_numel: Not looked at.
        lambda_fn: Takes a module; returns `True`, `False`, or a dict of arguments for its unit.

    Returns:
        `True` for looking inside; otherwise what `lambda_fn` returns.

    Examples:
        >>> lambda_auto_wrap_policy(nn.ReLU(), False, 0, lambda m: isinstance(m, nn.ReLU))
        True
    """
    return True if recurse else lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: Iterable[type[nn.Module]],
) -> bool:
    """Select by class, in torch's words for functions.

    Set `transformer_layer_cls` with `functools.partial`. The classes need not be those of a
    transformer; [ModuleWrapPolicy][fsdp_ref.ModuleWrapPolicy] says the same. Embeddings that are
    tied stay together in the unit around the layers. Not collective.

    Args:
        module: The module asked about.
        recurse: Whether to look inside (`True`), or to make the module a unit (`False`).
        nonwrapped_numel: Not looked at.
        transformer_layer_cls: The classes, such as `{nn.TransformerEncoderLayer}`.

    Returns:
        `True` for looking inside; otherwise whether the module is of one of the classes.

    Raises:
        PolicyError: If something else than module classes is given.
        ContainerWithoutForwardError: If a class is a container without a `forward`.

    Examples:
        >>> layer = nn.TransformerEncoderLayer(4, 2)
        >>> transformer_auto_wrap_policy(layer, False, 0, {nn.TransformerEncoderLayer})
        True
    """
    return ModuleWrapPolicy(transformer_layer_cls)(module, recurse)


def config_auto_wrap_policy(
    module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool
) -> Answer:
    """Select the modules that carry a `wrapper_config`, as in FairScale.

    Such a module says itself how it is to be wrapped: `module.wrapper_config` is a dict of
    constructor arguments for its unit, perhaps empty. Every other policy, and `wrap`, heeds
    those arguments as well; this one also wraps because of them. Not collective.

    Args:
        module: The module asked about.
        recurse: Whether to look inside (`True`), or to make the module a unit (`False`).
        unwrapped_params: Not looked at.
        module_is_root: Not looked at.

    Returns:
        `True` for looking inside; otherwise whether the module carries such a dict.

    Examples:
        >>> layer = nn.Linear(2, 2)
        >>> layer.wrapper_config = {"process_group": "self"}
        >>> config_auto_wrap_policy(layer, False, 6, False)
        True
    """
    return recurse or mark_of(module, "wrapper_config") is not None


def composer_auto_wrap_policy(
    module: nn.Module, recurse: bool = False, nonwrapped_numel: int = 0
) -> Answer:
    """Select the modules that ask for it in Composer's way.

    A module asks with `module._fsdp_wrap`, a bool or a dict of constructor arguments for its unit.
    About modules without that mark, the root is asked, if it has a method `fsdp_wrap_fn(module)`;
    the root is the module to which the policy is applied. Composer looks for the same two. Every
    other policy heeds the arguments, and the mark `False`, as well; this one also wraps because of
    them. Called by itself it knows no root, and looks at the module's own mark. Not collective.

    Args:
        module: The module asked about.
        recurse: Whether to look inside (`True`), or to make the module a unit (`False`).
        nonwrapped_numel: Not looked at.

    Returns:
        `True` for looking inside; otherwise what the module, or the root, says.

    Raises:
        PolicyError: If a mark is neither a bool nor a dict.

    Examples:
        >>> layer = nn.Linear(2, 2)
        >>> layer._fsdp_wrap = {"process_group": "self"}
        >>> composer_auto_wrap_policy(layer), composer_auto_wrap_policy(nn.Linear(2, 2))
        ({'process_group': 'self'}, False)
    """
    wish = wish_of(module, type(module).__name__)
    return recurse or (False if wish is None else wish)


def _marked_or_said_by(root: nn.Module) -> Callable[[nn.Module], bool]:
    """Return the same policy for a tree. It selects only; `plan.py` reads answers, and checks."""
    function = function_of(root, "fsdp_wrap_fn") or (lambda module: False)

    def rule(module: nn.Module) -> bool:
        mark = mark_of(module, "_fsdp_wrap")
        return (function(module) if mark is None else mark) is not False

    return rule


vars(composer_auto_wrap_policy)["_in_tree"] = _marked_or_said_by

for _by_rule in (
    *(lambda_auto_wrap_policy, transformer_auto_wrap_policy),
    *(config_auto_wrap_policy, composer_auto_wrap_policy),
):
    vars(_by_rule)["_is_blind_to_sizes"] = True


def or_policy(*policies: Any) -> AnyOf:
    """Combine policies: a module becomes a unit if at least one of them selects it.

    They may be of different forms. Where two return dicts for one module, the arguments add up,
    and the earlier policy wins where they disagree. A policy that sees sizes counts what the
    units of the others took. Not collective.

    Args:
        *policies: The policies.

    Returns:
        A policy.

    Examples:
        >>> policy = or_policy(
        ...     ModuleWrapPolicy({nn.Linear}),
        ...     lambda module: {"process_group": "self"} if module.training else False,
        ... )
        >>> policy(nn.Linear(2, 2)), policy(nn.ReLU().eval())
        ({'process_group': 'self'}, False)
    """
    return AnyOf(policies)


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Any]
) -> Any:
    """Combine policies, in torch's words: set `policies` with `functools.partial`."""
    return AnyOf(policies)(module, recurse, nonwrapped_numel)


class ModuleWrapPolicy:
    """Select every module of the given classes, and of classes derived from them.

    Args:
        module_classes: The classes, for example those of encoder and decoder layers.

    Raises:
        PolicyError: If something else than module classes is given.
        ContainerWithoutForwardError: If a class is a container without a `forward`.

    Examples:
        >>> policy = ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.Embedding})
        >>> policy(nn.Embedding(4, 2)), policy(nn.Linear(2, 2))
        (True, False)
    """

    _is_asked_once = True

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        classes = tuple(module_classes) if isinstance(module_classes, Iterable) else ()
        if not classes or not all(
            isinstance(item, type) and issubclass(item, nn.Module) for item in classes
        ):
            raise PolicyError.at(
                "ModuleWrapPolicy",
                expected="a set of module classes",
                found=repr(module_classes),
                fix="Put the classes, not their names or instances, into a set.",
            )
        for item in classes:
            if not has_forward(item):
                raise ContainerWithoutForwardError.at(
                    "ModuleWrapPolicy",
                    expected="classes with a forward, before which parameters are gathered",
                    found=f"the container {item.__name__}",
                    fix="Name the class of its elements.",
                )
        self.module_classes = classes

    def __call__(self, module: nn.Module, recurse: bool = False, *args: Any, **kwargs: Any) -> bool:
        """Return whether to look inside `module`, always, or whether it is of a class."""
        return recurse or isinstance(module, self.module_classes)

    def __repr__(self) -> str:
        names = ", ".join(sorted(item.__name__ for item in self.module_classes))
        return f"ModuleWrapPolicy({names})"


class CustomPolicy:
    """Select what a function selects. The function alone does as well; this is torch's name.

    Args:
        lambda_fn: Takes a module; returns `True`, `False`, or a dict of constructor arguments
            for the unit that the module becomes.

    Examples:
        >>> policy = CustomPolicy(
        ...     lambda module: {"process_group": "self"} if isinstance(module, nn.Linear) else False
        ... )
        >>> policy(nn.Linear(2, 2)), policy(nn.ReLU())
        ({'process_group': 'self'}, False)
    """

    _is_asked_once = True

    def __init__(self, lambda_fn: Callable[[nn.Module], Answer]) -> None:
        self.lambda_fn = lambda_fn

    def __call__(
        self, module: nn.Module, recurse: bool = False, *args: Any, **kwargs: Any
    ) -> Answer:
        """Return whether to look inside `module`, always, or what the function returns for it."""
        return recurse or self.lambda_fn(module)

    def __repr__(self) -> str:
        return f"CustomPolicy({describe_policy(self.lambda_fn)})"
