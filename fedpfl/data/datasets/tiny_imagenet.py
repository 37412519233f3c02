"""Tiny-ImageNet: 110,000 colour images of 200 classes."""

from __future__ import annotations

import numpy as np

from fedpfl.data.datasets.shared.images import Side, read_images, read_table
from fedpfl.data.datasets.shared.samples import Raw, merge_parts, number_groups
from fedpfl.data.datasets.shared.source import (
    Source,
    not_as_published,
    read_cached,
    require_count,
    unpacked_folder,
)

URLS = (
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    "https://zenodo.org/records/10720917/files/tiny-imagenet-200.zip?download=1",
)
MD5 = "90528d7ca1a48142e341f4ef8d21d0de"  # Zenodo's and Avalanche's
SIZES = (100_000, 10_000)  # training and validation


def tiny_imagenet(source: Source, size: Side = 64) -> Raw:
    """Read uint8 `[3, size, size]`, classes in order of their WordNet ids; training, then
    validation.

    The validation part is the test part, as the published test part has no labels.
    """
    with unpacked_folder(
        source, "tiny-imagenet-200", "tiny-imagenet-200.zip", (MD5,), URLS
    ) as root:
        # ---- Step 1: training images in a folder per class.
        train = sorted(root.glob("train/*/images/*.JPEG"))
        require_count(root / "train", "images", len(train), SIZES[0])
        labels, names = number_groups([path.parts[-3] for path in train])

        # ---- Step 2: validation images, with a list of classes.
        notes = root / "val/val_annotations.txt"
        class_of_image: dict[str, str] = {}
        for row in read_table(notes, "\t"):
            if len(row) < 2 or row[1] not in names:
                raise not_as_published(
                    notes, f"line {len(class_of_image) + 1} names no class of the training part"
                )
            class_of_image[row[0]] = row[1]
        test = [root / "val/images" / name for name in class_of_image]
        require_count(notes, "images", len(test), SIZES[1])

        # ---- Step 3: all of them, from the second time on from the cache.
        def make() -> Raw:
            kinds = np.array([names.index(kind) for kind in class_of_image.values()])
            return merge_parts((read_images(train, size), labels), (read_images(test, size), kinds))

        return read_cached(
            source,
            {"size": size},
            [*train, *test, notes],
            make,
        )
