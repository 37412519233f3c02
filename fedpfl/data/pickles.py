"""Read pickles of other programs, and make nothing but arrays and plain containers."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

CODES = "?bBhHiIlLqQefdgO"
"""Of types of arrays: numbers, bools and objects."""


def _make_dtype(code: str, *_: Any) -> np.dtype:
    # NumPy's own instance ignores the state that a pickle has; a copy would believe a false one.
    dtype = np.dtype(str(code))
    if dtype.char not in CODES:
        raise pickle.UnpicklingError(f"it wants an array of {code}")
    return dtype


MAKERS: dict[str, Any] = {
    "numpy.ndarray": "ndarray",  # which `_reconstruct` is told, and ignores
    "numpy.dtype": _make_dtype,
    "numpy.core.multiarray._reconstruct": lambda *_: np.empty(0, np.int8),
    "numpy.core.multiarray.scalar": lambda dtype, data: np.frombuffer(data, dtype)[0],
    "numpy.core.numeric._frombuffer": lambda data, dtype, shape, order: np.frombuffer(
        data, dtype
    ).reshape(shape, order=order),
}
"""Stand-ins for all names that a pickle may have."""


class PlainUnpickler(pickle.Unpickler):
    """Make arrays and plain containers alone."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name. Raises UnpicklingError for one that could run code."""
        full_name = f"{module}.{name}".replace("numpy._core", "numpy.core")
        if full_name not in MAKERS:
            raise pickle.UnpicklingError(f"it wants {full_name}, which could run code")
        return MAKERS[full_name]
