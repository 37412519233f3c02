"""Set FedOBP's public result files beside own runs, at rounds 100, 200, 300 and 400.

They have the accuracy of all clients, before and after fine-tuning.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedpfl.ground.errors import FedpflError
from fedpfl.papers.published import setup_differences
from fedpfl.report.grouping import Group
from fedpfl.report.names import DATASET_TITLES
from fedpfl.report.run import Run
from fedpfl.report.table import Column, Table
from fedpfl.report.tables import ROW_COLUMNS, row_cells

ROUNDS = (100, 200, 300, 400)
SEED = 42
SETUP: dict[str, Any] = {
    "clients": 100,
    "participation": 0.1,
    "partition.name": "published",
    "local.epochs": 5,
    "local.batch_size": 32,
    "local.lr": 0.01,
    "local.momentum": 0.7,
    "model.name": "cnn4",
}
"""The set-up that all files state."""
FAULTY_DATASETS = ("organamnist", "organcmnist")
"""Data sets that the files have with the faulty normalisation alone."""
FIXED_KEYS = {"score": "obp_as_published", "scope": "all", "cold_start": "paper"}
"""FedOBP's keys with one value in all files."""
VARIED_KEYS = {"ema": 0.0, "norm": "global", "classifier_only": False}
"""Varied keys of FedOBP, with their values where a run does not have them."""
PAST_WEIGHTS = {"cifar10": 0.5, "cifar100": 0.5}
"""FedOBP's `ema` in the files of Figure 4; the other data sets have no moving average there."""
SCORE_FILES = {
    "obp_as_published": "scores",
    "fisher": "fisher scores",
    "gradient": "gradient scores",
}
"""Which files of Figure 4 have a score."""
LOG_COLUMNS = ROW_COLUMNS | {
    "round": Column("round", "whole"),
    "before": Column("own", "percent", "before"),
    "before_logged": Column("log", "percent", "before"),
    "before_difference": Column("Δ", "difference", "before"),
    "after": Column("own", "percent", "fine-tuned"),
    "after_logged": Column("log", "percent", "fine-tuned"),
    "after_difference": Column("Δ", "difference", "fine-tuned"),
}
LOG_CAPTION = (
    "All clients' pooled test accuracy in percent beside the FedOBP authors' public result files "
    f"(one run, seed {SEED}, the same split and cohorts, another minibatch order); Δ: own minus "
    "theirs, in points."
)
ACCURACY_COLUMNS = {"before": "accuracy_pooled", "after": "ft_accuracy_pooled"}
"""Columns of rounds.csv, before and after fine-tuning."""


class Log(NamedTuple):
    """Hold one public file.

    Attributes:
        files: Which files it is of: those of the `tables`, of the `ablation` (Table V), its
            variants with a `moving average`, or of SCORE_FILES (Figure 4).
        method: As ours.
        dataset: As ours.
        setting: As ours.
        q: FedOBP's, nan for other methods.
        ema: FedOBP's, nan for other methods.
        norm: FedOBP's.
        classifier_only: FedOBP's.
        accuracy: Pooled accuracies in percent by round, before and after fine-tuning, nan where
            absent.
    """

    files: str
    method: str
    dataset: str
    setting: str
    q: float
    ema: float
    norm: str
    classifier_only: bool
    accuracy: dict[int, tuple[float, float]]


@cache
def read_logs() -> list[Log]:
    """Return all public files' numbers, those behind the tables first."""
    with open(Path(__file__).with_name("logs.csv"), encoding="utf-8", newline="") as file:
        return [_read_log(row) for row in csv.DictReader(file)]


def _read_log(row: dict[str, str]) -> Log:
    """Return one row of logs.csv."""
    accuracy = {}
    for round_number in ROUNDS:
        before, after = row.pop(f"before_{round_number}"), row.pop(f"after_{round_number}")
        accuracy[round_number] = (float(before or "nan"), float(after or "nan"))
    numbers = {key: float(row[key] or "nan") for key in ("q", "ema")}
    values: dict[str, Any] = {**row, **numbers, "classifier_only": row["classifier_only"] == "true"}
    return Log(**values, accuracy=accuracy)


