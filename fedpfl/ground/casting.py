"""Cast and check values by annotations: their types, choices and `ranges`."""

from __future__ import annotations

import contextlib
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

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    PydanticUserError,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import SchemaError

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
STRICT_TYPES = {int: StrictInt, float: StrictFloat, bool: StrictBool, str: StrictStr}
PLURAL_NAMES = {
    TYPE_NAMES[kind]: f"{TYPE_NAMES[kind].removeprefix('a ')}s" for kind in (int, float, str, Path)
}


class Checked:
    """Check a dataclass's values against its annotations when it is made."""

    def __post_init__(self) -> None:
        """Raise ValueError for the first value that does not fit."""
        for name, hint in schema_annotations(type(self)).items():  # type: ignore[arg-type]
            cast_value(getattr(self, name), hint, name)

    def check(self, rule: bool, field: str, allowed: str) -> None:
        """Raise ValueError about a field unless `rule` holds."""
        if not rule:
            raise ValueError(f"{field} must be {allowed}, got {getattr(self, field)!r}")


@cache
def schema_annotations(schema: Any) -> dict[str, Any]:
    """Return the annotations of a dataclass's fields or of a callable's arguments.

    One that cannot be evaluated, such as a class imported for type checkers alone, is Any.
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
    """Return the function that annotates a callable's arguments."""
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
    # One by one: a single unknown name makes the evaluation of all fail.
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
        return _make_adapter(hint).validate_python(value)
    except ValidationError as error:
        is_out_of_range = any(fault["type"] == "value_error" for fault in error.errors())
        expected = describe_limits(hint) if is_out_of_range else describe_annotation(hint)
        suggestion = _suggest_value(value, hint)
        raise ValueError(f"{name} must be {expected}, got {value!r}{suggestion}") from None


@cache
def _make_adapter(hint: Any) -> TypeAdapter[Any]:
    """Return pydantic's adapter of an annotation; one for Any if pydantic cannot read it."""
    try:
        return TypeAdapter(_make_strict(hint), config=ConfigDict(arbitrary_types_allowed=True))
    except (PydanticUserError, SchemaError):
        return TypeAdapter(Any)


def _make_strict(hint: Any) -> Any:
    """Return an annotation that takes no text for a number, and makes lists tuples."""
    origin = get_origin(hint)
    if hint in STRICT_TYPES:
        return STRICT_TYPES[hint]
    if hint is inspect.Parameter.empty:
        return Any
    if _is_enum(hint):
        return Annotated[hint, BeforeValidator(partial(_find_member, hint))]
    arguments = tuple(map(_make_strict, get_args(hint)))
    if origin is Annotated:
        limits = _combined_range(get_args(hint))
        return Annotated[arguments[0], AfterValidator(limits.require_value)]
    if origin in UNION_TYPES:
        return Union[arguments]  # noqa: UP007 - their number is not known
    if (origin or hint) in LIST_TYPES:
        is_of_any_length = origin is not tuple
        return tuple[(*(arguments or (Any,)), *[...] * is_of_any_length)]  # type: ignore[misc]
    return hint


def _suggest_value(value: Any, hint: Any) -> str:
    """Return a suggestion: 10 for 10.0, [x] for x, a similar name, else ""."""
    candidates: dict[str, Any] = {f"[{value}]": [value]}
    # Up to 2**53 every whole number is a float; beyond, the suggestion might differ from the value.
    if isinstance(value, float) and abs(value) < 2**53 and value % 1 == 0:
        candidates = {f"{int(value)}": int(value), **candidates}
    for text, candidate in candidates.items():
        with contextlib.suppress(ValidationError):
            _make_adapter(hint).validate_python(candidate)
            return f"; did you mean {text}?"
    names = [*map(str, _list_names(hint))]
    texts = value if isinstance(value, list | tuple) else [value]
    return next(filter(None, (did_you_mean(str(text), names) for text in texts)), "")


def _list_names(hint: Any) -> list[Any]:
    """Return the names that an annotation has a value choose from."""
    if _is_enum(hint):
        return list(hint.__members__)
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [name for argument in get_args(hint) for name in _list_names(argument)]


def _find_member(enum: type[Enum], name: Any) -> Any:
    return enum[name] if name in [*enum.__members__] else name


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)


def _combined_range(arguments: tuple[Any, ...]) -> Range:
    """Return the numbers that all ranges of an Annotated's arguments hold."""
    return sum((note for note in arguments if isinstance(note, Range)), Range(()))


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
        item = describe_annotation(arguments[0]) if arguments else "a value"
        return f"a list of {PLURAL_NAMES.get(item, f'values, each {item}')}"
    if _is_enum(hint):
        return f"one of {', '.join(hint.__members__)}"
    return TYPE_NAMES.get(hint, str(hint))


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
        limits = dict.fromkeys(filter(None, map(describe_limits, arguments)))
        if limits:
            return ", or ".join([*limits, *["null"] * (type(None) in arguments)])
    return ""
