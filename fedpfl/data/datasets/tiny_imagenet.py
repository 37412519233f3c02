"""Tiny-ImageNet: 110,000 colour images of 200 classes."""

from __future__ import annotations

import numpy as np

from fedpfl.data.datasets.shared.images import Side, images, rows
from fedpfl.data.datasets.shared.samples import Raw, merged, numbered
from fedpfl.data.datasets.shared.source import Source, counted, kept, unpacked, wrong

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
    with unpacked(source, "tiny-imagenet-200", "tiny-imagenet-200.zip", (MD5,), URLS) as root:
        train = sorted(root.glob("train/*/images/*.JPEG"))
        counted(root / "train", "images", len(train), SIZES[0])
        labels, names = numbered([path.parts[-3] for path in train])
        notes = root / "val/val_annotations.txt"
        held: dict[str, str] = {}
        for row in rows(notes, "\t"):
            if len(row) < 2 or row[1] not in names:
                raise wrong(notes, f"line {len(held) + 1} names no class of the training part")
            held[row[0]] = row[1]
        test = [root / "val/images" / name for name in held]
        counted(notes, "images", len(test), SIZES[1])

        def make() -> Raw:
            kinds = np.array([names.index(kind) for kind in held.values()])
            return merged((images(train, size), labels), (images(test, size), kinds))

        return kept(source, {"size": size}, [*train, *test, notes], make)
