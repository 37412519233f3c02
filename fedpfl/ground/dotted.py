"""Nested mappings, such as configurations, by dotted keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flatten_keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested mappings with its dotted key."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def get_dotted(values: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return what a dotted key holds, a value or a mapping."""
    value: Any = values
    for part in key.split("."):
        value = value.get(part, default) if isinstance(value, Mapping) else default
    return value
