"""Digit5: ten digits in five domains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedpfl.data.datasets.shared.images import Side
from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import (
    Source,
    explain_read_errors,
    find_folder,
    not_as_published,
    require_count,
)

PLACE = (
    "Digit-Five/ with mnist_data.mat, mnistm_with_label.mat, svhn_train_32x32.mat, "
    "svhn_test_32x32.mat, "
    "syn_number.mat and usps_28x28.mat (http://ai.bu.edu/M3SDA, Digit-Five)"
)
SIZES = {
    "mnist": (55_000, 10_000),
    "mnist_m": (55_000, 10_000),
    "svhn": (73_257, 26_032),
    "syn": (25_000, 9_000),
    "usps": (7_438, 1_860),
}  # training and test images
PARTS = {  # file, images and labels of the training and the test part
    "mnist": (("mnist_data", "train_32", "label_train"), ("mnist_data", "test_32", "label_test")),
    "mnist_m": (
        ("mnistm_with_label", "train", "label_train"),
        ("mnistm_with_label", "test", "label_test"),
    ),
    "svhn": (("svhn_train_32x32", "X", "y"), ("svhn_test_32x32", "X", "y")),
    "syn": (("syn_number", "train_data", "train_label"), ("syn_number", "test_data", "test_label")),
    "usps": (("usps_28x28", "train", "label_train"), ("usps_28x28", "test", "label_test")),
}
USPS_NAMES = ("train", "label_train", "test", "label_test")


def digit5(source: Source, size: Side = 32) -> Raw:
    """Read the .mat files of Peng et al. 2019: MNIST, MNIST-M, SVHN, synthetic digits, USPS, in
    three channels.

    First the training parts of all domains, then their test parts; groups are the domains.
    """
    root = find_folder(source, PLACE, "Digit-Five", "digit_five", "Digit5")
    paths = {name: root / f"{name}.mat" for parts in PARTS.values() for name, _, _ in parts}
    x, y, groups = [], [], []
    arrays_by_file = {name: _read_arrays(path) for name, path in paths.items()}
    for part in (0, 1):
        for number, (domain, parts) in enumerate(PARTS.items()):
            file, images, labels = parts[part]
            with explain_read_errors(paths[file], not_as_published):
                x.append(_resize_images(_to_pixels(arrays_by_file[file][images]), size))
                y.append(_to_digits(arrays_by_file[file][labels]))
            require_count(root, f"images of {domain}", len(x[-1]), SIZES[domain][part])
            groups.append(np.full(len(x[-1]), number))
    test_from = sum(map(len, y[: len(PARTS)]))
    return Raw(
        np.concatenate(x), np.concatenate(y), np.concatenate(groups), tuple(PARTS), test_from
    )


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a file by name.

    SVHN's sample axis becomes the first one, and USPS's cells become arrays with the usual names.
    """
    from scipy.io import loadmat

    with explain_read_errors(path, not_as_published):
        arrays = loadmat(path)
        if "X" in arrays:
            arrays["X"] = arrays["X"].transpose(3, 0, 1, 2)
        if "dataset" in arrays:
            arrays |= zip(USPS_NAMES, arrays["dataset"].flat, strict=True)
        return arrays


def _to_pixels(images: np.ndarray) -> np.ndarray:
    """Return images as uint8 `[images, 3, side, side]`.

    They may come without channels, or with one or three, first or last.
    """
    if images.ndim == 3:
        images = images[:, None]
    elif images.shape[-1] in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    if images.dtype != np.uint8:
        # Some domains are stored from 0 to 1.
        scale = 255 if images.max() <= 1 else 1
        images = np.clip(np.round(images * scale), 0, 255).astype(np.uint8)
    return np.repeat(images, 3, axis=1) if images.shape[1] == 1 else images


def _to_digits(labels: np.ndarray) -> np.ndarray:
    """Return the digits of labels `[samples, 10]` (one is 1) or `[samples, 1]`."""
    digits = labels.argmax(1) if labels.shape[1] > 1 else labels[:, 0]
    return digits.astype(np.int64) % 10  # SVHN's 0 is stored as 10


def _resize_images(images: np.ndarray, size: int) -> np.ndarray:
    if images.shape[2:] == (size, size):
        return images
    parts = []
    # In parts: as floats all images would take four times their memory.
    for some in np.array_split(images, max(1, len(images) // 4096)):
        tensor = torch.from_numpy(np.ascontiguousarray(some)).float()
        tensor = torch.nn.functional.interpolate(
            tensor, size=(size, size), mode="bilinear", antialias=True
        )
        parts.append(tensor.round().clamp(0, 255).to(torch.uint8).numpy())
    return np.concatenate(parts)
