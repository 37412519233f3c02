"""Read folders of image files, which several data sets are."""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from fedpfl.data.datasets.shared.samples import Raw, number_groups
from fedpfl.data.datasets.shared.source import (
    Source,
    error_line,
    explain_read_errors,
    not_as_published,
    read_cached,
    require_count,
)
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import AtLeast

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")
OWN_SUFFIXES = (*IMAGE_SUFFIXES, ".webp", ".tif", ".tiff", ".bmp")
GREY_MODES = ("1", "L", "LA")
DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
"""Pillow's modes of images that have more than 8 bits a pixel, such as many X-rays."""
Side = Annotated[int, AtLeast(1)]  # pixels each way, of all images


def read_domains(source: Source, root: Path, sizes: dict[str, int], size: int) -> Raw:
    """Read images in folders `domain/class/`; groups are the domains.

    Args:
        source: The data set.
        root: The folder of domains. For a space in a domain's name its folder may have _ or
            nothing.
        sizes: The published number of images of each domain.
        size: Pixels each way of the images to return.
    """
    paths: list[Path] = []
    groups: list[int] = []
    for number, (name, published) in enumerate(sizes.items()):
        # Copies of these data sets spell "Real World" in three ways.
        spellings = [root / name.replace(" ", gap) for gap in (" ", "_", "")]
        base = next((path for path in spellings if path.is_dir()), None)
        if base is None:
            raise not_as_published(root, f"folder {name} is missing")
        files = sorted(path for path in base.glob("*/*") if path.suffix.lower() in IMAGE_SUFFIXES)
        require_count(base, "images", len(files), published)
        paths += files
        groups += [number] * len(files)
    labels, _ = number_groups([path.parent.name for path in paths])
    names = tuple(sizes)
    return read_cached(
        source,
        {"size": size},
        paths,
        lambda: Raw(read_images(paths, size), labels, np.array(groups), names),
    )


def read_images(paths: Sequence[Path], size: int) -> np.ndarray:
    """Read published images as uint8 `[images, 3, size, size]`, stretched to a square."""
    from PIL import Image

    def read_image(path: Path) -> np.ndarray:
        with explain_read_errors(path, not_as_published):
            with Image.open(path) as image:
                image.verify()  # a PNG's checksums, which opening does not compare
            with Image.open(path) as image:
                refuse_deep_image(image)
                return _to_pixels(image, "RGB", size).transpose(2, 0, 1)

    pixels = np.empty((len(paths), 3, size, size), np.uint8)
    with ThreadPoolExecutor() as pool:
        for position, image in enumerate(pool.map(read_image, paths)):
            pixels[position] = image
    return pixels


def read_own_images(
    files: Sequence[Path | bytes], origins: Sequence[str], size: int | None, is_coloured: bool
) -> np.ndarray:
    """Read images as viewers show them, uint8 `[images, channels, height, width]`.

    EXIF rotation is applied, and transparent pixels are composed on white.

    Args:
        files: Files, or their content.
        origins: What messages call each.
        size: Pixels each way to which they are stretched; None: as they are.
        is_coloured: Whether grey images have three channels, too; else one if all are grey.

    Raises:
        FedpflError: One cannot be read, or is of another size than the first.
    """
    from PIL import Image, ImageOps

    def read_image(file: Path | bytes, origin: str) -> np.ndarray:
        try:
            content = file if isinstance(file, bytes) else file.read_bytes()
            with Image.open(io.BytesIO(content)) as image:
                image.verify()
            with Image.open(io.BytesIO(content)) as image:
                refuse_deep_image(image)
                mode = "L" if image.mode in GREY_MODES and not is_coloured else "RGB"
                shown = ImageOps.exif_transpose(image)
                if shown.has_transparency_data:
                    white = Image.new("RGBA", shown.size, "white")
                    shown = Image.alpha_composite(white, shown.convert("RGBA"))
                return _to_pixels(shown, mode, size)
        except Exception as error:  # Pillow raises a dozen kinds
            reason = error_line(error)
        raise FedpflError(
            f"{origin} cannot be read as an image: {reason}; convert it, or leave it out"
        )

    # Pillow decodes without Python's lock.
    with ThreadPoolExecutor() as pool:
        images = list(pool.map(read_image, files, origins))
    height, width = images[0].shape[:2]
    for image, origin in zip(images, origins, strict=True):
        if image.shape[:2] != (height, width):
            raise FedpflError(
                f"{origin} has {image.shape[1]} x {image.shape[0]} pixels, and the first image "
                f"{width} x {height}; set dataset.size=... to scale all"
            )
    # A single colour image makes all of three channels, as a network takes one number of them.
    channels = max(image.ndim for image in images) * 2 - 3
    pixels = np.empty((len(images), channels, height, width), np.uint8)
    for target, image in zip(pixels, images, strict=True):
        target[:] = image.transpose(2, 0, 1) if image.ndim == 3 else image
    return pixels


def _to_pixels(image: Any, mode: str, size: int | None) -> np.ndarray:
    """Return an image's pixels, stretched to a square."""
    from PIL import Image

    converted = image.convert(mode)
    if size is not None and converted.size != (size, size):
        converted = converted.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(converted)


def refuse_deep_image(image: Any) -> None:
    """Raise ValueError for an image of more than 8 bits a pixel.

    Pillow would clip its pixels to 255, so that nearly all would be white.
    """
    if image.mode in DEEP_MODES:
        raise ValueError(f"mode {image.mode} has more than 8 bits a pixel")
