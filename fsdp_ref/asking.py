"""How any policy is asked about a tree: whatever its form, the same two questions per module.

The questions are: shall I look inside, and does it become a unit? A policy that wants to know
sizes hears both. Every other policy hears the second one only, and the answer to the first is
yes. Nothing is changed here, and nothing is checked: `plan.py` does that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from fsdp_ref.errors import PolicyError
from fsdp_ref.marks import is_left_out
from fsdp_ref.naming import where_is
from fsdp_ref.originals import NOTHING_IGNORED, Ignored, has_forward

FORCE_LEAF_MODULES: frozenset[type[nn.Module]] = frozenset({nn.MultiheadAttention})
"""Classes that read the weights of modules inside them without calling those modules."""

Ask: TypeAlias = Callable[[nn.Module, bool, int, bool], Any]
"""A policy reduced to one form: module, whether to look inside, elements left, whether root."""


class AnyOf:
    """Select what at least one of several policies selects.

    Args:
        policies: Policies of any form.

    Attributes:
        policies: The same.
    """

    def __init__(self, policies: Iterable[Any]) -> None:
        self.policies = tuple(policies)

    def __call__(self, module: nn.Module, recurse: bool = False, nonwrapped_numel: int = 0) -> Any:
        """Answer for one module, in torch's words."""
        ask = one_form(self, module, {}, NOTHING_IGNORED)
        return ask(module, recurse, nonwrapped_numel, False)

    def __repr__(self) -> str:
        return " or ".join(map(describe_policy, self.policies))


def answers_of(
    root: nn.Module,
    policy: Any,
    defaults: Mapping[str, Any],
    ignored: Ignored = NOTHING_IGNORED,
) -> Iterator[tuple[str, nn.Module, Any]]:
    """Ask a policy of any form about a tree. Changes nothing, and is not collective.

    Args:
        root: The tree.
        policy: The policy.
        defaults: Arguments of all units; torch's objects mix them into their answers.
        ignored: What is not asked about, and does not count.

    Yields:
        Name, module and answer for each module that the policy does not decline, children
        before parents. The answers are not checked.

    Raises:
        PolicyError: If `policy` is not a policy at all.
    """
    ask = one_form(policy, root, defaults, ignored)
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, name: str) -> Generator[tuple[str, nn.Module, Any], None, int]:
        """Yield answers, and return how many elements the units in `module` took."""
        seen.add(module)
        numel = ignored.counted_numel(module)
        if ask(module, True, numel, module is root) is False:
            return 0
        taken = 0
        for child_name, child in _children(module):
            if child not in seen and child not in ignored.modules:
                taken += yield from visit(child, f"{name}.{child_name}" if name else child_name)
        if not has_forward(type(module)) or is_left_out(module):
            return taken
        answer = ask(module, False, numel - taken, module is root)
        if answer is False:
            return taken
        yield name, module, answer
        return numel

    yield from visit(root, "")


def one_form(policy: Any, root: nn.Module, defaults: Mapping[str, Any], ignored: Ignored) -> Ask:
    """Bring a policy into the one form in which it is asked. Changes nothing.

    Args:
        policy: A function of a module, a function that sees sizes, one of torch's objects, or a
            combination of such.
        root: The tree that it will be asked about.
        defaults: Arguments of all units.
        ignored: What it is not asked about.

    Returns:
        The function to ask.

    Raises:
        PolicyError: If `policy` is not a policy at all.
    """
    if isinstance(policy, AnyOf):
        parts = [one_form(part, root, defaults, ignored) for part in policy.policies]
        return lambda *question: _first_of(part(*question) for part in parts)
    if hasattr(policy, "_in_tree"):  # it has to know the root
        in_tree: Callable[[nn.Module], Any] = policy._in_tree(root)
        return lambda module, recurse, *_: recurse or in_tree(module)
    if hasattr(policy, "_run_policy"):  # torch's policy objects
        targets = policy._run_policy(root, set(ignored.modules), dict(defaults))
        own = {module: _own_part(answer, defaults) for module, answer in targets.items()}
        return lambda module, recurse, *_: recurse or own.get(module, False)
    if not callable(policy) or isinstance(policy, type):
        raise PolicyError.at(
            where_is(""),
            expected="a policy: a function of a module, or a policy object",
            found=repr(policy),
            fix="For a class or a set of classes, say ModuleWrapPolicy({...}).",
        )
    if is_asked_twice(policy):
        return partial(_ask_in_its_words, policy)
    return lambda module, recurse, *_: recurse or policy(module)


def _own_part(answer: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one of torch's objects wants for a unit, without the arguments of all."""
    return {
        key: value
        for key, value in answer.items()
        if key not in defaults or value is not defaults[key]
    }


def _first_of(answers: Iterable[Any]) -> Any:
    """Combine answers: arguments add up, and where two disagree, the earlier one wins."""
    chosen = [answer for answer in answers if answer is not False]
    if len(chosen) < 2:
        return chosen[0] if chosen else False
    merged: dict[str, Any] = {}
    for answer in reversed(chosen):
        if isinstance(answer, dict):
            merged |= answer
        elif answer is not True:
            return answer  # no answer at all; whoever asked refuses it
    return merged or True


def _ask_in_its_words(
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


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the children that a policy may look at, also those that have two names."""
    if isinstance(module, tuple(FORCE_LEAF_MODULES)):
        return []
    return [(name, child) for name, child in module._modules.items() if child is not None]


# About a policy


def is_asked_twice(policy: Any) -> bool:
    """Say whether a policy wants both questions: torch's and FairScale's functions do.

    Args:
        policy: The policy.

    Returns:
        `True` for functions with an argument `recurse`, or with any keywords at all.
    """
    if hasattr(policy, "_run_policy") or getattr(policy, "_is_asked_once", False):
        return False
    try:
        parameters = inspect.signature(policy).parameters
    except (TypeError, ValueError):
        return False
    return "recurse" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def may_look_at_sizes(policy: Any) -> bool:
    """Say whether a policy may decline everything because all of it is small.

    Args:
        policy: The policy.

    Returns:
        `True` for policies that hear sizes, unless they are known to decide by class or rule.
    """
    if isinstance(policy, AnyOf):
        return any(map(may_look_at_sizes, policy.policies))
    function = policy.func if isinstance(policy, partial) else policy
    return is_asked_twice(policy) and not getattr(function, "_is_blind_to_sizes", False)


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
