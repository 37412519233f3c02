"""Cast and check values by annotations: their types, choices and `ranges`."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Optional, Union, get_args, get_origin, get_type_hints

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
    dict: "a group of keys",
}
UNEVALUABLE = (NameError, AttributeError, TypeError, SyntaxError)
"""What an annotation raises that names nothing, or nothing that can be an annotation."""
PLURAL_TYPE_NAMES = {int: "whole numbers", float: "numbers", str: "texts", Path: "paths"}


class CastError(ValueError):
    """A value does not fit an annotation.

    Attributes:
        expected: The values that would fit, in words.
        kind: What does not fit: the "type", the "range", or the single "value" that is annotated.
        suggestion: Which value was probably meant, or "".
    """

    def __init__(
        self, expected: str, kind: Literal["type", "range", "value"], suggestion: str = ""
    ):
        super().__init__(expected)
        self.expected = expected
        self.kind = kind
        self.suggestion = suggestion


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
    """Return the annotations of a dataclass's fields or of a callable's arguments.

    One that cannot be evaluated, as of a class that is imported for type checkers alone, is Any.
    """
    if inspect.isclass(schema) and is_dataclass(schema):
        annotations = _evaluate_annotations(schema)
        annotations = {field.name: annotations[field.name] for field in fields(schema)}
    else:
        annotations = _evaluate_annotations(_find_function(schema))
    # `width: int = None` means that None will do.
    for name, parameter in inspect.signature(schema).parameters.items():
        if parameter.default is None and name in annotations:
            annotations[name] = Optional[annotations[name]]  # noqa: UP045 - some have no |
    return annotations


def _find_function(schema: Any) -> Any:
    """Return the function whose annotations are those of a callable's arguments."""
    while isinstance(schema, partial):
        schema = schema.func
    if inspect.isclass(schema):
        return schema.__init__
    return schema if inspect.isroutine(schema) else type(schema).__call__


def _evaluate_annotations(owner: Any) -> dict[str, Any]:
    """Return a class's or function's annotations, with Any for those that name nothing."""
    try:
        return get_type_hints(owner, include_extras=True)
    except UNEVALUABLE:
        pass
    # One by one: a single annotation that names nothing takes all others with it.
    hints: dict[str, Any] = {}
    parts = reversed(owner.__mro__) if inspect.isclass(owner) else [inspect.unwrap(owner)]
    for part in parts:
        module_names = vars(sys.modules[part.__module__])
        for name, annotation in inspect.get_annotations(part).items():
            single = SimpleNamespace(__annotations__={name: annotation})
            try:
                hints |= get_type_hints(single, module_names, include_extras=True)
            except UNEVALUABLE:
                hints[name] = Any
    return hints


def cast_value(value: Any, hint: Any, name: str) -> Any:
    """Return a value in the type of its annotation.

    A list becomes a tuple, an int for a float a float, and a text for a Path a Path.

    Raises:
        ValueError: In one line with the name, the values that fit and the value that does not.
    """
    try:
        return _cast(value, hint)
    except CastError as error:
        message = f"{name} must be {error.expected}, got {value!r}{error.suggestion}"
        raise ValueError(message) from None


def _cast(value: Any, hint: Any) -> Any:
    """Cast a value, or raise CastError."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if hint is Any or hint is inspect.Parameter.empty:
        return value
    if origin is Annotated:
        value = _cast(value, arguments[0])
        limits = _combined_range(arguments)
        if value not in limits:
            raise CastError(str(limits), "range")
        return value
    if origin in UNION_TYPES:
        return _cast_to_first_fit(value, arguments)
    if origin is Literal:
        if value in arguments:
            return value
        suggestion = did_you_mean(str(value), map(str, arguments))
        raise CastError(describe_annotation(hint), "value", suggestion)
    if (origin or hint) in LIST_TYPES:
        return _cast_items(value, hint, arguments)
    return _cast_scalar(value, hint, origin or hint)


def _cast_scalar(value: Any, hint: Any, kind: Any) -> Any:
    """Cast a value that is no list, by an annotation that is a type."""
    if hint is Path and isinstance(value, str):
        return Path(value)
    if _is_enum(hint) and isinstance(value, str):
        if value in hint.__members__:
            return hint[value]
        raise CastError(describe_annotation(hint), "value", did_you_mean(value, hint.__members__))
    # bool is an int to Python, and none to a user.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and is_number:
        return float(value)
    if _is_instance(value, kind) and (is_number or kind is not int):
        return value

    # Up to 2**53 every whole number is a float; beyond, the suggestion might be another one.
    is_whole_float = hint is int and is_number and 1 <= value < 2**53 and value % 1 == 0
    suggestion = f"; did you mean {int(value)}?" if is_whole_float else ""
    fault: Literal["type", "value"] = "value" if hint is type(None) else "type"
    raise CastError(describe_annotation(hint), fault, suggestion)


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)


def _is_instance(value: Any, kind: Any) -> bool:
    """Tell whether a value is of a type; True where nobody can tell (TypedDict)."""
    try:
        return isinstance(value, kind)
    except TypeError:
        return True


def _combined_range(arguments: tuple[Any, ...]) -> Range:
    """Return the numbers that all ranges of an Annotated's arguments hold."""
    return sum((note for note in arguments if isinstance(note, Range)), Range(()))


