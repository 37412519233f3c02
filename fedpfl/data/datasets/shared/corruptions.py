"""Corruptions of 32 x 32 colour images by the recipe behind CIFAR-10-C (Hendrycks and Dietterich,
ICLR 2019).

Each takes images, float64 or float32 from 0 to 1 `[n, 32, 32, 3]`, the numbers of its severity and
a generator, and returns such images, not yet cut to 0..1. The published images were drawn from
another stream of random numbers. They follow the recipe, but approximate ImageMagick's motion blur
(motion_blur, snow) and OpenCV's affine map, which rounds coordinates to 1/32 pixel
(elastic_transform). Frost is not here: it needs photographs.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

Generator = np.random.Generator
SIDE = 32
IMAGES_PER_CHUNK = 1_000


def corrupt_images(images: np.ndarray, name: str, severity: int, seed: int) -> np.ndarray:
    """Return images with a corruption, the same each time.

    Args:
        images: uint8 `[n, 32, 32, 3]`.
        name: One of RECIPES.
        severity: From 1 to 5.
        seed: Of the random numbers.
    """
    corrupt, parameters = RECIPES[name]
    changed = np.empty_like(images)
    for start in range(0, len(images), IMAGES_PER_CHUNK):
        # By what is made, not by what was made before, so that each kind can be made alone.
        rng = np.random.default_rng([seed, sorted(RECIPES).index(name), severity, start])
        rows = slice(start, start + IMAGES_PER_CHUNK)
        values = corrupt(
            images[rows] / 255.0,
            parameters[severity - 1],
            rng,
        )
        changed[rows] = (np.clip(values, 0, 1) * 255).astype(
            np.uint8
        )  # which cuts fractions off, as the recipe does
    return changed


# Noise


def gaussian_noise(x: np.ndarray, c: float, rng: Generator) -> np.ndarray:
    """Add normal noise of standard deviation c."""
    return x + rng.normal(scale=c, size=x.shape)


def shot_noise(x: np.ndarray, c: float, rng: Generator) -> np.ndarray:
    """Draw Poisson counts of c photons at full brightness."""
    return rng.poisson(x * c) / c


def impulse_noise(x: np.ndarray, c: float, rng: Generator) -> np.ndarray:
    """Set a share c of values to 0 or 1."""
    return np.where(
        rng.random(x.shape) <= c,
        rng.random(x.shape) <= 0.5,
        x,
    )


# Blur


def defocus_blur(x: np.ndarray, c: tuple[float, float], rng: Generator) -> np.ndarray:
    """Blur by a disc of radius c[0], itself blurred by a Gaussian of c[1]."""
    from scipy.ndimage import correlate

    radius, blur = c
    steps = np.arange(-3, 4)  # wide enough for all radii and the blur
    disc = (steps[:, None] ** 2 + steps**2 <= radius**2).astype(float)
    bell = np.exp(-(np.arange(-1, 2) ** 2) / (2 * blur**2))
    gaussian = np.outer(bell, bell) / bell.sum() ** 2
    kernel = correlate(disc / disc.sum(), gaussian, mode="constant")
    return correlate(x, kernel[None, :, :, None], mode="mirror")


def glass_blur(x: np.ndarray, c: tuple[float, int, int], rng: Generator) -> np.ndarray:
    """Shuffle neighbouring pixels between two Gaussian blurs.

    The recipe means to swap two pixels, but copies the second over the first; so do the published
    images.
    """
    sigma, reach, times = c
    shuffled = np.floor(_gaussian_blur(x, sigma) * 255)
    number = np.arange(len(x))
    for _ in range(times):
        for row in range(SIDE - reach, reach, -1):
            for column in range(SIDE - reach, reach, -1):
                across, down = rng.integers(
                    -reach,
                    reach,
                    size=(2, len(x)),
                )
                shuffled[:, row, column] = shuffled[number, row + down, column + across]
    return _gaussian_blur(shuffled / 255, sigma)


def motion_blur(x: np.ndarray, c: tuple[float, float], rng: Generator) -> np.ndarray:
    """Blur by half a Gaussian along a line between -45 and 45 degrees."""
    radius, sigma = c
    return _blur_along_line(x, radius, sigma, rng.uniform(-45, 45, len(x)))


def zoom_blur(x: np.ndarray, c: float, rng: Generator) -> np.ndarray:
    """Take the mean of the image and its enlargements, from 1 below c by hundredths."""
    x = x.astype(np.float32)
    factors = np.arange(1, c, 0.01)
    return (x + sum(_zoom_in(x, factor) for factor in factors)) / (len(factors) + 1)


# Weather


def snow(x: np.ndarray, c: tuple[float, ...], rng: Generator) -> np.ndarray:
    """Blow flakes over a brighter, greyer image."""
    mean, deviation, zoom, threshold, radius, sigma, share = c
    flakes = _zoom_in(rng.normal(mean, deviation, (*x.shape[:3], 1)), zoom)
    flakes = np.floor(np.clip(np.where(flakes < threshold, 0, flakes), 0, 1) * 255) / 255
    flakes = (
        np.round(_blur_along_line(flakes, radius, sigma, rng.uniform(-135, -45, len(x))) * 255)
        / 255
    )
    grey = (x @ np.array([0.299, 0.587, 0.114]))[..., None]
    bright = share * x + (1 - share) * np.maximum(x, grey * 1.5 + 0.5)
    return bright + flakes + flakes[:, ::-1, ::-1]


def fog(x: np.ndarray, c: tuple[float, float], rng: Generator) -> np.ndarray:
    """Add a fractal cloud of strength c[0], smoother with c[1]."""
    strength, decay = c
    brightest = x.max((1, 2, 3), keepdims=True)
    clouds = _plasma_clouds(len(x), decay, rng)[..., None]
    return (x + strength * clouds) * brightest / (brightest + strength)


def brightness(x: np.ndarray, c: float, rng: Generator) -> np.ndarray:
    """Raise the value of HSV by c, to at most 1; hue and saturation stay."""
    value = x.max(-1, keepdims=True)
    raised = np.minimum(value + c, 1)
    return np.where(
        value > 0,
        x * raised / np.maximum(value, 1 / 255),
        raised,
    )


# Digital


def contrast(x: np.ndarray, c: float, rng: Generator) -> np.ndarray:
    """Multiply deviations from the channel's mean by c."""
    means = x.mean((1, 2), keepdims=True)
    return (x - means) * c + means


