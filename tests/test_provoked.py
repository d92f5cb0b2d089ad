"""`provokes` accepts only the promised class, from the promised code."""

import functools
import warnings
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.provoked import NotProvoked, provokes


def raises(error):
    raise error


def calls(error):
    raises(error)


class Thing:
    def __init__(self, value):
        if value < 0:
            raises(ValueError("below zero"))
        self.value = value

    def method(self):
        raises(KeyError("method"))

    @staticmethod
    def static():
        raises(KeyError("static"))

    @classmethod
    def made(cls):
        return cls(-1)

    @property
    def broken(self):
        raise ValueError("property")


class Child(Thing):
    pass


@dataclass
class Checked:
    value: int

    def __post_init__(self):
        raise ValueError("post init")


@contextmanager
def opened(when):
    if when == "before":
        raise ValueError("on entering")
    yield
    raise ValueError("on leaving")


def wrapped_by(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)

    return inner


def test_the_exact_class_through_the_object_is_accepted():
    with provokes(calls, ValueError, match="deep") as caught:
        calls(ValueError("deep inside"))
    assert caught.message == "deep inside"


def test_methods_classes_properties_and_context_managers_are_recognised():
    thing = Thing(1)
    with provokes(Thing, ValueError):
        Thing(-1)
    with provokes(Child, ValueError):
        Child(-1)
    with provokes(Thing.made, ValueError):
        Thing.made()
    with provokes(thing.method, KeyError):
        thing.method()
    with provokes(Thing.method, KeyError):
        thing.method()
    with provokes(Thing.static, KeyError):
        Thing.static()
    with provokes(Thing.broken, ValueError):
        _ = thing.broken
    with provokes(Checked, ValueError):
        Checked(1)
    with provokes(opened, ValueError), opened("before"):
        pass
    with provokes(opened, ValueError), opened("after"):
        pass
    with provokes(wrapped_by(calls), ValueError):
        calls(ValueError())


def test_nothing_raised_fails():
    with pytest.raises(NotProvoked, match="raised nothing"), provokes(calls, ValueError):
        pass


def test_a_subclass_fails():
    with pytest.raises(NotProvoked, match="UnicodeError came"), provokes(calls, ValueError):
        calls(UnicodeError("a ValueError too"))


def test_another_message_fails():
    with pytest.raises(NotProvoked, match="matching"), provokes(calls, ValueError, match="deep"):
        calls(ValueError("shallow"))


def test_the_right_error_from_elsewhere_fails():
    with pytest.raises(NotProvoked, match="not through calls"), provokes(calls, ValueError):
        raises(ValueError("same class, other function"))


def test_an_object_without_code_fails():
    with pytest.raises(NotProvoked, match="no Python code"), provokes(len, TypeError):
        len(3)


def test_warnings_are_expected_as_warnings():
    def warns():
        warnings.warn("careful", UserWarning, stacklevel=1)

    with provokes(warns, UserWarning, match="careful"):
        warns()
    with pytest.raises(NotProvoked, match="raised nothing"), provokes(warns, UserWarning):
        pass
