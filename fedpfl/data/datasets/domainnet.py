"""DomainNet (Peng et al. 2019), cleaned: 586,575 colour images of 345 classes in six domains."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedpfl.data.datasets.shared import source as sources
from fedpfl.data.datasets.shared.images import Side, read_listed
from fedpfl.data.datasets.shared.samples import Raw
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


def domainnet(
    source: sources.Source, size: Side = 64, objects: tuple[str, ...] | None = None
) -> Raw:
    """Read uint8 `[3, size, size]`, the lists of training, then of test images.

    Groups are the domains, classes in order of their names. objects: the classes to read; None: all.
    """
    # ---- Step 1: the lists, which name a class by its folder.
    root = sources.find_folder(source, PLACE, "DomainNet", "domainnet")
    listed = [
        _read_list(root / f"{name}_{part}.txt") for part in ("train", "test") for name in SIZES
    ]
    for domain, train, test in zip(SIZES, listed, listed[len(SIZES) :], strict=False):
        sources.require_count(root / domain, "listed images", len(train + test), SIZES[domain])
    kinds = sorted({path.parent.name for paths in listed for path in paths})
    for name in objects or ():
        if name not in kinds:
            raise FedpflError(f"dataset.objects must be some of: {choices_text(kinds, name)}")

    # ---- Step 2: the images of the chosen classes.
    chosen = sorted(objects) if objects else kinds
    listed = [[path for path in paths if path.parent.name in chosen] for paths in listed]
    counts = [*map(len, listed)]
    paths = [path for some in listed for path in some]
    raw = Raw(
        x=np.empty(0),
        y=np.array([chosen.index(path.parent.name) for path in paths]),
        groups=np.repeat([*range(len(SIZES))] * 2, counts),
        group_names=tuple(SIZES),
        test_from=sum(counts[: len(SIZES)]),
        class_names=tuple(chosen),
    )
    return read_listed(source, raw, paths, size)


def _read_list(path: Path) -> list[Path]:
    """Read the paths of images, which stand before their numbers of classes."""
    with sources.explain_read_errors(path, sources.not_as_published):
        return [path.parent / line.rpartition(" ")[0] for line in path.read_text().splitlines()]
