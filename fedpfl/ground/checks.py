"""Check the keys, types and ranges of configuration values against annotations."""

from __future__ import annotations

import inspect
import unicodedata
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from pydantic import ValidationError

from fedpfl.ground.casting import cast_value, schema_annotations
from fedpfl.ground.errors import MAX_LISTED_NAMES, FedpflError, did_you_mean
from fedpfl.ground.records import Record, Values

SMALLEST_FLOAT = float(np.finfo(np.float32).smallest_normal)
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
"""Kinds of arguments that are no keys: `*args` and `**kwargs`."""
MAX_QUOTED = 200
LARGEST_FLOAT = float(np.finfo(np.float32).max)


def build_dataclass(schema: Callable[..., Any], values: Any, path: str) -> Any:
    """Build a dataclass from a group of keys.

    Args:
        schema: The dataclass.
        values: The group's keys and values.
        path: The dotted key of the group.

    Raises:
        FedpflError: If a key is unknown or has no value, or a value does not fit.
    """
    arguments = checked_arguments(schema, values, path)
    try:
        return schema(**arguments)
    except ValueError as error:  # a rule about several values together
        raise FedpflError(f"{path}.{error}" if path else str(error)) from None


def checked_arguments(
    schemas: Callable[..., Any] | tuple[Callable[..., Any], ...],
    values: Any,
    path: str,
    provided_elsewhere: Collection[str] = (),
) -> Record:
    """Return values as arguments of dataclasses or functions, checked against annotations.

    Args:
        schemas: One or several that take the values together.
        values: The group's keys and values.
        path: The dotted key of the group.
        provided_elsewhere: Arguments that are no keys of this group.

    Raises:
        FedpflError: If a key is unknown or has no value, or a value does not fit.
    """
    if not isinstance(values, Mapping):
        raise FedpflError(f"{path} must be a group of keys, got {values!r}")
    parameters: dict[str, inspect.Parameter] = {}
    annotations: Record = {}
    for schema in schemas if isinstance(schemas, tuple) else (schemas,):
        parameters |= inspect.signature(schema).parameters
        annotations |= schema_annotations(schema)

    # ---- Keys: none unknown, none absent.
    prefix = f"{path}." if path else ""
    expected_keys = {
        name: parameter.default
        for name, parameter in parameters.items()
        if name not in provided_elsewhere and parameter.kind not in VARIADIC
    }
    require_known_keys(values, expected_keys, path)
    for key, default in expected_keys.items():
        if default is inspect.Parameter.empty and key not in values:
            raise FedpflError(f"{prefix}{key} has no value; set it with {prefix}{key}=...")

    # ---- Values: each by its annotation.
    arguments = {}
    for key, value in values.items():
        full_key = prefix + key
        require_representable(value, full_key)
        try:
            arguments[key] = cast_value(value, annotations.get(key, Any), full_key)
        except ValueError as error:
            raise FedpflError(str(error)) from None
    return arguments


def require_known_keys(values: Values, known_keys: Collection[str], path: str) -> None:
    """Raise FedpflError for a key of a group that is not known."""
    prefix = f"{path}." if path else ""
    for key in values:
        if key in known_keys:
            continue
        suggestion = did_you_mean(str(key), known_keys, f"; did you mean {prefix}{{}}?")
        listing = f"; known keys: {', '.join(known_keys) or 'none'}"
        if suggestion and len(known_keys) > MAX_LISTED_NAMES:
            listing = ""
        raise FedpflError(f"{prefix}{key} is not a key here{listing}{suggestion}")


def refuse_single_text(value: Any, path: str) -> None:
    """Raise FedpflError for a text where a list of texts belongs."""
    if isinstance(value, str):
        raise FedpflError(f"{path} must be a list of texts, got {value!r}; did you mean [{value}]?")


def require_representable(value: Any, path: str) -> None:
    """Raise FedpflError for a value that float32, int64 or a text file cannot hold."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            require_representable(item, f"{path}.{key}")
    if isinstance(value, list):
        for item in value:
            require_representable(item, path)
    # Computations are in float32, where a smaller value would be a denormal or 0, a larger one
    # infinite.
    if type(value) is float and value and not SMALLEST_FLOAT <= abs(value) <= LARGEST_FLOAT:
        limits = f"{SMALLEST_FLOAT:.2g} and {LARGEST_FLOAT:.2g}"
        raise FedpflError(f"{path} must be within {limits} in size, as float32 is, got {value}")
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise FedpflError(f"{path} must be a whole number of at most 64 bits, got {value}")
    # Surrogates ("Cs") cannot be written as UTF-8; control characters would break a line of a
    # record.
    if isinstance(value, str) and any(unicodedata.category(c) in ("Cc", "Cs") for c in value):
        raise FedpflError(f"{path} must be a text without control characters, got {value!r}")


def describe_fault(error: ValidationError) -> str:
    """Describe the first value that does not fit a pydantic model, and its place."""
    fault = error.errors(include_url=False)[0]
    place = ".".join(map(str, fault["loc"])) or "all of it"
    return f"{place[:MAX_QUOTED]}: {fault['msg']}, got {fault['input']!r:.{MAX_QUOTED}}"
