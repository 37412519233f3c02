"""Data sets that are folders of image files: CINIC-10, Tiny-ImageNet, Mini-ImageNet, OfficeHome, PACS."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from fedpfl.data.datasets.samples import Raw, merged, numbered
from fedpfl.data.datasets.source import Source, counted, folder, kept, reading, unpacked, wrong
from fedpfl.ground.errors import FedpflError

CINIC_URLS = (
    "https://datashare.ed.ac.uk/server/api/core/bitstreams/e8e186cc-2688-48f1-aa5a-3fda1a43f8b6/content",
    "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
)
CINIC_MD5 = "6ee4d0c996905fe93221de577967a372"  # as in many public loaders
CINIC_SIZE = 90_000  # of each part
TINY_URLS = (
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    "https://zenodo.org/records/10720917/files/tiny-imagenet-200.zip?download=1",
)
TINY_MD5 = "90528d7ca1a48142e341f4ef8d21d0de"  # Zenodo's and Avalanche's
TINY_SIZES = (100_000, 10_000)  # training and validation
MINI_PLACE = "mini-imagenet/ with images/, train.csv, val.csv and test.csv (split of Ravi and Larochelle; no address)"
MINI_SIZE = 60_000
OFFICE_PLACE = (
    "OfficeHomeDataset_10072016/ with Art, Clipart, Product and 'Real World' (https://www.hemanthdv.org, OfficeHome)"
)
OFFICE_SIZES = {"Art": 2_427, "Clipart": 4_365, "Product": 4_439, "Real World": 4_357}
PACS_PLACE = "PACS/ with art_painting, cartoon, photo and sketch (https://domaingeneralization.github.io)"
PACS_SIZES = {"art_painting": 2_048, "cartoon": 2_344, "photo": 1_670, "sketch": 3_929}
ENDINGS = (".jpg", ".jpeg", ".png")
PIXELS = 80_000_000  # of one image, before it is brought to size


def cinic10(source: Source) -> Raw:
    """CIFAR-10's classes in order of their names, 32 x 32, of CIFAR-10 and ImageNet (Darlow et al. 2018); training,
    validation, test.
    """
    with unpacked(source, "CINIC-10", "CINIC-10.tar.gz", (CINIC_MD5,), CINIC_URLS, flat=True) as root:
        paths: list[Path] = []
        for part in ("train", "valid", "test"):
            own = sorted((root / part).glob("*/*.png"))
            counted(root / part, "images", len(own), CINIC_SIZE)
            paths += own
        labels, names = numbered([path.parent.name for path in paths])
        counted(root, "classes", len(names), 10)

        def make() -> Raw:
            return Raw(_images(paths, 32), labels, test_from=2 * CINIC_SIZE)

        return kept(source, {}, paths, make) if root.is_relative_to(source.folder) else make()


def tiny_imagenet(source: Source, size: int = 64) -> Raw:
    """200 classes in order of their WordNet ids; training, then validation, which is the test part (the published test
    part has no labels).
    """
    _check_size(size)
    with unpacked(source, "tiny-imagenet-200", "tiny-imagenet-200.zip", (TINY_MD5,), TINY_URLS) as root:
        train = sorted(root.glob("train/*/images/*.JPEG"))
        counted(root / "train", "images", len(train), TINY_SIZES[0])
        labels, names = numbered([path.parts[-3] for path in train])
        notes = root / "val/val_annotations.txt"
        held: dict[str, str] = {}
        for row in _rows(notes, "\t"):
            if len(row) < 2 or row[1] not in names:
                raise wrong(notes, f"line {len(held) + 1} names no class of the training part")
            held[row[0]] = row[1]
        test = [root / "val/images" / name for name in held]
        counted(notes, "images", len(test), TINY_SIZES[1])

        def make() -> Raw:
            own = np.array([names.index(kind) for kind in held.values()])
            return merged((_images(train, size), labels), (_images(test, size), own))

        inputs = [*train, *test, notes]
        return kept(source, {"size": size}, inputs, make) if root.is_relative_to(source.folder) else make()


def mini_imagenet(source: Source, size: int = 84) -> Raw:
    """100 classes of 600 images (Vinyals et al. 2016), in order of their WordNet ids. The three lists are of different
    classes, so there is no test part.
    """
    _check_size(size)
    root = folder(source, "mini-imagenet", "mini_imagenet", "miniImageNet")
    lists = [root / f"{part}.csv" for part in ("train", "val", "test")]
    names, kinds = [], []
    for path in lists:
        rows = _rows(path, ",")
        if not rows or rows[0][:2] != ["filename", "label"]:
            raise wrong(path, "its first line is not filename,label")
        if not all(len(row) >= 2 for row in rows):
            raise wrong(path, "a line has fewer than two columns")
        names += [root / "images" / row[0] for row in rows[1:]]
        kinds += [row[1] for row in rows[1:]]
    counted(root, "images in its three lists", len(names), MINI_SIZE)
    return kept(source, {"size": size}, [*names, *lists], lambda: Raw(_images(names, size), numbered(kinds)[0]))


def office_home(source: Source, size: int = 64) -> Raw:
    """65 classes in order of their names (Venkateswara et al. 2017); groups are the four domains."""
    root = folder(source, "OfficeHomeDataset_10072016", "OfficeHome", "office_home")
    return _domains(source, root, OFFICE_SIZES, size)


def pacs(source: Source, size: int = 64) -> Raw:
    """Seven classes in order of their names (Li et al. 2017); groups are the four domains."""
    return _domains(source, folder(source, "PACS/kfold", "PACS", "pacs"), PACS_SIZES, size)


def _domains(source: Source, root: Path, sizes: dict[str, int], size: int) -> Raw:
    """Folders of domains, in these of classes, in these of images. Spaces in a domain's name may be _ or left out."""
    _check_size(size)
    paths: list[Path] = []
    domains: list[int] = []
    for number, (name, published) in enumerate(sizes.items()):
        spellings = [root / name.replace(" ", gap) for gap in (" ", "_", "")]
        base = next((path for path in spellings if path.is_dir()), None)
        if base is None:
            raise wrong(root, f"folder {name} is missing")
        own = sorted(path for path in base.glob("*/*") if path.suffix.lower() in ENDINGS)
        counted(base, "images", len(own), published)
        paths += own
        domains += [number] * len(own)
    labels, _ = numbered([path.parent.name for path in paths])
    names = tuple(sizes)
    return kept(source, {"size": size}, paths, lambda: Raw(_images(paths, size), labels, np.array(domains), names))


