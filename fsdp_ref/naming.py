"""The name of the unit under construction, so that errors deep inside can say it.

A module does not know where it hangs in the model. Whoever wraps it does, and says so here
for as long as the constructor runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

WRAPPED = "_fsdp_wrapped_module"
"""The attribute in which a wrapper keeps the module inside, as torch's wrapper calls it too."""

_unit_name: ContextVar[str | None] = ContextVar("fsdp_ref_unit_name", default=None)


@contextmanager
def unit_name_scope(path: str) -> Iterator[None]:
    """Make ``path`` the name of the unit that is constructed inside.

    Args:
        path: The module's dotted name, as seen from the model that is being wrapped.

    Yields:
        Nothing; the name is in force until the context ends, also by an exception.

    Examples:
        >>> with unit_name_scope("layers.0"):
        ...     current_unit_name()
        'layers.0'
        >>> current_unit_name() is None
        True
    """
    token = _unit_name.set(path)
    try:
        yield
    finally:
        _unit_name.reset(token)


def current_unit_name() -> str | None:
    """Return the name of the unit under construction, or `None` where nobody said one."""
    return _unit_name.get()


def where_is(name: str) -> str:
    """Name a module for a message, as seen from the outermost constructor that is running.

    Args:
        name: Its dotted name from the module that is being wrapped; empty for that module.

    Returns:
        The unit's full name, or the argument that is being followed where it has none.

    Examples:
        >>> with unit_name_scope("encoder"):
        ...     where_is("layers.0")
        "unit 'encoder.layers.0'"
    """
    names = [part for part in (current_unit_name(), name) if part]
    return f"unit '{'.'.join(names)}'" if names else "auto_wrap_policy"
