"""Policies: which modules become units. They only answer; `wrapping.py` acts on the answers.

A policy is asked about every module of a tree that could be a unit, and answers `False`,
`True`, or a dict of constructor arguments for that unit. It takes one of three forms: a
function of a module, a function that wants to know sizes too, or one of torch's objects.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from fsdp_ref.errors import ContainerWithoutForwardError, PolicyError
from fsdp_ref.naming import where_is

DEFAULT_MIN_NUM_PARAMS = int(1e8)
FORCE_LEAF_MODULES: frozenset[type[nn.Module]] = frozenset({nn.MultiheadAttention})
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


for _policy in (size_based_auto_wrap_policy, default_auto_wrap_policy):
    # In torch and FairScale these sets hang on the functions; existing code extends copies.
    vars(_policy).update(
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
            if _has_no_forward(item):
                raise ContainerWithoutForwardError.at(
                    "ModuleWrapPolicy",
                    expected="classes with a forward, before which parameters are gathered",
                    found=f"the container {item.__name__}",
                    fix="Name the class of its elements.",
                )
        self.module_classes = classes

    def __call__(self, module: nn.Module) -> bool:
        """Return whether `module` is of one of the classes."""
        return isinstance(module, self.module_classes)

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

    def __init__(self, lambda_fn: Callable[[nn.Module], Answer]) -> None:
        self.lambda_fn = lambda_fn

    def __call__(self, module: nn.Module) -> Answer:
        """Return what the function returns for `module`."""
        return self.lambda_fn(module)

    def __repr__(self) -> str:
        return f"CustomPolicy({describe_policy(self.lambda_fn)})"


# Asking any policy


def answers_of(
    root: nn.Module, policy: Any, defaults: Mapping[str, Any]
) -> Iterator[tuple[str, nn.Module, Any]]:
    """Ask a policy of any form about a tree. Changes nothing, and is not collective.

    Args:
        root: The tree.
        policy: The policy.
        defaults: Arguments of all units; torch's objects mix them into their answers.

    Yields:
        Name, module and answer for each module that the policy does not decline, children
        before parents. The answers are not checked.

    Raises:
        PolicyError: If `policy` is not a policy at all.
    """
    candidates = list(_candidates(root))
    if hasattr(policy, "_run_policy"):  # torch's policy objects
        targets = policy._run_policy(root, set(), dict(defaults))
        answers: Iterable[Any] = [targets.get(module, False) for _, module in candidates]
    elif not callable(policy) or isinstance(policy, type):
        raise PolicyError.at(
            where_is(""),
            expected="a policy: a function of a module, or a policy object",
            found=repr(policy),
            fix="For a class or a set of classes, say ModuleWrapPolicy({...}).",
        )
    elif sees_sizes(policy):
        by_module: dict[nn.Module, Any] = {}
        _walk(root, policy, by_module, is_root=True)
        answers = [by_module.get(module, False) for _, module in candidates]
    else:
        answers = [policy(module) for _, module in candidates]
    for (name, module), answer in zip(candidates, answers, strict=True):
        if answer is not False:
            yield name, module, answer


def describe_policy(policy: Any) -> str:
    """Name a policy for a message.

    Args:
        policy: The policy.

    Returns:
        The function's name where there is one.
    """
    if isinstance(policy, partial):
        return describe_policy(policy.func)
    name: str = getattr(policy, "__name__", None) or repr(policy)
    return name


def _candidates(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield each module that could be a unit once, children before parents."""
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if module in seen:
            return
        seen.add(module)
        for child_name, child in _children(module):
            yield from visit(child, f"{name}.{child_name}" if name else child_name)
        if not _has_no_forward(type(module)):
            yield name, module

    yield from visit(module, name)


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the children that a policy may look at, also those that have two names."""
    if isinstance(module, tuple(FORCE_LEAF_MODULES)):
        return []
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _has_no_forward(module_class: type[nn.Module]) -> bool:
    return module_class.forward is nn.Module.forward


def _walk(
    module: nn.Module, policy: Callable[..., Any], answers: dict[nn.Module, Any], is_root: bool
) -> int:
    """Ask a policy that sees sizes; return how many parameters the units in `module` took.

    Such a policy is asked twice: whether to look inside, and then, knowing what is left, whether
    the module becomes a unit.
    """
    numel = sum(parameter.numel() for parameter in module.parameters())
    if _ask(policy, module, True, numel, is_root) is False:
        return 0
    taken = sum(
        _walk(child, policy, answers, is_root=False)
        for _, child in _children(module)
        if child not in answers
    )
    if _has_no_forward(type(module)):
        return taken
    answers[module] = _ask(policy, module, False, numel - taken, is_root)
    return taken if answers[module] is False else numel


def _ask(
    policy: Callable[..., Any], module: nn.Module, recurse: bool, numel: int, is_root: bool
) -> Any:
    """Call a policy with what its signature asks for, in torch's or FairScale's words."""
    words = {
        "recurse": recurse,
        "nonwrapped_numel": numel,
        "unwrapped_params": numel,
        "module_is_root": is_root,
    }
    parameters = inspect.signature(policy).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        accepted = {word: words[word] for word in ("recurse", "nonwrapped_numel")}
    else:
        accepted = {word: value for word, value in words.items() if word in parameters}
    return policy(module, **accepted)


def sees_sizes(policy: Any) -> bool:
    """Say whether a policy wants to know sizes: torch's and FairScale's functions do.

    Args:
        policy: The policy.

    Returns:
        `True` for functions that are asked twice, with `recurse` on and off.
    """
    if hasattr(policy, "_run_policy") or isinstance(policy, (ModuleWrapPolicy, CustomPolicy)):
        return False
    try:
        parameters = inspect.signature(policy).parameters
    except (TypeError, ValueError):
        return False
    return "recurse" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )
