"""Tell code of this package from a user's."""

from typing import Any


def is_of_package(value: Any) -> bool:
    """Return True if a class or function is part of this package."""
    return value.__module__.startswith("fedpfl.")
