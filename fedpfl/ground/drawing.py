"""Load matplotlib, which is slow and reads the environment when it is imported."""

from __future__ import annotations

import os
from types import ModuleType

from fedpfl.ground.errors import FedpflError


def load_matplotlib() -> ModuleType:
    """Import matplotlib.

    Raises:
        FedpflError: If the environment's MPLBACKEND is none of its backends.
    """
    try:
        import matplotlib
    except ValueError:
        backend = os.environ.get("MPLBACKEND")
        raise FedpflError(
            f"MPLBACKEND={backend}: matplotlib has no such backend; unset it, or set it to agg"
        ) from None
    return matplotlib
