"""Exact sums per channel, from which samples are scaled.

In any order and on any machine they give the same mean and deviation, also from the sums of sites.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

FLOAT_BITS = 149
"""A float32 is a whole number of 2^-149, and its square one of 2^-298."""
CHUNK = 2**16
LEVEL_BITS = 36
"""So many bits of a chunk's values at a time have a sum that doubles hold exactly."""


class ChannelSums(NamedTuple):
    """Hold the exact sums of a channel's values and squares.

    Attributes:
        values: Sum of the values, in units of 1 for pixels, of 2^-149 for floats.
        squares: Sum of their squares, in the square of that unit.
    """

    values: int
    squares: int

    def add_sums(self, addend: ChannelSums) -> ChannelSums:
        """Return the sums of both."""
        return ChannelSums(self.values + addend.values, self.squares + addend.squares)

    def find_scale(self, count: int, is_image: bool) -> tuple[float, float]:
        """Return mean and standard deviation.

        The deviation of a constant channel is one grey level, of signals 1.

        Args:
            count: How many values there are.
            is_image: Whether they are pixels, scaled as x / 255.
        """
        # Whole numbers of any length until here; one division rounds, on every machine alike.
        denominator = count * (255 if is_image else 2**FLOAT_BITS)
        mean = self.values / denominator
        variance = (count * self.squares - self.values**2) / denominator**2
        deviation = math.sqrt(variance)
        if is_image:
            return mean, max(deviation, 1 / 255)
        return mean, deviation if deviation > 1e-6 * max(1.0, abs(mean)) else 1.0


def sum_channels(x: Tensor, index: Tensor) -> list[ChannelSums]:
    """Return the sums of each channel or feature of some samples. The device does not matter."""
    index = index.to(x.device)
    return [_sum_channel(channel[index].flatten()) for channel in x.unbind(1)]


def scale_channels(
    sums: Sequence[ChannelSums], count: int, is_image: bool
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel; see ChannelSums.find_scale."""
    scales = [channel.find_scale(count, is_image) for channel in sums]
    return tuple(mean for mean, _ in scales), tuple(deviation for _, deviation in scales)


def _sum_channel(values: Tensor) -> ChannelSums:
    """Return the sums of values `[values]`, uint8 or float32."""
    if values.dtype == torch.uint8:
        # 256 levels: their counts give both sums without a product per pixel.
        counts = torch.bincount(values, minlength=256).tolist()
        total = sum(level * count for level, count in enumerate(counts))
        return ChannelSums(
            total,
            sum(level**2 * count for level, count in enumerate(counts)),
        )
    total = squares = 0
    for chunk in values.cpu().split(CHUNK):
        doubles = chunk.double().numpy()
        total += _sum_exactly(doubles, FLOAT_BITS)
        squares += _sum_exactly(doubles**2, 2 * FLOAT_BITS)
    return ChannelSums(total, squares)


def _sum_exactly(values: np.ndarray, bits: int) -> int:
    """Return the exact sum of at most CHUNK whole numbers of 2^-bits, in this unit."""
    total = 0
    while len(values):
        # ---- The upper bits of all values are integers, with an exact sum in any order
        _, exponent = np.frexp(np.abs(values).max())
        # 36 bits and the 16 of at most 2^16 summands stay below the 53 of a double.
        shift = max(int(exponent) - LEVEL_BITS, -bits)
        upper_parts = np.rint(values * 2.0**-shift)
        total += int(upper_parts.sum()) << (shift + bits)
        lower_parts = values - upper_parts * 2.0**shift
        values = lower_parts[lower_parts != 0]
    return total
