"""Promises of methods, networks, data sets and partitions, for the tests of plugin authors.

The room knows the engine and the configuration; nothing but the command `check` knows the room.
"""

from fedpfl.testing.elsewhere import require_equal_to_class
from fedpfl.testing.parametrize import PromiseWarning, parametrize_with_promises

__all__ = ["PromiseWarning", "parametrize_with_promises", "require_equal_to_class"]
