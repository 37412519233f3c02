"""What tells methods and their functions apart where steps are shared, between runs or rounds."""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from typing import Any

from torch import Tensor

from fedpfl.methods import Method


def method_key(method: Method) -> Hashable:
    """Return a method's class and values, as they are now.

    Two methods may compare as equal and have different values: a class that is no dataclass has
    values that are no fields. Where a value could change inside, no second key equals the first.
    """
    return type(method), *map(_freeze, vars(method).items())


def function_key(function: Any, method: Method) -> Any:
    """Return a function of a phase; the same for each method of a class if it is the class's."""
    if inspect.ismethod(function) and function.__self__ is method:
        return function.__func__
    return function


def _freeze(value: Any) -> Hashable:
    """Return a value as it is now; an object that could change inside equals none."""
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, list | tuple):
        return tuple(map(_freeze, value))
    if isinstance(value, Tensor):
        # Steps read its memory. What holds the key holds the method, and so the tensor.
        return id(value)
    try:
        hash(value)
    except TypeError:
        return object()
    is_hashed_by_identity = type(value).__hash__ is object.__hash__
    is_code = inspect.isroutine(value) or inspect.isclass(value)
    if is_hashed_by_identity and not is_code and hasattr(value, "__dict__"):
        return object()
    return value
