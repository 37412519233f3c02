"""Nested mappings, such as configurations, by dotted keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedpfl.ground.records import Values


def flatten_keys(values: Values, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested mappings with its dotted key."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def get_dotted(values: Values, key: str, default: Any = None) -> Any:
    """Return the value or the mapping under a dotted key."""
    value: Any = values
    for part in key.split("."):
        if isinstance(value, Mapping):
            value = value.get(part, default)
        else:
            value = default
    return value
