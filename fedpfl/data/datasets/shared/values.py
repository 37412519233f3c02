"""Values that a user gives as an array: tensors, lists, columns of pandas, masked arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from fedpfl.ground.errors import FedpflError, error_text

NUMBERS = ("integer", "floating", "mixed-integer-float", "boolean")
"""What pandas calls objects that are numbers."""


def to_array(values: Any, origin: str) -> np.ndarray:
    """Return values as an array, without a copy where they are one.

    Raises:
        FedpflError: They are none, or some are missing.
    """
    # ---- Step 1: a tensor, of those that NumPy knows
    if isinstance(values, Tensor):
        try:
            return values.detach().cpu().numpy()
        except Exception as error:  # as many kinds as there are kinds of tensors
            raise FedpflError(
                f"{origin} is a tensor that NumPy cannot hold ({error_text(error)[:160]}); give a "
                "dense one of float32 or integers"
            ) from None

    # ---- Step 2: an array, in which NumPy would make a text of None beside texts
    require_unmasked(values, origin)
    try:
        array = np.asarray(values)
        if array.dtype.kind == "U" and not isinstance(values, np.ndarray):
            array = np.asarray(values, dtype=object)
    except ValueError:
        raise FedpflError(f"{origin} must have samples of one shape") from None
    if array.dtype == object and array.ndim:
        return _convert_objects(array, origin)
    return array


def require_unmasked(values: Any, origin: str) -> None:
    """Refuse a masked array with hidden values, which NumPy would show.

    Raises:
        FedpflError: Some are masked.
    """
    if isinstance(values, np.ma.MaskedArray):
        _require_values(np.ma.getmaskarray(values), origin)


def _convert_objects(array: np.ndarray, origin: str) -> np.ndarray:
    """Return numbers or texts that are Python's objects, as an array of them.

    Raises:
        FedpflError: Some are missing, or neither.
    """
    import pandas as pd

    _require_values(pd.isna(array), origin)
    items = array.ravel().tolist()
    if pd.api.types.infer_dtype(items) in NUMBERS:
        return np.array(array.tolist())
    for item in items:
        if hasattr(item, "__len__") and not isinstance(item, str | bytes):
            raise FedpflError(
                f"{origin} holds objects of {type(item).__name__}; give numbers or texts"
            )
    return np.array([str(item) for item in items], dtype=np.str_).reshape(array.shape)


def _require_values(is_missing: np.ndarray, origin: str) -> None:
    """Raise FedpflError where a sample has none."""
    if is_missing.any():
        sample = int(np.argwhere(is_missing)[0][0])
        raise FedpflError(
            f"{origin} has no value in sample {sample}; fill it in, or leave the sample out"
        )
