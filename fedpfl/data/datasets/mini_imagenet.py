"""Mini-ImageNet (Vinyals et al. 2016): 60,000 colour images of 100 classes."""

from __future__ import annotations

from pathlib import Path

from fedpfl.data.datasets.shared.images import Side, read_images
from fedpfl.data.datasets.shared.samples import Raw, number_groups
from fedpfl.data.datasets.shared.source import (
    Source,
    explain_read_errors,
    find_folder,
    not_as_published,
    read_cached,
    require_count,
)

PLACE = (
    "mini-imagenet/ with images/, train.csv, val.csv and test.csv (split of Ravi and Larochelle; no"
    " address)"
)
SIZE = 60_000


def mini_imagenet(source: Source, size: Side = 84) -> Raw:
    """Read uint8 `[3, size, size]`, 600 images a class, in order of their WordNet ids.

    The three lists are of different classes, so there is no test part.
    """
    import pandas as pd

    root = find_folder(source, PLACE, "mini-imagenet", "mini_imagenet", "miniImageNet")
    lists = [root / f"{part}.csv" for part in ("train", "val", "test")]
    names: list[Path] = []
    kinds: list[str] = []
    for path in lists:
        with explain_read_errors(path, not_as_published):
            table = pd.read_csv(path, dtype=str)
            names += [root / "images" / name for name in table["filename"]]
            kinds += [*table["label"]]
    require_count(root, "images in its three lists", len(names), SIZE)
    labels, _ = number_groups(kinds)
    return read_cached(
        source, [*names, *lists], lambda: Raw(read_images(names, size), labels), size
    )