def elastic_transform(x: np.ndarray, c: tuple[float, float, float], rng: Generator) -> np.ndarray:
    """Distort by a random affine map and smooth displacements.

    The map moves each of three points by up to c[2] to each side; the displacements are of c[0].
    """
    from scipy.ndimage import gaussian_filter

    # ---- Step 1: three points, and where they go.
    strength, smooth, reach = (SIDE * value for value in c)
    middle = SIDE // 2
    side = SIDE // 3
    points = np.array(
        [
            [middle + side, middle + side],
            [middle + side, middle - side],
            [middle - side, middle - side],
        ]
    )
    moved_points = points + rng.uniform(-reach, reach, (len(x), 3, 2))
    # Rows of `back` take (column, row, 1) of the result to the image: the inverse of the map from
    # points to moved.
    ones = np.ones((len(x), 3, 1))
    back = np.linalg.solve(
        np.concatenate([moved_points, ones], 2),
        np.broadcast_to(points.astype(float), moved_points.shape),
    )

    # ---- Step 2: each pixel of the result is read where the map takes it back to.
    rows, columns = np.meshgrid(
        np.arange(SIDE),
        np.arange(SIDE),
        indexing="ij",
    )
    grid = np.stack([columns, rows, np.ones_like(rows)], -1).reshape(-1, 3)
    positions = (grid @ back).reshape(len(x), SIDE, SIDE, 2)
    x = _sample_bilinear(x, positions[..., 1], positions[..., 0], "mirror")

    # ---- Step 3: displacements, which neighbouring pixels have in common.
    across, down = (
        gaussian_filter(
            rng.uniform(-1, 1, (len(x), SIDE, SIDE)),
            (0, smooth, smooth),
            mode="reflect",
            truncate=3,
        )
        for _ in range(2)
    )
    return _sample_bilinear(
        x,
        rows + down * strength,
        columns + across * strength,
        "reflect",
    )


def pixelate(x: np.ndarray, c: float, rng: Generator) -> np.ndarray:
    """Shrink by the factor c and go back, by box means."""
    from PIL import Image

    def coarse(image: Any) -> Any:
        small = image.resize((int(SIDE * c),) * 2, Image.Resampling.BOX)
        return small.resize((SIDE, SIDE), Image.Resampling.BOX)

    return _change_each(x, coarse)


def jpeg_compression(x: np.ndarray, c: int, rng: Generator) -> np.ndarray:
    """Store as JPEG of quality c."""
    from PIL import Image

    def compress(image: Any) -> Any:
        data = io.BytesIO()
        image.save(data, "JPEG", quality=c)
        return Image.open(data)

    return _change_each(x, compress)


SEVERITY_PARAMETERS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
RECIPES: dict[str, tuple[Callable[..., np.ndarray], list[Any]]] = {
    name: (globals()[name], SEVERITY_PARAMETERS[name]) for name in SEVERITY_PARAMETERS
}
"""Function and the numbers of severities 1 to 5."""


