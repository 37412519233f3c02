"""Read folders of image files, which several data sets are."""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from fedpfl.ground.ranges import Count

if TYPE_CHECKING:
    from PIL import Image

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")
OWN_SUFFIXES = (*IMAGE_SUFFIXES, ".webp", ".tif", ".tiff", ".bmp")
GREY_MODES = ("1", "L", "LA")
DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
"""Pillow's modes of images that have more than 8 bits a pixel, such as many X-rays."""
Side = Count  # pixels each way, of all images


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
    raw = Raw(np.empty(0), labels, np.array(groups), tuple(sizes))
    return read_listed(source, raw, paths, size)


def read_listed(source: Source, raw: Raw, paths: Sequence[Path], size: int) -> Raw:
    """Read images in the order of a reader's labels, or from the cache.

    Args:
        source: The data set.
        raw: All but the images.
        paths: The images.
        size: Pixels each way of the images to return.
    """
    cached = read_cached(source, paths, lambda: raw._replace(x=read_images(paths, size)), size)
    return raw._replace(x=cached.x)


def read_images(paths: Sequence[Path], size: int) -> np.ndarray:
    """Read published images as uint8 `[images, 3, size, size]`, stretched to a square."""

    def read_image(path: Path) -> np.ndarray:
        with explain_read_errors(path, not_as_published):
            return _read_pixels(path.read_bytes(), size, is_coloured=True, is_shown=False)

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

    def read_image(file: Path | bytes, origin: str) -> np.ndarray:
        try:
            content = file if isinstance(file, bytes) else file.read_bytes()
            return _read_pixels(content, size, is_coloured, is_shown=True)
        except Exception as error:  # Pillow raises a dozen kinds
            reason = error_line(error)
        raise FedpflError(
            f"{origin} cannot be read as an image: {reason}; convert it, or leave it out"
        )

    # Pillow decodes without Python's lock.
    with ThreadPoolExecutor() as pool:
        images = list(pool.map(read_image, files, origins))
    sides = images[0].shape[1:]
    for image, origin in zip(images, origins, strict=True):
        if image.shape[1:] != sides:
            raise FedpflError(
                f"{origin} is of another size ({list(image.shape[1:])}) than the first image "
                f"({list(sides)}); set dataset.size=... to scale all"
            )
    # A single colour image makes all of three channels, as a network takes one number of them.
    channels = max(len(image) for image in images)
    return np.stack([np.broadcast_to(image, (channels, *sides)) for image in images])


def show_pixels(sample: Any) -> np.ndarray:
    """Return a sample's values; of a picture of Pillow the pixels that viewers show."""
    from PIL import Image

    if isinstance(sample, Image.Image):
        sample = _convert_picture(sample, is_coloured=False, is_shown=True)
    return np.asarray(sample)


def _convert_picture(image: Image.Image, is_coloured: bool, is_shown: bool) -> Image.Image:
    """Return a picture in grey or RGB; for the arguments see `_read_pixels`."""
    from PIL import Image, ImageOps

    # Pillow would clip its pixels to 255, so that nearly all would be white.
    if image.mode in DEEP_MODES:
        raise ValueError(f"mode {image.mode} has more than 8 bits a pixel")
    mode = "L" if image.mode in GREY_MODES and not is_coloured else "RGB"
    picture = image
    if is_shown:
        picture = ImageOps.exif_transpose(image)
    if is_shown and picture.has_transparency_data:
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture.convert("RGBA"))
    return picture.convert(mode)


def _read_pixels(content: bytes, size: int | None, is_coloured: bool, is_shown: bool) -> np.ndarray:
    """Decode an image, uint8 `[1 or 3, height, width]`.

    Args:
        content: Of the file.
        size: Pixels each way to which it is stretched; None: as it is.
        is_coloured: Whether a grey image has three channels, too.
        is_shown: Whether it is turned and composed as viewers show it.

    Raises:
        ValueError: It has more than 8 bits a pixel; Pillow raises further errors.
    """
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        image.verify()  # a PNG's checksums, which opening does not compare
    with Image.open(io.BytesIO(content)) as image:
        pages = getattr(image, "n_frames", 1)
        # Phones write one picture in several sizes into an MPO file.
        if is_shown and pages > 1 and image.format != "MPO":
            raise ValueError(f"it has {pages} pages")
        picture = _convert_picture(image, is_coloured, is_shown)
    if size is not None and picture.size != (size, size):
        picture = picture.resize((size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture)
    return pixels.transpose(2, 0, 1) if pixels.ndim == 3 else pixels[None]