def _images(paths: Sequence[Path], size: int) -> np.ndarray:
    """uint8 `[images, 3, size, size]`, stretched to a square where they are none."""
    from PIL import Image

    def read(path: Path) -> np.ndarray:
        with reading(path, wrong):
            with Image.open(path) as image:
                if math.prod(image.size) > PIXELS:
                    raise ValueError(f"it has {image.width:,} x {image.height:,} pixels, more than any of these images")
                image.verify()  # a PNG's checksums, which are not all looked at otherwise
            with Image.open(path) as image:
                colours = image.convert("RGB")
                if colours.size != (size, size):
                    colours = colours.resize((size, size), Image.Resampling.BILINEAR)
                return np.asarray(colours).transpose(2, 0, 1)

    found = np.empty((len(paths), 3, size, size), np.uint8)
    with ThreadPoolExecutor() as pool:
        for place, image in enumerate(pool.map(read, paths)):
            found[place] = image
    return found


def _rows(path: Path, separator: str) -> list[list[str]]:
    """The lines of a list, empty ones left out."""
    if not path.is_file():
        raise wrong(path, "it is missing")
    with reading(path, wrong), path.open(encoding="utf-8", newline="") as rows:
        return [row for row in csv.reader(rows, delimiter=separator) if row]


def _check_size(size: int) -> None:
    if size < 1:
        raise FedpflError(f"dataset.size must be 1 or more, got {size}")
