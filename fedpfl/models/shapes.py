"""Check the shape of samples for networks. Each function raises ValueError for unfit ones.

The shape of a federation's samples also says whether they are images, signals or token ids, and of
which data set.
"""

from __future__ import annotations

import math


def image(shape: tuple[int, ...], minimum: int = 1) -> tuple[int, int, int]:
    """Return channels, height, width of images of at least `minimum` pixels each way."""
    channels, height, width = _require_axes(shape, "images [channels, height, width]", 3)
    if min(height, width) < minimum:
        raise ValueError(
            f"images must be at least {minimum}x{minimum} pixels, got {height}x{width}"
        )
    return channels, height, width


def signal(shape: tuple[int, ...], minimum: int = 1) -> tuple[int, int]:
    """Return channels and length of signals of at least `minimum` points."""
    channels, length = _require_axes(shape, "signals [channels, length]", 2)
    if length < minimum:
        raise ValueError(f"signals must be at least {minimum} points long, got {length}")
    return channels, length


def tokens(shape: tuple[int, ...]) -> int:
    """Return the length of texts, as token ids."""
    # Shapes without a kind are those of tests and of made-up samples.
    if sample_kind(shape) not in ("token ids", "samples"):
        raise _unfit_error("token ids [length]", shape)
    (length,) = _require_axes(shape, "token ids [length]", 1)
    return length


def numbers(shape: tuple[int, ...]) -> int:
    """Count the numbers of a sample of any shape; token ids are refused."""
    if sample_kind(shape) == "token ids":
        raise _unfit_error("images, signals or features", shape)
    return math.prod(shape)


def sample_kind(shape: tuple[int, ...]) -> str:
    """Return the kind of samples; "samples" if the shape does not say."""
    return getattr(shape, "kind", "samples")


def answer_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of a sample's answer before its classes: of each token one, or ()."""
    return getattr(shape, "answer_axes", ())


def _require_axes(shape: tuple[int, ...], expected: str, axes: int) -> tuple[int, ...]:
    if len(shape) != axes:
        raise _unfit_error(expected, shape)
    return shape


def _unfit_error(expected: str, shape: tuple[int, ...]) -> ValueError:
    name = getattr(shape, "data_set", "")
    origin = f" (data set {name})" if name else ""
    advice = ""
    if sample_kind(shape) == "token ids":
        advice = "; integers are token ids, save a table of features as floats"
    elif sample_kind(shape) == "signals" and len(shape) == 2 and expected.startswith("images"):
        advice = "; of grey images save x[:, None], whose second axis is the channel"
    return ValueError(
        f"takes {expected}, got {sample_kind(shape)} of shape {list(shape)}{origin}{advice}"
    )
