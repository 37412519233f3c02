"""Read folders of image files, which several data sets are."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from fedpfl.data.datasets.shared.samples import Raw, number_groups
from fedpfl.data.datasets.shared.source import (
    Source,
    explain_read_errors,
    not_as_published,
    read_cached,
    require_count,
)
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import AtLeast

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")
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


def read_images(
    paths: Sequence[Path],
    size: int,
    make_error: Callable[[Path | str, str], FedpflError] = not_as_published,
) -> np.ndarray:
    """Read images as uint8 `[images, 3, size, size]`, stretched to a square.

    Args:
        paths: The files.
        size: Pixels each way.
        make_error: Makes the error of a file that cannot be read, from its path and the reason.
    """
    from PIL import Image

    def read_image(path: Path) -> np.ndarray:
        with explain_read_errors(path, make_error):
            with Image.open(path) as image:
                image.verify()  # a PNG's checksums, which are not all looked at otherwise
            with Image.open(path) as image:
                refuse_deep_image(image)
                colours = image.convert("RGB")
                if colours.size != (size, size):
                    colours = colours.resize((size, size), Image.Resampling.BILINEAR)
                return np.asarray(colours).transpose(2, 0, 1)

    pixels = np.empty((len(paths), 3, size, size), np.uint8)
    with ThreadPoolExecutor() as pool:
        for position, image in enumerate(pool.map(read_image, paths)):
            pixels[position] = image
    return pixels


def refuse_deep_image(image: Any) -> None:
    """Raise ValueError for an image of more than 8 bits a pixel.

    Pillow would clip its pixels to 255, so that nearly all would be white.
    """
    if image.mode in DEEP_MODES:
        raise ValueError(f"mode {image.mode} has more than 8 bits a pixel")


def read_table(path: Path, separator: str) -> list[list[str]]:
    """Read the rows of a table, without empty ones."""
    if not path.is_file():
        raise not_as_published(path, "it is missing")
    with (
        explain_read_errors(path, not_as_published),
        path.open(encoding="utf-8", newline="") as file,
    ):
        return [row for row in csv.reader(file, delimiter=separator) if row]
