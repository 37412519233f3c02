"""Cast and check values by annotations: their types, choices and `ranges`."""

from __future__ import annotations

import inspect
import types
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union, get_args, get_origin, get_type_hints

from pydantic import (
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

from fedpfl.ground.ranges import describe_range
from fedpfl.ground.records import Record

LIST_TYPES = (tuple, list, Sequence)
UNION_TYPES = (Union, types.UnionType)
TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    dict: "a group of keys",
    type(None): "null",
}
STRICT_TYPES = {int: StrictInt, float: StrictFloat, bool: StrictBool, str: StrictStr}
CONFIG = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
RANGE_FAULTS = ("greater_than", "less_than", "finite_number")
"""How pydantic's names of faults begin that a number of the right type can have."""


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


# ---- The annotations of a schema


@cache
def schema_annotations(schema: Any) -> Record:
    """Return the annotations of a dataclass's fields or of a callable's arguments.

    One that cannot be evaluated, such as a class imported for type checkers alone, is Any.
    """
    if _has_fields(schema):
        hints = _evaluate_annotations(schema)
        annotations = {field.name: hints.get(field.name, Any) for field in fields(schema)}
    else:
        annotations = _evaluate_annotations(_find_function(schema))
    # `width: int = None` means that None will do.
    for name, parameter in inspect.signature(schema).parameters.items():
        if parameter.default is None and name in annotations:
            annotations[name] = Optional[annotations[name]]  # noqa: UP045 - some have no |
    return annotations


def _has_fields(schema: Any) -> bool:
    """Check that a class takes its fields as arguments, and has no `__init__` of its own."""
    if not (inspect.isclass(schema) and is_dataclass(schema)):
        return False
    owner = next(base for base in schema.__mro__ if "__init__" in vars(base))
    return "__dataclass_fields__" in vars(owner)


def _find_function(schema: Any) -> Any:
    """Return the function that annotates a callable's arguments."""
    while isinstance(schema, partial):
        schema = schema.func
    if inspect.isclass(schema):
        return schema.__init__
    return schema if inspect.isroutine(schema) else type(schema).__call__


def _evaluate_annotations(owner: Any) -> Record:
    """Return a class's or function's annotations, with Any for names that are not imported."""
    unknown_names: Record = {}
    while True:
        try:
            return get_type_hints(owner, None, unknown_names, include_extras=True)
        except NameError as error:
            unknown_names[str(error.name)] = Any
        except (AttributeError, TypeError, SyntaxError):
            return {}


# ---- Values


def cast_value(value: Any, hint: Any, name: str) -> Any:
    """Return a value in the type of its annotation.

    A list becomes a tuple, an int for a float a float, and a text for a Path a Path.

    Raises:
        ValueError: In one line with the name, the values that fit and the value that does not.
    """
    try:
        return _make_adapter(hint).validate_python(value)
    except ValidationError as error:
        faults = [fault["type"] for fault in error.errors()]
        is_out_of_range = any(fault.startswith(RANGE_FAULTS) for fault in faults)
        limits = describe_limits(hint) if is_out_of_range else ""
        expected = limits or describe_annotation(hint)
        raise ValueError(f"{name} must be {expected}, got {value!r}") from None


@cache
def _make_adapter(hint: Any) -> TypeAdapter[Any]:
    """Return pydantic's adapter of an annotation; one for Any if pydantic cannot read it."""
    try:
        return TypeAdapter(_make_strict(hint), config=CONFIG)
    except (PydanticUserError, SchemaError):
        return TypeAdapter(Any)


def _make_strict(hint: Any) -> Any:
    """Return an annotation that takes no text for a number, and makes lists tuples."""
    origin = get_origin(hint)
    if hint in STRICT_TYPES:
        return STRICT_TYPES[hint]
    if hint is inspect.Parameter.empty:
        return Any
    if origin is Annotated:
        inner, *notes = get_args(hint)
        return Annotated[(_make_strict(inner), *notes)]
    arguments = tuple(map(_make_strict, get_args(hint)))
    if origin in UNION_TYPES:
        return Union[arguments]  # noqa: UP007 - their number is not known
    if (origin or hint) in LIST_TYPES:
        is_of_any_length = origin is not tuple
        return tuple[(*(arguments or (Any,)), *[...] * is_of_any_length)]  # type: ignore[misc]
    return hint


# ---- Annotations in words


def describe_annotation(hint: Any) -> str:
    """Return in words which values an annotation takes, without their range."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is Annotated:
        return describe_annotation(arguments[0])
    if origin in UNION_TYPES:
        return " or ".join(map(describe_annotation, arguments))
    if origin is Literal:
        choices = ", ".join(map(str, arguments))
        return choices if len(arguments) == 1 else f"one of {choices}"
    if origin is dict:
        return f"{describe_annotation(arguments[1])} by name"
    if (origin or hint) in LIST_TYPES:
        item = describe_annotation(arguments[0]) if arguments else "a value"
        is_noun = item.startswith("a ") and item in TYPE_NAMES.values()
        return f"a list of {item[2:]}s" if is_noun else f"a list of values, each {item}"
    return TYPE_NAMES.get(hint, str(hint))


def describe_limits(hint: Any) -> str:
    """Return an annotation's range or choices in words, "" where it has none."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is Annotated:
        return describe_range(arguments)
    if origin is Literal:
        return describe_annotation(hint)
    if origin in LIST_TYPES:
        return describe_limits(arguments[0])
    if origin not in UNION_TYPES:
        return ""
    limits = dict.fromkeys(filter(None, map(describe_limits, arguments)))
    if limits and type(None) in arguments:
        return ", or ".join([*limits, "null"])
    return ", or ".join(limits)
