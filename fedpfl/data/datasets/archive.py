"""The user's own arrays, and MedMNIST's."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedpfl.data import npz
from fedpfl.data.datasets.samples import Raw, merged, numbered
from fedpfl.data.datasets.source import Source, check_md5, file, reading, shown
from fedpfl.ground.errors import FedpflError


class MedMNIST(NamedTuple):
    """Where a data set of MedMNIST is, and the md5 of its releases of 28 x 28 images, the one behind `url` first."""

    url: str
    md5: tuple[str, ...]


# md5 and addresses as in medmnist/info.py; the first of each is release 3 (a few images fewer), the second release 2
MEDMNIST = {
    "organamnist": MedMNIST(
        "https://zenodo.org/records/10519652/files/organamnist.npz?download=1",
        ("68e3f8846a6bd62f0c9bf841c0d9eacc", "866b832ed4eeba67bfb9edee1d5544e6"),
    ),
    "organcmnist": MedMNIST(
        "https://zenodo.org/records/10519652/files/organcmnist.npz?download=1",
        ("b9ceb9546e10131b32923c5bbeaea2b1", "0afa5834fb105f7705a7d93372119a21"),
    ),
}


def archive(path: Path, medmnist_md5: tuple[str, ...] = ()) -> Raw:
    """Arrays of an .npz archive: `x` and `y`, if there are any `groups` and `test_from`; or MedMNIST's keys, merged in
    the order train, val, test.

    `medmnist_md5` holds for a file in MedMNIST's form; one with `x` and `y` is the user's own.
    """

    def fault(_: Path | str, reason: str) -> FedpflError:
        if medmnist_md5:
            check_md5(path, medmnist_md5)
        return FedpflError(
            f"{path} cannot be read as an .npz archive of plain arrays ({reason}); save it with "
            "np.savez(path, x=x, y=y)"
        )

    with reading(path, fault), npz.opened(path) as arrays:
        if "train_images" in arrays and "x" not in arrays:
            if medmnist_md5:
                check_md5(path, medmnist_md5)
            parts = ("train", "val", "test")
            return merged(*((arrays[f"{part}_images"](), arrays[f"{part}_labels"]()) for part in parts))
        for key in ("x", "y"):
            if key not in arrays:
                raise FedpflError(
                    f"{path} has no array {key!r}, only {shown(', '.join(arrays)) or 'no named arrays'}; save it with "
                    "np.savez(path, x=x, y=y), x uint8 [samples, channels, height, width], y integers [samples]"
                )
        x, y = arrays["x"](), arrays["y"]()
        groups, names = _groups(arrays["groups"](), y.shape[:1]) if "groups" in arrays else (None, ())
        return Raw(x, y, groups, names, _whole(arrays["test_from"]()) if "test_from" in arrays else None)


def _groups(values: np.ndarray, samples: tuple[int, ...]) -> tuple[np.ndarray, tuple[str, ...]]:
    if values.shape != samples:
        raise ValueError(f"groups must be a number or a name per sample, {list(samples)}, got {list(values.shape)}")
    return numbered(values)


def _whole(value: np.ndarray) -> int:
    if value.size != 1 or value.dtype.kind not in "iu":
        raise ValueError(f"test_from must be one whole number, got {value.dtype} {list(value.shape)}")
    return int(value.item())


def medmnist(source: Source) -> Raw:
    """Download; a file already there was read as `<name>.npz` (Yang et al. 2023, MedMNIST v2)."""
    url, md5 = MEDMNIST[source.name]
    return archive(file(source, f"{source.name}.npz", md5, (url,)))
