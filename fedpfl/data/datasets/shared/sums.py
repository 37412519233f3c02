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

from fedpfl.ground.errors import FedpflError

FLOAT_BITS = 149
"""A float32 is a whole number of 2^-149, and its square one of 2^-298."""
MANTISSA_BITS = 24


class ChannelSums(NamedTuple):
    """Hold the exact sums of a channel's values and squares.

    Attributes:
        values: Sum of the values, in units of 1 for pixels, of 2^-149 for floats.
        squares: Sum of their squares, in the square of that unit.
        number: How many values there are, without NaN.
    """

    values: int = 0
    squares: int = 0
    number: int = 0

    def add_sums(self, addend: ChannelSums) -> ChannelSums:
        """Return the sums of both."""
        return ChannelSums(*(own + other for own, other in zip(self, addend, strict=True)))

    def find_scale(self, is_image: bool) -> tuple[float, float]:
        """Return mean and standard deviation.

        The deviation of a constant channel is one grey level, of signals 1.

        Args:
            is_image: Whether they are pixels, scaled as x / 255.
        """
        # Whole numbers of any length until here; one division rounds, on every machine alike.
        denominator = self.number * (255 if is_image else 2**FLOAT_BITS)
        mean = self.values / denominator
        variance = (self.number * self.squares - self.values**2) / denominator**2
        deviation = math.sqrt(variance)
        if is_image:
            return mean, max(deviation, 1 / 255)
        return mean, deviation if deviation > 1e-6 * max(1.0, abs(mean)) else 1.0


def sum_channels(x: Tensor, index: Tensor) -> list[ChannelSums]:
    """Return the sums of each channel or feature of some samples. The device does not matter."""
    index = index.to(x.device)
    return [_sum_channel(channel[index].flatten()) for channel in x.unbind(1)]


def scale_channels(
    sums: Sequence[ChannelSums], is_image: bool, names: Sequence[str] = ()
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel; see ChannelSums.find_scale.

    Raises:
        FedpflError: A channel, or feature of these names, has no value.
    """
    for number, channel in enumerate(sums):
        if not channel.number:
            name = names[number] if names else f"number {number + 1}"
            raise FedpflError(
                f"feature {name} has no value in any training sample; leave the column out"
            )
    scales = [channel.find_scale(is_image) for channel in sums]
    return tuple(mean for mean, _ in scales), tuple(deviation for _, deviation in scales)


def _sum_channel(values: Tensor) -> ChannelSums:
    """Return the sums of values `[values]`, uint8 or float32."""
    if values.dtype == torch.uint8:
        # 256 levels: their counts give both sums without a product per pixel.
        counts = torch.bincount(values, minlength=256)
        levels = torch.arange(256)
        products = levels * counts.cpu()
        return ChannelSums(int(products.sum()), int((levels * products).sum()), len(values))
    # A float32 is m 2^e with a whole number m of 24 bits. Doubles hold the sum of up to 2^29 such
    # numbers exactly; squares have 48 bits, in two halves.
    values = values[~values.isnan()]
    fractions, exponents = np.frexp(values.cpu().double().numpy())
    mantissas = (fractions * 2**MANTISSA_BITS).astype(np.int64)
    upper, lower = np.divmod(mantissas**2, 2**MANTISSA_BITS)
    steps = exponents + FLOAT_BITS
    total = _sum_by_step(mantissas, steps, 1)
    squares = _sum_by_step(upper, steps, 2) * 2**MANTISSA_BITS + _sum_by_step(lower, steps, 2)
    return ChannelSums(total >> MANTISSA_BITS, squares >> 2 * MANTISSA_BITS, len(values))


def _sum_by_step(numbers: np.ndarray, steps: np.ndarray, power: int) -> int:
    """Return the exact sum of whole numbers, each times 2^(power x step)."""
    sums = np.bincount(steps, weights=numbers)
    return sum(int(number) << power * step for step, number in enumerate(sums.tolist()))