def _cast_items(values: Any, hint: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cast a list's items by its annotation."""
    if not isinstance(values, list | tuple):
        raise CastError(describe_annotation(hint), "type", _suggest_list(values, arguments))
    # A tuple of fixed length has a type for each place, `tuple[int, ...]` one for all.
    if get_origin(hint) is tuple and arguments[-1] is not ...:
        if len(values) != len(arguments):
            raise CastError(describe_annotation(hint), "type")
        return tuple(map(_cast, values, arguments))
    item_hint = arguments[0] if arguments else Any
    try:
        return tuple(_cast(value, item_hint) for value in values)
    except CastError as error:
        # An item out of its range is named by the range, one of another type by the whole list's.
        if error.kind == "range":
            raise error from None
        raise CastError(describe_annotation(hint), "type", error.suggestion) from None


def _suggest_list(value: Any, arguments: tuple[Any, ...]) -> str:
    """Suggest a list of this one value, if it can be an item."""
    if not arguments or (len(arguments) > 1 and arguments[-1] is not ...):
        return ""
    try:
        _cast(value, arguments[0])
    except CastError:
        return ""
    return f"; did you mean [{value}]?"


def _cast_to_first_fit(value: Any, options: tuple[Any, ...]) -> Any:
    """Cast by the first of several annotations that takes the value."""
    errors = []
    for option in options:
        try:
            return _cast(value, option)
        except CastError as error:
            errors.append(error)

    # Where a type fits and only its range does not, other types are not what was meant.
    is_out_of_range = any(error.kind == "range" for error in errors)
    expected = [error.expected for error in errors if error.kind != "type" or not is_out_of_range]
    suggestion = next((error.suggestion for error in errors if error.suggestion), "")
    kind: Literal["range", "type"] = "range" if is_out_of_range else "type"
    raise CastError(_join_alternatives(expected), kind, suggestion)


def _join_alternatives(phrases: list[str]) -> str:
    """Join phrases by "or", with a comma before it if a phrase is compound."""
    is_compound = any(" and " in phrase or " or " in phrase for phrase in phrases)
    separator = ", or " if is_compound else " or "
    return separator.join(phrases)


def describe_annotation(hint: Any) -> str:
    """Return in words which values an annotation takes, without their range."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if hint is type(None):
        return "null"
    if origin is Annotated:
        return describe_annotation(arguments[0])
    if origin in UNION_TYPES:
        return " or ".join(map(describe_annotation, arguments))
    if origin is Literal:
        if len(arguments) > 1:
            return f"one of {', '.join(map(str, arguments))}"
        return str(arguments[0])
    if (origin or hint) in LIST_TYPES:
        return _describe_list(origin, arguments)
    if _is_enum(hint):
        return f"one of {', '.join(hint.__members__)}"
    return TYPE_NAMES.get(hint, str(hint))


def _describe_list(origin: Any, arguments: tuple[Any, ...]) -> str:
    """Return in words which lists an annotation takes."""
    if not arguments:
        return "a list"
    count = ""
    if origin is tuple and arguments[-1] is not ...:
        count = f"{len(arguments)} "
    item = arguments[0]
    while get_origin(item) is Annotated:
        item = get_args(item)[0]
    if item in PLURAL_TYPE_NAMES:
        return f"a list of {count}{PLURAL_TYPE_NAMES[item]}"
    return f"a list of {count}values, each {describe_annotation(item)}"


def describe_limits(hint: Any) -> str:
    """Return an annotation's range or choices in words, "" where it has none."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is Annotated:
        return str(_combined_range(arguments))
    if origin is Literal or _is_enum(hint):
        return describe_annotation(hint)
    if origin in LIST_TYPES:
        return describe_limits(arguments[0])
    if origin in UNION_TYPES:
        limits = list(dict.fromkeys(filter(None, map(describe_limits, arguments))))
        if limits:
            null = [describe_annotation(option) for option in arguments if option is type(None)]
            return _join_alternatives([*limits, *null])
    return ""
