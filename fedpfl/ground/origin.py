"""Whose code something is: this package's, which is tested, or a user's, which is tried."""

from typing import Any


def is_of_package(value: Any) -> bool:
    """Tell whether a class or function is this package's own, and no plugin's."""
    return value.__module__.startswith("fedpfl.")
