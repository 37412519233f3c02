"""Names of types for values by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Record = dict[str, Any]
"""Values by name: a row's by column, a configuration's by key."""
Values = Mapping[str, Any]
"""A record that is only read."""
