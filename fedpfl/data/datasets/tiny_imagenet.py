"""Tiny-ImageNet: 110,000 colour images of 200 classes."""

from __future__ import annotations

from fedpfl.data.datasets.shared.images import Side, read_images
from fedpfl.data.datasets.shared.samples import Raw, merge_parts, number_groups
from fedpfl.data.datasets.shared.source import (
    Source,
    explain_read_errors,
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
    import pandas as pd

    with unpacked_folder(
        source, "tiny-imagenet-200", "tiny-imagenet-200.zip", (MD5,), URLS
    ) as root:
        train = sorted(root.glob("train/*/images/*.JPEG"))
        require_count(root / "train", "images", len(train), SIZES[0])
        labels, names = number_groups([path.parts[-3] for path in train])
        notes = root / "val/val_annotations.txt"
        with explain_read_errors(notes, not_as_published):
            table = pd.read_csv(notes, sep="\t", header=None, dtype=str)
            test_labels = table[1].map(names.index).to_numpy()
        test = [root / "val/images" / name for name in table[0]]
        require_count(notes, "images", len(test), SIZES[1])

        def make() -> Raw:
            return merge_parts(
                (read_images(train, size), labels), (read_images(test, size), test_labels)
            )

        return read_cached(source, [*train, *test, notes], make, size)
