"""Random changes of training images: mirrored, rotated, shifted, anew in each epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedpfl.ground.casting import Checked
from fedpfl.ground.ranges import AtLeast, Between


@dataclass(frozen=True)
class Augment(Checked):
    """Mirror left to right, then rotate, then shift, as a training step's images are.

    Every pixel of the result is one pixel of the original, the nearest; nothing is interpolated.
    """

    flip: bool = False
    """Mirror every other image, at random."""
    rotate: Annotated[float, Between(0, 180)] = 0.0
    """Largest angle in degrees, in both directions; the corners that turn in are black."""
    crop: Annotated[int, AtLeast(0)] = 0
    """Pixels of border added on each side before an image of the old size is cut out."""
    fill: Literal["black", "mean"] = "black"
    """What the border shows; mean: zero after normalisation."""

    NUMBERS = 4  # that are drawn per image: shift down, shift right, angle, mirror

    def __bool__(self) -> bool:
        return bool(self.flip or self.rotate or self.crop)

    def __call__(self, x: Tensor, views: Tensor, black: Tensor) -> Tensor:
        """Normalised images `[..., channels, height, width]` as `views` `[..., NUMBERS]`, uniform
        in [0, 1), have them.

        black: what a black pixel is after normalisation, `[channels, 1, 1]`.
        """
        height, width = x.shape[-2:]
        down, right, angle, mirror = views.reshape(-1, self.NUMBERS, 1, 1).unbind(1)
        # The place [images, height, width] in the original that each pixel of the result shows,
        # traced backwards.
        row = torch.arange(height, device=x.device).view(1, -1, 1) + self._shift(down)
        column = torch.arange(width, device=x.device).view(1, 1, -1) + self._shift(right)
        border = _is_outside(row, height) | _is_outside(column, width)
        corner = None
        if self.rotate:
            row, column = _rotate_positions(
                row, column, (2 * angle - 1) * math.radians(self.rotate), height, width
            )
            corner = _is_outside(row, height) | _is_outside(column, width)
        if self.flip:
            column = torch.where(mirror < 0.5, width - 1 - column, column)
        place = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
        pixels = x.reshape(len(place), -1, height * width)
        seen = pixels.gather(2, place.flatten(1)[:, None].expand_as(pixels)).view(
            len(place), -1, height, width
        )
        if corner is not None:
            seen = torch.where(corner[:, None], black, seen)
        if self.crop:
            seen = torch.where(
                border[:, None], black if self.fill == "black" else torch.zeros_like(black), seen
            )
        return seen.view(x.shape)

    def _shift(self, share: Tensor) -> Tensor:
        """By -crop to +crop pixels, int64 `[images, 1, 1]`."""
        return (share * (2 * self.crop + 1)).floor().long() - self.crop


def _is_outside(place: Tensor, size: int) -> Tensor:
    return (place < 0) | (place >= size)


def _rotate_positions(
    row: Tensor, column: Tensor, angle: Tensor, height: int, width: int
) -> tuple[Tensor, Tensor]:
    """The nearest pixels to places turned about the middle by `angle` (radians), counter-clockwise."""
    y, x = row - (height - 1) / 2, column - (width - 1) / 2
    cosine, sine = angle.cos(), angle.sin()
    return (
        (cosine * y + sine * x + (height - 1) / 2).round().long(),
        (cosine * x - sine * y + (width - 1) / 2).round().long(),
    )
