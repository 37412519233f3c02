"""The keys of a plugin's class or function: its arguments, with their defaults."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Collection
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from fedpfl.ground.casting import cast_value, schema_annotations
from fedpfl.ground.checks import VARIADIC
from fedpfl.ground.errors import FedpflError


def read_defaults(
    value: Callable[..., Any], supplied: Collection[str], reserved: Collection[str]
) -> dict[str, Any]:
    """Return the defaults of the keys that a class or function has.

    An argument is no key and keeps its default if a configuration cannot hold the default, such as
    a class or a function.

    Args:
        value: The class or function.
        supplied: Arguments that fedpfl gives, which are no keys.
        reserved: Keys of the group that never reach the class or function.

    Raises:
        FedpflError: For an argument of a reserved name.
    """
    annotations = schema_annotations(value)
    factories = _find_default_factories(value)
    defaults: dict[str, Any] = {}
    for key, parameter in inspect.signature(value).parameters.items():
        if key in supplied or parameter.kind in VARIADIC:
            continue
        # The group uses the key of that name itself: this argument would never be set.
        if key in reserved:
            raise FedpflError(f"its argument {key} is a key that every choice has; rename it")
        # A dataclass shows what makes a default, not the default.
        default = factories[key]() if key in factories else parameter.default
        if default is inspect.Parameter.empty:
            defaults[key] = "???"  # Hydra's word for what has to be chosen
        elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            continue  # options are given by name
        elif _is_representable(default, annotations.get(key, Any)):
            defaults[key] = _to_config_value(default)
    return defaults


def _find_default_factories(value: Any) -> dict[str, Callable[[], Any]]:
    """Return the default factories of a dataclass's fields."""
    if not (inspect.isclass(value) and dataclasses.is_dataclass(value)):
        return {}
    return {
        field.name: field.default_factory
        for field in dataclasses.fields(value)
        if field.default_factory is not dataclasses.MISSING
    }


def _is_representable(default: Any, annotation: Any) -> bool:
    """Return True if a configuration can hold a default and gives it back."""
    try:
        config_value = _to_config_value(default)
        # A configuration holds the text of these; the annotation has to turn it back.
        is_text = isinstance(default, Enum | Path)
        return not is_text or type(cast_value(config_value, annotation, "")) is type(default)
    except (TypeError, ValueError):
        return False


def _to_config_value(default: Any) -> Any:
    """Return a default as a configuration holds it; raise TypeError if none can."""

    def convert(value: Any) -> Any:
        if isinstance(value, Enum):
            return value.name
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Path):
            return str(value)
        raise TypeError(f"no configuration holds {value!r}")

    return json.loads(json.dumps(default, default=convert))
