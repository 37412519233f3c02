"""Values held against annotations: their types, choices and `ranges`."""

from __future__ import annotations

import inspect
import types
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fedpfl.ground.errors import did_you_mean
from fedpfl.ground.ranges import Range

LIST_TYPES = (tuple, list, Sequence)
UNION_TYPES = (Union, types.UnionType)
TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
}
PLURAL_TYPE_NAMES = {int: "whole numbers", float: "numbers", str: "texts", Path: "paths"}


class CastError(ValueError):
    """Say that a value does not fit an annotation.

    wanted: in words what would. kind: what of it does not fit: its "type", its "range", or the
    single "value" that an
    annotation names. meant: which value was probably meant.
    """

    def __init__(self, wanted: str, kind: Literal["type", "range", "value"], meant: str = ""):
        super().__init__(wanted)
        self.wanted, self.kind, self.meant = wanted, kind, meant


class Checked:
    """Check a dataclass's values against its annotations when it is made."""

    def __post_init__(self) -> None:
        """Raise ValueError for the first field whose value does not fit."""
        for name, hint in schema_annotations(type(self)).items():  # type: ignore[arg-type]
            cast_value(getattr(self, name), hint, name)

    def check(self, rule: bool, field: str, allowed: str) -> None:
        """Raise ValueError about a field unless `rule` holds."""
        if not rule:
            raise ValueError(f"{field} must be {allowed}, got {getattr(self, field)!r}")


@cache
def schema_annotations(schema: Any) -> dict[str, Any]:
    """Return the annotations of a dataclass's fields, or of what a function or class is called
    with.
    """
    if inspect.isclass(schema) and is_dataclass(schema):
        known = get_type_hints(schema, include_extras=True)
        return {field.name: known[field.name] for field in fields(schema)}
    return get_type_hints(
        schema.__init__ if inspect.isclass(schema) else schema, include_extras=True
    )


def cast_value(value: Any, hint: Any, name: str) -> Any:
    """Return a value as its annotation has it: a list as a tuple, an int for a float as a float, a
    text as a Path.

    Raises ValueError, in one line with the name, what is allowed and the value, where it does not
    fit.
    """
    try:
        return _fit(value, hint)
    except CastError as error:
        raise ValueError(f"{name} must be {error.wanted}, got {value!r}{error.meant}") from None


def _fit(value: Any, hint: Any) -> Any:
    origin, inside = get_origin(hint), get_args(hint)
    if hint is Any or hint is inspect.Parameter.empty:
        return value
    if origin is Annotated:
        value, whole = _fit(value, inside[0]), _range(inside)
        if value not in whole:
            raise CastError(str(whole), "range")
        return value
    if origin in UNION_TYPES:
        return _fit_one(value, inside)
    if origin is Literal:
        if value in inside:
            return value
        raise CastError(
            describe_annotation(hint), "value", did_you_mean(str(value), map(str, inside))
        )
    kind = origin or hint
    if kind in LIST_TYPES:
        return _fit_items(value, hint, inside)
    if hint is Path and isinstance(value, str):
        return Path(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and number:
        return float(value)
    if isinstance(kind, type) and isinstance(value, kind) and (number or kind is not int):
        return value
    is_whole = hint is int and number and 1 <= value < 2**53 and value % 1 == 0
    meant = f"; did you mean {int(value)}?" if is_whole else ""
    raise CastError(describe_annotation(hint), "value" if hint is type(None) else "type", meant)


def _range(annotated: tuple[Any, ...]) -> Range:
    return sum((note for note in annotated if isinstance(note, Range)), Range(()))


def _fit_items(values: Any, hint: Any, inside: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple):
        raise CastError(describe_annotation(hint), "type", _as_item(values, inside))
    if get_origin(hint) is tuple and inside[-1] is not ...:
        if len(values) != len(inside):
            raise CastError(describe_annotation(hint), "type")
        return tuple(map(_fit, values, inside))
    try:
        return tuple(_fit(value, inside[0] if inside else Any) for value in values)
    except CastError as error:
        raise (
            error
            if error.kind == "range"
            else CastError(describe_annotation(hint), "type", error.meant)
        ) from None


def _as_item(value: Any, inside: tuple[Any, ...]) -> str:
    """Return that a list of this one value was probably meant, if it can be an item."""
    if not inside or (len(inside) > 1 and inside[-1] is not ...):
        return ""
    try:
        _fit(value, inside[0])
    except CastError:
        return ""
    return f"; did you mean [{value}]?"


def _fit_one(value: Any, options: tuple[Any, ...]) -> Any:
    """Fit the first of several annotations that takes the value."""
    faults = []
    for option in options:
        try:
            return _fit(value, option)
        except CastError as fault:
            faults.append(fault)
    close = any(fault.kind == "range" for fault in faults)
    words = [fault.wanted for fault in faults if fault.kind != "type" or not close]
    meant = next((fault.meant for fault in faults if fault.meant), "")
    raise CastError(_either(words), "range" if close else "type", meant)


def _either(words: list[str]) -> str:
    return (", or " if any(" and " in word or " or " in word for word in words) else " or ").join(
        words
    )


def describe_annotation(hint: Any) -> str:
    """Return in words what values an annotation takes, without their range."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint is type(None):
        return "null"
    if origin is Annotated:
        return describe_annotation(inside[0])
    if origin in UNION_TYPES:
        return " or ".join(map(describe_annotation, inside))
    if origin is Literal:
        return f"one of {', '.join(map(str, inside))}" if len(inside) > 1 else str(inside[0])
    if (origin or hint) in LIST_TYPES:
        count = f"{len(inside)} " if origin is tuple and inside[-1] is not ... else ""
        if not inside:
            return "a list"
        item = inside[0]
        while get_origin(item) is Annotated:
            item = get_args(item)[0]
        if item in PLURAL_TYPE_NAMES:
            return f"a list of {count}{PLURAL_TYPE_NAMES[item]}"
        return f"a list of {count}values, each {describe_annotation(item)}"
    return TYPE_NAMES.get(hint, str(hint))


def describe_limits(hint: Any) -> str:
    """Return in words the range or the choices that an annotation gives, empty where it gives none."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return str(_range(inside))
    if origin is Literal:
        return describe_annotation(hint)
    if origin in LIST_TYPES:
        return describe_limits(inside[0])
    if origin in UNION_TYPES and (
        words := list(dict.fromkeys(filter(None, map(describe_limits, inside))))
    ):
        return _either([*words, *(describe_annotation(one) for one in inside if one is type(None))])
    return ""
