"""scikit-learn's digits, which need neither files nor a network."""

from __future__ import annotations

import functools
from importlib.metadata import distribution

import numpy as np
import torch

from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import Source


def digits(source: Source) -> Raw:
    """Read 1,797 digits as 28 x 28 uint8 (Alpaydin and Kaynak 1998).

    Their 8 x 8 pixels, values 0 to 16, are enlarged.
    """
    images, labels = _read_digits()
    return Raw(images.copy(), labels.copy())


@functools.cache
def _read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels, read once for all runs of a process."""
    # The file that its load_digits reads; to import scikit-learn would take as long as all else
    # before the first line.
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(str(file), delimiter=",")
    small = torch.from_numpy(rows[:, :-1]).reshape(-1, 1, 8, 8) * (255 / 16)
    large = torch.nn.functional.interpolate(
        small, size=(28, 28), mode="bilinear", align_corners=False
    )
    return large.round().to(torch.uint8).numpy(), rows[:, -1].astype(int)
