"""Result files of other code, PFLlib's .h5 and FL-bench's metrics.csv, as rows of a table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.report.table import Table
from fedpfl.report.tables import COLUMNS, ROW_COLUMNS

FLBENCH_COLUMNS = {"accuracy_test_before": "cohort_before", "accuracy_test_after": "cohort_after"}
"""Accuracies of a round's clients, by FL-bench's names and by ours."""
SCORES = ["accuracy_pooled", *FLBENCH_COLUMNS.values(), "round"]
SHOWN_COLUMNS = ROW_COLUMNS | {key: COLUMNS[key] for key in SCORES}
CAPTION = "Rows of other code: as its files have them."


def other_code_table(files: Iterable[str], select: str = "last") -> Table:
    """Make a table with a row for each file.

    Args:
        files: `DATASET_METHOD_GOAL_RUN.h5` of PFLlib, `METHOD/DATASET/TIME/metrics.csv` of FL-bench.
        select: `best-checkpoint` judges the best evaluation, anything else the last.

    Raises:
        FedpflError: A file has another form, or no evaluation.
    """
    rows = []
    for file in map(Path, files):
        try:
            names, curves = _read_pfllib(file) if file.suffix == ".h5" else _read_flbench(file)
            is_best = select == "best-checkpoint"
            row = curves.loc[curves.iloc[:, -1].idxmax()] if is_best else curves.iloc[-1]
        except Exception as error:  # a user may name any file
            raise FedpflError(f"--beside {file}: {error_text(error, with_class=True)}") from None
        row = pd.Series({**dict(zip(ROW_COLUMNS, names, strict=True)), **row, "round": row.name})
        rows.append(row.reindex(SHOWN_COLUMNS).to_dict())
    return Table.of(rows, SHOWN_COLUMNS, caption=CAPTION, by=2)


def _read_pfllib(file: Path) -> tuple[tuple[str, str, str], pd.DataFrame]:
    """Read the accuracy over all clients' test samples; round 0 is before training."""
    import h5py

    dataset, method, _, run = file.stem.rsplit("_", 3)
    with h5py.File(file) as arrays:
        curves = pd.DataFrame({SCORES[0]: 100 * np.asarray(arrays["rs_test_acc"])})
    return (dataset, "PFLlib, other code", f"{method}, run {run}"), curves


def _read_flbench(file: Path) -> tuple[tuple[str, str, str], pd.DataFrame]:
    """Read the accuracies of each round's clients."""
    method, dataset, time = file.resolve().parts[-4:-1]
    curves = pd.read_csv(file, index_col="epoch").rename(columns=FLBENCH_COLUMNS)
    curves = curves[[*FLBENCH_COLUMNS.values()]].set_axis(curves.index + 1)
    return (dataset, "FL-bench, other code", f"{method}, {time}"), curves