def find_log(run: Run, any_q: bool = False) -> Log | None:
    """Return the file of a run's method, data set, Dirichlet setting and hyperparameters.

    Args:
        run: Any run.
        any_q: Whether FedOBP's q may differ.

    Returns:
        None if there is no such file.
    """
    if not _is_scaled_as_files(run):
        return None
    place = (run.method_name, *_file_setting(run))
    candidates = [log for log in read_logs() if (log.method, log.dataset, log.setting) == place]
    # Only FedOBP's files differ by hyperparameters.
    if run.method_name == "fedobp":
        config = FIXED_KEYS | VARIED_KEYS | run.config["method"]  # an older run may lack some
        if any(config[key] != value for key, value in FIXED_KEYS.items()):
            return None
        candidates = [
            log
            for log in candidates
            if all(getattr(log, key) == config[key] for key in VARIED_KEYS)
            and (any_q or log.q == run.q)
        ]
    return candidates[0] if candidates else None


def best_accuracy(method: str, dataset: str, setting: str) -> float:
    """Return the best accuracy of a method's file behind the tables, or nan."""
    place = ("tables", method, DATASET_TITLES.get(dataset, dataset), setting)
    found = [log.accuracy.values() for log in read_logs() if log[:4] == place]
    return max(before for before, _ in found[0]) if found else math.nan


def _is_scaled_as_files(run: Run) -> bool:
    """Return True if a run's images are scaled as in the files: two data sets' wrongly."""
    return (run.dataset_name in FAULTY_DATASETS) == run.dataset.endswith("as published")


def _file_setting(run: Run) -> tuple[str, str]:
    """Return a run's data set and Dirichlet setting by the files' names."""
    dataset_title = DATASET_TITLES.get(run.dataset_name, run.dataset_name)
    return dataset_title, f"Dir({run.config_value('partition.alpha')})"


def past_weight(dataset_name: str) -> float:
    """Return the weight of past scores in a data set's files of Figure 4."""
    return PAST_WEIGHTS.get(dataset_name, 0.0)


def accuracy_by_quantile(run: Run) -> dict[float, float]:
    """Return the files' pooled accuracy by q, of a run's score and data.

    As in Figure 4, it is the better of rounds 100 and 200.
    """
    if not _is_scaled_as_files(run):
        return {}
    score = run.config_value("method.score")
    past = past_weight(run.dataset_name) if score == "obp_as_published" else math.nan
    place = (SCORE_FILES.get(score), *_file_setting(run), str(past))
    return {
        log.q: float(pd.Series([log.accuracy[100][0], log.accuracy[200][0]]).max())
        for log in read_logs()
        if (log.files, log.dataset, log.setting, str(log.ema)) == place
    }


def choose_logged(groups: Sequence[Group]) -> list[Group]:
    """Return the groups that have a run with a file's settings, split and seed."""
    return [group for group in groups if next(_runs_with_logs([group]), None)]


def _runs_with_logs(groups: Sequence[Group]) -> Iterator[tuple[Group, Run, Log]]:
    """Yield each group's run of the files' seed, with its file."""
    for group in groups:
        for run in group.reported_runs:
            # Another seed deals another split, which the files' numbers say nothing of.
            if run.seed != SEED or not run.evaluations["round"].isin(ROUNDS).any():
                continue
            log = find_log(run)
            if log and not setup_differences(run, SETUP):
                yield group, run, log


def log_table(groups: Sequence[Group]) -> Table:
    """Return the runs' distances from the public files, at common rounds."""
    records = []
    for group, run, log in _runs_with_logs(groups):
        for _, row in run.evaluations[run.evaluations["round"].isin(ROUNDS)].iterrows():
            record = row_cells(group) | {"round": int(row["round"])}
            for index, (moment, column) in enumerate(ACCURACY_COLUMNS.items()):
                own_value = float(row.get(column, math.nan))
                logged_value = log.accuracy[record["round"]][index]
                record[moment] = own_value
                record[f"{moment}_logged"] = logged_value
                record[f"{moment}_difference"] = own_value - logged_value
            records.append(record)
    if not records:
        raise FedpflError(
            "no runs for fedobp/public_logs; run `python -m fedpfl.train "
            "experiment=fedobp/as_published`"
        )
    return Table.of(records, LOG_COLUMNS, caption=LOG_CAPTION, by=2)
