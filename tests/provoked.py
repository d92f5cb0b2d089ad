"""Prove that a documented error is raised by the object that documents it.

    with provokes(fsdp_ref.wrap, errors.WrapContextError, match="enable_wrap"):
        fsdp_ref.wrap(nn.Linear(2, 2))

Unlike `pytest.raises`, `provokes` also fails when the class is merely a parent of what was
raised, and when the traceback does not pass through the code of the object: an error that
some other function raised proves nothing about the `Raises:` section of this one. It needs
no pytest, so it works inside the functions that `run_ranks` runs.
"""

from __future__ import annotations

import functools
import inspect
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, TracebackType
from typing import Any

# What runs when a class is used the way its docstring says: built, called, entered, left.
METHODS_OF_A_CLASS = ("__new__", "__init__", "__post_init__", "__call__", "__enter__", "__exit__")


class NotProvoked(AssertionError):
    """The promised error did not come, or came from elsewhere."""


class Provoked:
    """What `provokes` caught.

    Attributes:
        value: The exception, once the block has ended.
    """

    def __init__(self) -> None:
        self.value: Any = None

    @property
    def message(self) -> str:
        """The text of the exception."""
        return str(self.value)


@contextmanager
def provokes(
    obj: Any, error_class: type[BaseException], match: str | None = None
) -> Iterator[Provoked]:
    """Expect exactly ``error_class``, raised inside the code of ``obj``.

    Args:
        obj: A function, method, property, context manager or class whose docstring
            promises the error.
        error_class: The exact class. A warning class is expected as a warning.
        match: A pattern that the message must contain.

    Yields:
        An object whose ``value`` is the exception after the block.

    Raises:
        NotProvoked: If nothing, another class, another message, or another place came.
    """
    name = getattr(obj, "__qualname__", repr(obj))
    codes = codes_of(obj)
    if not codes:
        raise NotProvoked(f"{name} has no Python code that could raise {error_class.__name__}")
    caught = Provoked()
    with warnings.catch_warnings():
        if issubclass(error_class, Warning):
            warnings.simplefilter("error", error_class)
        try:
            yield caught
        except Exception as error:
            _judge(error, name, codes, error_class, match)
            caught.value = error
            return
    raise NotProvoked(f"{name} raised nothing; {error_class.__name__} was promised")


def _judge(
    error: Exception,
    name: str,
    codes: set[CodeType],
    error_class: type[BaseException],
    match: str | None,
) -> None:
    came = "".join(traceback.format_exception(error))
    promised = f"{name} promised {error_class.__name__}"
    if type(error) is not error_class:
        raise NotProvoked(f"{promised}, {type(error).__name__} came:\n{came}") from error
    if not codes & codes_in(error.__traceback__):
        raise NotProvoked(f"{promised}; it came, but not through {name}:\n{came}") from error
    if match is not None and not re.search(match, str(error)):
        raise NotProvoked(f"{promised} matching {match!r}; the message is:\n{error}") from error


def codes_of(obj: Any) -> set[CodeType]:
    """Return the code objects that run when ``obj`` is used."""
    if isinstance(obj, property):
        return {code for part in (obj.fget, obj.fset) if part for code in codes_of(part)}
    if isinstance(obj, functools.partial):
        return codes_of(obj.func)
    if inspect.isclass(obj):
        parts = [inspect.getattr_static(obj, name, None) for name in METHODS_OF_A_CLASS]
        return {code for part in parts for code in codes_of(part)}
    codes = set()
    while obj is not None:  # down through bound methods, staticmethod, wraps, contextmanager
        code = getattr(obj, "__code__", None)
        if isinstance(code, CodeType):
            codes.add(code)
        obj = getattr(obj, "__func__", None) or getattr(obj, "__wrapped__", None)
    return codes


def codes_in(trace: TracebackType | None) -> set[CodeType]:
    """Return the code objects of all frames of a traceback."""
    return {frame.f_code for frame, _ in traceback.walk_tb(trace)}