# Steps


def _gaussian_blur(x: np.ndarray, sigma: float) -> np.ndarray:
    from scipy.ndimage import gaussian_filter

    return gaussian_filter(x, (0, sigma, sigma, 0), mode="nearest", truncate=4)


def _zoom_in(x: np.ndarray, factor: float) -> np.ndarray:
    """Enlarge the middle of the images to their size.

    Linear interpolation along an axis is a matrix.
    """
    from scipy.ndimage import zoom

    crop = int(np.ceil(SIDE / factor))
    top = (SIDE - crop) // 2
    # What scipy makes of unit vectors is the matrix that it multiplies by.
    along = zoom(np.eye(crop, dtype=x.dtype), (factor, 1), order=1)
    trim = (len(along) - SIDE) // 2
    along = along[trim : trim + SIDE]
    middle = x[:, top : top + crop, top : top + crop]
    return np.einsum("ri,nijc,sj->nrsc", along, middle, along, optimize=True)


def _blur_along_line(x: np.ndarray, radius: float, sigma: float, degrees: np.ndarray) -> np.ndarray:
    """ImageMagick's motion blur: half a Gaussian of 2 radius + 1 pixels, along a line at each
    image's angle.
    """
    steps = np.arange(2 * int(np.ceil(radius)) + 1)
    kernel = np.exp(-(steps**2) / (2 * sigma**2))
    angle = np.deg2rad(degrees)
    across = np.ceil(np.outer(np.cos(angle), steps) - 0.5).astype(int)  # [images, steps]
    down = np.ceil(np.outer(np.sin(angle), steps) - 0.5).astype(int)
    position = np.arange(SIDE)
    number = np.arange(len(x))[:, None, None]
    total = np.zeros_like(x)
    for step, share in enumerate(kernel / kernel.sum()):
        rows = np.clip(position + down[:, step, None], 0, SIDE - 1)
        columns = np.clip(position + across[:, step, None], 0, SIDE - 1)
        total += share * x[number, rows[:, :, None], columns[:, None, :]]
    return total


def _plasma_clouds(count: int, decay: float, rng: Generator) -> np.ndarray:
    """Clouds by the diamond-square algorithm on a torus, from 0 to 1, `[count, 32, 32]`."""
    heights = np.zeros((count, SIDE, SIDE))
    step = SIDE
    wibble = 100.0

    def mean(total: np.ndarray) -> np.ndarray:
        return total / 4 + wibble * rng.uniform(-wibble, wibble, total.shape)

    while step >= 2:
        half = step // 2
        corners = heights[:, ::step, ::step]
        pairs = corners + np.roll(corners, -1, 1)
        heights[:, half::step, half::step] = mean(pairs + np.roll(pairs, -1, 2))
        centres = heights[:, half::step, half::step]
        heights[:, ::step, half::step] = mean(
            centres + np.roll(centres, 1, 1) + corners + np.roll(corners, -1, 2)
        )
        heights[:, half::step, ::step] = mean(
            centres + np.roll(centres, 1, 2) + corners + np.roll(corners, -1, 1)
        )
        step = half
        wibble = wibble / decay
    heights -= heights.min((1, 2), keepdims=True)
    return heights / heights.max((1, 2), keepdims=True)


def _sample_bilinear(
    x: np.ndarray, rows: np.ndarray, columns: np.ndarray, border: str
) -> np.ndarray:
    """Interpolate images at positions `[n, 32, 32]`.

    Beyond the border they are mirrored, as scipy names it.
    """

    def inside(index: np.ndarray) -> np.ndarray:
        period = 2 * (SIDE - 1) if border == "mirror" else 2 * SIDE
        index = index % period
        return np.where(
            index < SIDE,
            index,
            period - index - (border == "reflect"),
        )

    upper_row = np.floor(rows).astype(int)
    left_column = np.floor(columns).astype(int)
    number = np.arange(len(x))[:, None, None]
    total = np.zeros(x.shape)
    for down in (0, 1):
        for across in (0, 1):
            share = np.abs(1 - down - (rows - upper_row)) * np.abs(
                1 - across - (columns - left_column)
            )
            total += (
                share[..., None] * x[number, inside(upper_row + down), inside(left_column + across)]
            )
    return total


def _change_each(x: np.ndarray, change: Callable[[Any], Any]) -> np.ndarray:
    """Apply a function of PIL images to each image.

    Half a step is added, so that a value stays when fractions are cut off.
    """
    from PIL import Image

    pixels = np.round(x * 255).astype(np.uint8)
    return (np.stack([np.asarray(change(Image.fromarray(image))) for image in pixels]) + 0.5) / 255
