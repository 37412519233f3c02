"""CINIC-10 (Darlow et al. 2018): 270,000 colour images of CIFAR-10's classes, of CIFAR-10 and
ImageNet.
"""

from __future__ import annotations

from pathlib import Path

from fedpfl.data.datasets.shared.images import read_images
from fedpfl.data.datasets.shared.samples import Raw, number_groups
from fedpfl.data.datasets.shared.source import Source, read_cached, require_count, unpacked_folder

URLS = (
    "https://datashare.ed.ac.uk/server/api/core/bitstreams/e8e186cc-2688-48f1-aa5a-3fda1a43f8b6/content",
    "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
)
MD5 = "6ee4d0c996905fe93221de577967a372"  # as in many public loaders
SIZE = 90_000  # of each part


def cinic10(source: Source) -> Raw:
    """Read uint8 `[3, 32, 32]`, classes in order of their names; training, validation, test."""
    with unpacked_folder(source, "CINIC-10", "CINIC-10.tar.gz", (MD5,), URLS, flat=True) as root:
        paths: list[Path] = []
        for part in ("train", "valid", "test"):
            files = sorted((root / part).glob("*/*.png"))
            require_count(root / part, "images", len(files), SIZE)
            paths += files
        labels, _ = number_groups([path.parent.name for path in paths])
        return read_cached(
            source, paths, lambda: Raw(read_images(paths, 32), labels, test_from=2 * SIZE)
        )
