"""What modules say about themselves: Composer's marks, and FairScale's.

| who says it | what | meaning |
| --- | --- | --- |
| a module | `_fsdp_wrap`: a bool or a dict | whether it becomes a unit, with which arguments |
| a module | `wrapper_config`: a dict | the arguments of its unit |
| a module | `_activation_checkpointing`: a bool | whether its forward is recomputed |
| the root | `fsdp_wrap_fn(module)`: a bool or a dict | as `_fsdp_wrap`, for any module inside |
| the root | `activation_checkpointing_fn(module)`: a bool | as the mark, for any module inside |

Here they are only read. A mark is an attribute of the module or of its class. What a wrapper
around a module hands on from inside is not a mark of the wrapper, or one mark would make two units.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from fsdp_ref.errors import PolicyError

Wish: TypeAlias = bool | dict[str, Any]


def mark_of(module: nn.Module, name: str) -> Any:
    """Return an attribute of a module itself, or of its class. Local.

    Args:
        module: The module.
        name: The attribute.

    Returns:
        Its value; `None` where the module has none, whatever modules inside it have.

    Examples:
        >>> layer = nn.Linear(2, 2)
        >>> layer._fsdp_wrap = True
        >>> mark_of(layer, "_fsdp_wrap"), mark_of(layer, "wrapper_config")
        (True, None)
    """
    if name in vars(module) or hasattr(type(module), name):
        return getattr(module, name)
    return None


def is_left_out(module: nn.Module) -> bool:
    """Return whether a module says that it never becomes a unit. Local.

    Args:
        module: The module.

    Returns:
        `True` if its `_fsdp_wrap` is `False`.
    """
    return mark_of(module, "_fsdp_wrap") is False


def wish_of(module: nn.Module, where: str) -> Wish | None:
    """Return what a module says about becoming a unit. Local.

    Args:
        module: The module.
        where: Its place, for messages.

    Returns:
        Its `_fsdp_wrap`; `None` if it says nothing.

    Raises:
        PolicyError: If that is neither a bool nor a dict.
    """
    wish: Wish | None = mark_of(module, "_fsdp_wrap")
    if wish is not None and not isinstance(wish, bool | dict):
        raise PolicyError.at(
            where,
            expected="_fsdp_wrap to be True, False or a dict of arguments",
            found=repr(wish),
            fix="An empty dict asks for a unit like all others.",
        )
    return wish


def config_of(module: nn.Module, where: str) -> dict[str, Any]:
    """Return the arguments that a module carries for its own unit, in FairScale's attribute.

    Args:
        module: The module.
        where: Its place, for messages.

    Returns:
        A copy of `module.wrapper_config`, or an empty dict.

    Raises:
        PolicyError: If the attribute is no dict.
    """
    config = mark_of(module, "wrapper_config")
    if config is not None and not isinstance(config, dict):
        raise PolicyError.at(
            where,
            expected="wrapper_config to be a dict of arguments",
            found=repr(config),
            fix="An empty dict asks for a unit like all others.",
        )
    return dict(config or {})


def should_recompute(module: nn.Module, where: str) -> bool | None:
    """Return what a module says about recomputing its forward in the backward. Local.

    Args:
        module: The module.
        where: Its place, for messages.

    Returns:
        Its `_activation_checkpointing`; `None` if it says nothing.

    Raises:
        PolicyError: If that is no bool.
    """
    said = mark_of(module, "_activation_checkpointing")
    return None if said is None else _as_bool(said, "_activation_checkpointing", where)


def root_says_wrap(root: nn.Module) -> Callable[[nn.Module, str], Wish]:
    """Return what a root says of any module's unit, as a function of the module and its place.

    Args:
        root: The module to which a policy is applied.

    Returns:
        Its `fsdp_wrap_fn`, checked; without one, a function that always says no. The function
        raises a `PolicyError` for an answer that is neither a bool nor a dict.

    Raises:
        PolicyError: If the attribute cannot be called.
    """
    function = function_of(root, "fsdp_wrap_fn")

    def ask(module: nn.Module, where: str) -> Wish:
        answer: Wish = False if function is None else function(module)
        if not isinstance(answer, bool | dict):
            raise PolicyError.at(
                where,
                expected="True, False or a dict of arguments from the root's fsdp_wrap_fn",
                found=repr(answer),
                fix="Does it return something for every module?",
            )
        return answer

    return ask


def root_says_recompute(root: nn.Module) -> Callable[[nn.Module, str], bool]:
    """Return what a root says of recomputing any module, as a function of module and place.

    Args:
        root: The module to which a policy is applied.

    Returns:
        Its `activation_checkpointing_fn`, checked; without one, a function that always says no.
        The function raises a `PolicyError` for an answer that is no bool.

    Raises:
        PolicyError: If the attribute cannot be called.
    """
    name = "activation_checkpointing_fn"
    function = function_of(root, name)

    def ask(module: nn.Module, where: str) -> bool:
        return function is not None and _as_bool(function(module), name, where)

    return ask


def function_of(root: nn.Module, name: str) -> Callable[[nn.Module], Any] | None:
    """Return one of the functions by which a root speaks for the modules inside. Local.

    Args:
        root: The module to which a policy is applied.
        name: Of the method, or of the attribute that holds a function.

    Returns:
        The function, whose answers are not checked; `None` if the root has none.

    Raises:
        PolicyError: If the attribute cannot be called.
    """
    function = getattr(root, name, None)
    if function is None or callable(function):
        return function
    raise PolicyError.at(
        f"{type(root).__name__}.{name}",
        expected="a method that takes a module",
        found=repr(function),
        fix="To say something about one module, set a mark on that module.",
    )


def _as_bool(said: Any, name: str, where: str) -> bool:
    if isinstance(said, bool):
        return said
    raise PolicyError.at(
        where,
        expected=f"True or False from {name}",
        found=repr(said),
        fix="It says whether the forward is recomputed in the backward; there are no arguments.",
    )
