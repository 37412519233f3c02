"""Checks: keys, types and ranges of a configuration's values, against the annotations of what they
are for.
"""

from __future__ import annotations

import inspect
import math
import unicodedata
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from fedpfl.ground.casting import cast_value, schema_annotations
from fedpfl.ground.errors import MAX_LISTED_NAMES, FedpflError, choices_text, did_you_mean

SMALLEST_FLOAT, LARGEST_FLOAT = (
    float(np.finfo(np.float32).smallest_normal),
    float(np.finfo(np.float32).max),
)


def build_dataclass(schema: Callable[..., Any], values: Any, path: str) -> Any:
    """Build the dataclass `schema` from a group of keys; `path` is where they stand. Raises
    FedpflError.
    """
    try:
        return schema(**checked_arguments(schema, values, path))
    except ValueError as error:  # of several values together
        raise FedpflError(f"{path}.{error}" if path else str(error)) from None


def checked_arguments(
    schemas: Callable[..., Any] | tuple[Callable[..., Any], ...],
    values: Any,
    path: str,
    provided_elsewhere: Collection[str] = (),
) -> dict[str, Any]:
    """Return `values` as arguments of dataclasses or functions, checked against their annotations.

    given: arguments that come from elsewhere in the configuration. Raises FedpflError.
    """
    if not isinstance(values, Mapping):
        raise FedpflError(f"{path} must be a group of keys, got {values!r}")
    parameters: dict[str, inspect.Parameter] = {}
    annotations: dict[str, Any] = {}
    for schema in schemas if isinstance(schemas, tuple) else (schemas,):
        parameters |= inspect.signature(schema).parameters
        annotations |= schema_annotations(schema)
    dot = f"{path}." if path else ""
    require_known_keys(
        values, [name for name in parameters if name not in provided_elsewhere], path
    )
    for key, parameter in parameters.items():
        if (
            key not in values
            and key not in provided_elsewhere
            and parameter.default is parameter.empty
        ):
            raise FedpflError(f"{dot}{key} has no value; set it with {dot}{key}=...")
    checked = {}
    for key, value in values.items():
        try:
            checked[key] = cast_value(
                require_representable(value, dot + key), annotations.get(key, Any), dot + key
            )
        except ValueError as error:
            raise FedpflError(str(error)) from None
    return checked


def require_known_keys(values: Mapping[str, Any], known: Collection[str], path: str) -> None:
    """Raise FedpflError for a key of a group that is not known."""
    dot = f"{path}." if path else ""
    for key in values:
        if key not in known:
            meant = did_you_mean(str(key), known, f"did you mean {dot}{{}}?")
            listed = (
                f"known keys: {', '.join(known) or 'none'}"
                if len(known) <= MAX_LISTED_NAMES or not meant
                else ""
            )
            raise FedpflError(
                f"{dot}{key} is not a key here; {'; '.join(filter(None, (listed, meant)))}"
            )


def require_representable(value: Any, path: str) -> Any:
    """Return a value that can be computed with (float32, int64) and written down. Raises
    FedpflError for others.
    """
    for key, item in value.items() if isinstance(value, Mapping) else ():
        require_representable(item, f"{path}.{key}")
    for item in value if isinstance(value, list) else ():
        require_representable(item, path)
    if type(value) is float and not math.isfinite(value):
        raise FedpflError(f"{path} must be a finite number, got {value}")
    if type(value) is float and value and not SMALLEST_FLOAT <= abs(value) <= LARGEST_FLOAT:
        raise FedpflError(
            f"{path} must be within {SMALLEST_FLOAT:.2g} and {LARGEST_FLOAT:.2g} in size, as float32 is, got {value}"
        )
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise FedpflError(f"{path} must be a whole number of at most 64 bits, got {value}")
    if isinstance(value, str) and any(unicodedata.category(c) in ("Cc", "Cs") for c in value):
        raise FedpflError(f"{path} must be a text without control characters, got {value!r}")
    return value


def look_up_choice(group: str, values: Any, registry: Mapping[str, Any]) -> Any:
    """Return what a group's `name` stands for. Raises FedpflError for a name that is not in the
    registry.
    """
    name = values.get("name") if isinstance(values, Mapping) else values
    if not isinstance(name, str) or name not in registry:
        raise FedpflError(f"{group}.name must be {choices_text(sorted(registry), name)}")
    return registry[name]


def without_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's keys beside `name`."""
    return {key: value for key, value in values.items() if key != "name"}
