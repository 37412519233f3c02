"""matplotlib, which is slow to load and looks at the environment before it draws anything."""

from __future__ import annotations

import os
from types import ModuleType

from fedpfl.ground.errors import FedpflError


def load_matplotlib() -> ModuleType:
    """Load matplotlib. Raises FedpflError where MPLBACKEND names none of its backends."""
    try:
        import matplotlib
    except ValueError:
        name = os.environ.get("MPLBACKEND")
        raise FedpflError(
            f"MPLBACKEND={name}: matplotlib has no such backend; unset it, or set it to agg"
        ) from None
    return matplotlib
