"""UCI HAR: six activities of 30 persons, by a phone's accelerometer and gyroscope."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal

import numpy as np

from fedpfl.data.datasets.shared.samples import Raw, number_groups
from fedpfl.data.datasets.shared.source import (
    Source,
    explain_read_errors,
    find_folder,
    not_as_published,
    read_cached,
    require_count,
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
    inputs = [
        root / part / f"{name}_{part}.txt" for part in SIZES for name in (*names, "y", "subject")
    ]
    return read_cached(
        source,
        {"form": form},
        inputs,
        lambda: _read_tables(root, names),
    )


def _read_tables(root: Path, names: list[str]) -> Raw:
    """Tables side by side, one per channel, or the one of features."""
    # ---- Step 1: windows, labels from 1 to 6, and persons of both parts.
    x = []
    y = []
    persons = []
    for part, size in SIZES.items():
        base = root / part
        labels = _read_numbers(base / f"y_{part}.txt", 1)[:, 0]
        require_count(base, "windows", len(labels), size)
        if not np.isin(labels, range(1, 7)).all():
            raise not_as_published(base / f"y_{part}.txt", "labels are not from 1 to 6")
        columns = FEATURES if names == ["X"] else LENGTH
        tables = [
            _read_numbers(base / f"{name}_{part}.txt", columns, len(labels)) for name in names
        ]
        x.append(tables[0] if names == ["X"] else np.stack(tables, axis=1))
        y.append(labels.astype(np.int64) - 1)
        subject = _read_numbers(base / f"subject_{part}.txt", 1, len(labels))[:, 0]
        if (subject % 1 != 0).any():
            raise not_as_published(
                base / f"subject_{part}.txt", "persons are not numbered by whole numbers"
            )
        persons.append(subject.astype(np.int64))

    # ---- Step 2: persons numbered through; the two parts have different persons.
    groups, people = number_groups(np.concatenate(persons))
    return Raw(
        np.concatenate(x),
        np.concatenate(y),
        groups,
        people,
        len(y[0]),
    )


def _read_numbers(path: Path, columns: int, rows: int | None = None) -> np.ndarray:
    """Numbers between spaces, float32 `[rows, columns]`."""
    import pandas

    with explain_read_errors(path, not_as_published), warnings.catch_warnings():
        # pandas only warns where it could not read a number.
        warnings.simplefilter("error")
        table = pandas.read_csv(path, sep=r"\s+", header=None, dtype=np.float32).to_numpy()
    if (
        table.shape != (len(table) if rows is None else rows, columns)
        or not np.isfinite(table).all()
    ):
        raise not_as_published(
            path,
            f"{' x '.join(map(str, table.shape))} numbers, expected {rows or 'some'} x {columns}",
        )
    return table
