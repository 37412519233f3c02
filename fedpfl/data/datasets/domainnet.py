"""DomainNet (Peng et al. 2019), cleaned: 586,575 colour images of 345 classes in six domains."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedpfl.data.datasets.shared.images import Side, read_images
from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import (
    Source,
    explain_read_errors,
    find_folder,
    not_as_published,
    read_cached,
    require_count,
)
from fedpfl.ground.errors import FedpflError, choices_text

PLACE = (
    "DomainNet/ with clipart/ to sketch/ and the lists clipart_train.txt to sketch_test.txt"
    " (https://ai.bu.edu/M3SDA)"
)
SIZES = {
    "clipart": 48_129,
    "infograph": 51_605,
    "painting": 72_266,
    "quickdraw": 172_500,
    "real": 172_947,
    "sketch": 69_128,
}


def domainnet(source: Source, size: Side = 64, objects: tuple[str, ...] | None = None) -> Raw:
    """Read uint8 `[3, size, size]`, the lists of training, then of test images.

    Groups are the domains, classes in order of their names. objects: the classes to read; None: all.
    """
    # ---- Step 1: the lists, which name a class by its folder.
    root = find_folder(source, PLACE, "DomainNet", "domainnet")
    lists = [root / f"{domain}_{part}.txt" for part in ("train", "test") for domain in SIZES]
    listed = [_read_list(path) for path in lists]
    for domain, train, test in zip(SIZES, listed, listed[len(SIZES) :], strict=False):
        require_count(root / domain, "listed images", len(train) + len(test), SIZES[domain])
    kinds = sorted({Path(name).parent.name for names in listed for name in names})
    for name in objects or ():
        if name not in kinds:
            raise FedpflError(f"dataset.objects must be some of: {choices_text(kinds, name)}")

    # ---- Step 2: the images of the chosen classes.
    chosen = sorted(objects) if objects else kinds
    listed = [[name for name in names if Path(name).parent.name in chosen] for names in listed]
    counts = [len(names) for names in listed]
    names = [name for part in listed for name in part]
    raw = Raw(
        x=np.empty(0),
        y=np.array([chosen.index(Path(name).parent.name) for name in names]),
        groups=np.repeat([*range(len(SIZES)), *range(len(SIZES))], counts),
        group_names=tuple(SIZES),
        test_from=sum(counts[: len(SIZES)]),
    )
    paths = [root / name for name in names]
    cached = read_cached(source, paths, lambda: raw._replace(x=read_images(paths, size)), size)
    return cached._replace(class_names=tuple(chosen))


def _read_list(path: Path) -> list[str]:
    """Read the names of images before their numbers of classes."""
    with explain_read_errors(path, not_as_published):
        return [line.rpartition(" ")[0] for line in path.read_text().splitlines()]
