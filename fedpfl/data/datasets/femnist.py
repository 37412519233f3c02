"""LEAF's FEMNIST: digits and letters by up to 3,550 writers.

Caldas et al. 2018, arXiv:1812.01097.
"""

from __future__ import annotations

import numpy as np

from fedpfl.data.datasets.shared.leaf import Part, read_clients
from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import Source

SIDE = 28
TOLERANCE = 0.02  # of a pixel's 255 values; what four decimals leave


def femnist(source: Source) -> Raw:
    """Read digits, capitals, small letters, uint8 `[1, 28, 28]`; groups are the writers."""
    return read_clients(source, _to_images)


def _to_images(x: list, y: list) -> Part:
    """Pixels from 0 to 1, `[samples, 784]`, and classes."""
    values = 255 * np.array(x, np.float64).reshape(len(x), SIDE * SIDE)
    # LEAF writes pixels with four decimals, from which the 256 grey levels are found again.
    pixels = values.round().clip(0, 255)
    if not (abs(values - pixels) <= TOLERANCE).all():  # nor if one is no number
        raise ValueError("pixels are not multiples of 1/255 from 0 to 1")
    return pixels.astype(np.uint8).reshape(-1, 1, SIDE, SIDE), np.array(y)
