"""Mini-ImageNet (Vinyals et al. 2016): 60,000 colour images of 100 classes."""

from __future__ import annotations

from fedpfl.data.datasets.shared.images import Side, read_images, read_table
from fedpfl.data.datasets.shared.samples import Raw, number_groups
from fedpfl.data.datasets.shared.source import (
    Source,
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
    root = find_folder(source, PLACE, "mini-imagenet", "mini_imagenet", "miniImageNet")
    lists = [root / f"{part}.csv" for part in ("train", "val", "test")]
    names = []
    kinds = []
    for path in lists:
        table = read_table(path, ",")
        if not table or table[0][:2] != ["filename", "label"]:
            raise not_as_published(path, "its first line is not filename,label")
        if not all(len(row) >= 2 for row in table):
            raise not_as_published(path, "a line has fewer than two columns")
        names += [root / "images" / row[0] for row in table[1:]]
        kinds += [row[1] for row in table[1:]]
    require_count(root, "images in its three lists", len(names), SIZE)
    return read_cached(
        source,
        {"size": size},
        [*names, *lists],
        lambda: Raw(read_images(names, size), number_groups(kinds)[0]),
    )
