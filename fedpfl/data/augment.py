"""Random changes of training images: mirrored, rotated, shifted, anew in each epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedpfl.ground.casting import Checked
from fedpfl.ground.ranges import Between, WholeNumber


@dataclass(frozen=True)
class Augment(Checked):
    """Mirror, then rotate, then shift the images of a training step.

    Every pixel of the result is one pixel of the original, the nearest; nothing is interpolated.
    """

    flip: bool = False
    """Mirror every other image left to right, at random."""
    rotate: Annotated[float, Between(0, 180)] = 0.0
    """Largest angle in degrees, in both directions; the corners that turn in are black."""
    crop: WholeNumber = 0
    """Pixels of border added on each side before an image of the old size is cut out."""
    fill: Literal["black", "mean"] = "black"
    """Colour of the border; mean: zero after normalisation."""

    NUMBERS = 4  # random numbers per image: shift down, shift right, angle, mirror

    def __bool__(self) -> bool:
        return bool(self.flip or self.rotate or self.crop)

    def __call__(self, x: Tensor, views: Tensor, black: Tensor) -> Tensor:
        """Change normalised images.

        Args:
            x: Normalised images `[..., channels, height, width]`.
            views: Random numbers `[..., NUMBERS]`, uniform in [0, 1).
            black: The value of a black pixel after normalisation, `[channels, 1, 1]`.
        """
        height, width = x.shape[-2:]
        down, right, angle, mirror = views.reshape(-1, self.NUMBERS, 1, 1).unbind(1)

        # ---- Step 1: trace each pixel of the result back to its row and column in the original,
        # `[images, height, width]`. So the last change, the shift, comes first.
        row = torch.arange(height, device=x.device).view(1, -1, 1) + self._shift_pixels(down)
        column = torch.arange(width, device=x.device).view(1, 1, -1) + self._shift_pixels(right)
        is_border = find_outside(row, height) | find_outside(column, width)
        is_corner = None
        if self.rotate:
            radians = (2 * angle - 1) * math.radians(self.rotate)
            row, column = rotate_positions(row, column, radians, height, width)
            is_corner = find_outside(row, height) | find_outside(column, width)
        if self.flip:
            column = torch.where(mirror < 0.5, width - 1 - column, column)

        # ---- Step 2: read these pixels.
        position = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
        images = len(position)
        pixels = x.reshape(images, -1, height * width)
        # All channels of a pixel move together.
        index = position.flatten(1)[:, None].expand_as(pixels)
        changed = pixels.gather(2, index).view(images, -1, height, width)

        # ---- Step 3: fill the pixels that lie outside of the original.
        if is_corner is not None:
            changed = torch.where(is_corner[:, None], black, changed)
        if self.crop:
            border = black if self.fill == "black" else torch.zeros_like(black)
            changed = torch.where(is_border[:, None], border, changed)
        return changed.view(x.shape)

    def _shift_pixels(self, uniform: Tensor) -> Tensor:
        """Return shifts of -crop to +crop pixels, int64 `[images, 1, 1]`."""
        return (uniform * (2 * self.crop + 1)).floor().long() - self.crop


def find_outside(position: Tensor, size: int) -> Tensor:
    """Mark the positions outside of 0 to `size - 1`."""
    return (position < 0) | (position >= size)


def rotate_positions(
    row: Tensor, column: Tensor, angle: Tensor, height: int, width: int
) -> tuple[Tensor, Tensor]:
    """Return the pixels nearest to positions rotated about the middle by `angle` (radians)."""
    middle_row = (height - 1) / 2
    middle_column = (width - 1) / 2
    y = row - middle_row
    x = column - middle_column
    cosine = angle.cos()
    sine = angle.sin()
    rotated_row = (cosine * y + sine * x + middle_row).round().long()
    rotated_column = (cosine * x - sine * y + middle_column).round().long()
    return rotated_row, rotated_column
