"""Digit5: ten digits in five domains."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from fedpfl.data.datasets.shared.images import Side
from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import Source, counted, folder, kept, reading, wrong

PLACE = (
    "Digit-Five/ with mnist_data.mat, mnistm_with_label.mat, svhn_train_32x32.mat, svhn_test_32x32.mat, "
    "syn_number.mat and usps_28x28.mat (http://ai.bu.edu/M3SDA, Digit-Five)"
)
SIZES = {
    "mnist": (55_000, 10_000),
    "mnist_m": (55_000, 10_000),
    "svhn": (73_257, 26_032),
    "syn": (25_000, 9_000),
    "usps": (7_438, 1_860),
}  # training and test images
PROBE = """
import contextlib, resource, sys
from scipy.io import loadmat
with contextlib.suppress(ValueError, OSError):  # where there is a lower limit already
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30,) * 2)  # bytes, more than any of the files takes
for path in sys.argv[1:]:
    print(path, flush=True)
    loadmat(path)
"""
FILES = ("mnist_data", "mnistm_with_label", "svhn_train_32x32", "svhn_test_32x32", "syn_number", "usps_28x28")

Part = tuple[np.ndarray, np.ndarray]  # images and labels


def digit5(source: Source, size: Side = 32) -> Raw:
    """Read the .mat files of Peng et al. 2019: MNIST, MNIST-M, SVHN, synthetic digits, USPS, in three channels.

    First the training parts of all domains, then their test parts; groups are the domains.
    """
    root = folder(source, PLACE, "Digit-Five", "digit_five", "Digit5")
    paths = [root / f"{name}.mat" for name in FILES]

    def make() -> Raw:
        x, y, groups = [], [], []
        _probe(paths)
        domains = _domains(root)
        for part in (0, 1):
            for number, (name, parts) in enumerate(domains.items()):
                images, labels = parts[part]
                counted(root, f"images of {name}", len(images), SIZES[name][part])
                counted(root, f"labels of {name}", len(labels), SIZES[name][part])
                x.append(_resized(images, size))
                y.append(labels.astype(np.int64) % 10)  # SVHN's 0 is stored as 10
                groups.append(np.full(len(x[-1]), number))
        start = sum(map(len, y[: len(SIZES)]))
        return Raw(np.concatenate(x), np.concatenate(y), np.concatenate(groups), tuple(SIZES), start)

    return kept(source, {"size": size}, paths, make)


def _probe(paths: Sequence[Path]) -> None:
    """Read the files in a process of its own, with little memory: some damage crashes SciPy, and with it the process.

    Raises FedpflError that names the first file that cannot be read.
    """
    tried = subprocess.run([sys.executable, "-c", PROBE, *map(str, paths)], capture_output=True, text=True)
    if tried.returncode:
        path = [str(paths[0]), *tried.stdout.splitlines()][-1]
        reason = tried.stderr.splitlines()[-1] if tried.returncode > 0 and tried.stderr else "reading it crashes SciPy"
        raise wrong(path, f"it cannot be read as a .mat file ({reason})")


def _domains(root: Path) -> dict[str, list[Part]]:
    """The training and the test part of each domain."""

    def parts(name: str, *keys: str, paired: Callable[..., Iterable[Part]]) -> list[Part]:
        return _read(root / f"{name}.mat", keys, paired)

    def in_order(train: np.ndarray, test: np.ndarray, *labels: np.ndarray) -> Iterable[Part]:
        return zip((train, test), labels, strict=True)

    def places_last(images: np.ndarray, labels: np.ndarray) -> Iterable[Part]:
        return [(images.transpose(3, 0, 1, 2), labels)]

    def table(cells: np.ndarray) -> Iterable[Part]:
        if cells.shape != (2, 2):
            raise ValueError(f"dataset is {list(cells.shape)}, expected [2, 2]")
        return cells

    return {
        "mnist": parts("mnist_data", "train_32", "test_32", "label_train", "label_test", paired=in_order),
        "mnist_m": parts("mnistm_with_label", "train", "test", "label_train", "label_test", paired=in_order),
        "svhn": [
            *parts("svhn_train_32x32", "X", "y", paired=places_last),
            *parts("svhn_test_32x32", "X", "y", paired=places_last),
        ],
        "syn": parts("syn_number", "train_data", "test_data", "train_label", "test_label", paired=in_order),
        "usps": parts("usps_28x28", "dataset", paired=table),
    }


def _read(path: Path, keys: Sequence[str], paired: Callable[..., Iterable[Part]]) -> list[Part]:
    """Images `[images, 3, side, side]` and labels of the parts that `paired` makes of the arrays `keys` of a file."""
    from scipy.io import loadmat

    with reading(path, wrong):
        found = loadmat(path)
        for key in keys:
            if key not in found:
                names = ", ".join(name for name in found if not name.startswith("__"))
                raise ValueError(f"it has no array {key}, only {names or 'nothing'}")
        return [(_pixels(images), _class(labels)) for images, labels in paired(*(found[key] for key in keys))]


def _pixels(images: np.ndarray) -> np.ndarray:
    """uint8 `[images, 3, side, side]` of arrays without channels, with one or with three, first or last.

    Raises ValueError for other arrays.
    """
    if images.ndim not in (3, 4) or not np.isfinite(images).all():
        raise ValueError(f"images are {list(images.shape)}, or not all finite")
    if images.ndim == 3:
        images = images[:, None]
    elif images.shape[-1] in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    if images.dtype != np.uint8:
        scale = 255 if images.size and images.max() <= 1 else 1
        images = np.clip(np.round(images * scale), 0, 255).astype(np.uint8)
    return np.repeat(images, 3, axis=1) if images.shape[1] == 1 else images


def _class(labels: np.ndarray) -> np.ndarray:
    """Numbers of `[samples, 10]` (one is 1) or `[samples, 1]` labels. Raises ValueError for others."""
    if labels.ndim != 2 or labels.shape[1] not in (1, 10) or not np.isin(labels, range(11)).all():
        raise ValueError(f"labels are {list(labels.shape)}, or not digits")
    return labels.argmax(1) if labels.shape[1] > 1 else labels[:, 0]


def _resized(images: np.ndarray, size: int) -> np.ndarray:
    if images.shape[2:] == (size, size):
        return images
    found = []
    for some in np.array_split(images, max(1, len(images) // 4096)):
        tensor = torch.from_numpy(np.ascontiguousarray(some)).float()
        tensor = torch.nn.functional.interpolate(tensor, size=(size, size), mode="bilinear", antialias=True)
        found.append(tensor.round().clamp(0, 255).to(torch.uint8).numpy())
    return np.concatenate(found)
