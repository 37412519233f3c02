"""UCI HAR: six activities of 30 persons, by a phone's accelerometer and gyroscope."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from fedpfl.data.datasets.shared.samples import Raw, number_groups
from fedpfl.data.datasets.shared.source import (
    Source,
    explain_read_errors,
    find_folder,
    not_as_published,
)

PLACE = "folder 'UCI HAR Dataset' (https://archive.ics.uci.edu/dataset/240, unzipped twice)"
SIGNALS = [f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]
LENGTH = 128
FEATURES = 561
SIZES = {"train": 7_352, "test": 2_947}

Form = Literal["signals", "features"]


def har(source: Source, form: Form = "signals") -> Raw:
    """Read windows of 2.56 s (Anguita et al. 2013), training then test; groups are the persons.

    form: signals, float32 `[9, 128]`: acceleration of the body, angular velocity, total
    acceleration, each x, y, z; or the authors' 561 features.
    """
    root = find_folder(source, PLACE, "UCI HAR Dataset")
    names = ["X"] if form == "features" else [f"Inertial Signals/{name}" for name in SIGNALS]
    columns = FEATURES if form == "features" else LENGTH
    x, y, persons = [], [], []
    for part, windows in SIZES.items():
        read_part = partial(_read_signals, root / part, part)
        tables = [read_part(name, (windows, columns)) for name in names]
        x.append(np.stack(tables, axis=1) if len(tables) > 1 else tables[0])
        y.append(read_part("y", (windows, 1), np.int64)[:, 0] - 1)
        persons.append(read_part("subject", (windows, 1), np.int64)[:, 0])
    # The two parts have different persons.
    groups, people = number_groups(np.concatenate(persons))
    return Raw(np.concatenate(x), np.concatenate(y), groups, people, len(y[0]))


def _read_signals(
    folder: Path, part: str, name: str, shape: tuple[int, int], dtype: type = np.float32
) -> np.ndarray:
    """Read numbers between spaces."""
    import pandas

    path = folder / f"{name}_{part}.txt"
    with explain_read_errors(path, not_as_published), warnings.catch_warnings():
        # pandas only warns where it could not read a number.
        warnings.simplefilter("error")
        table = pandas.read_csv(path, sep=r"\s+", header=None, dtype=dtype).to_numpy()
        if table.shape != shape:
            raise ValueError(f"it has {list(table.shape)} numbers, expected {list(shape)}")
    return table
