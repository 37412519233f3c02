"""Set FedOBP's public result files beside own runs, at rounds 100, 200, 300 and 400.

They have the accuracy of all clients, before and after fine-tuning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pandas as pd

from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Record
from fedpfl.papers.published import setup_differences
from fedpfl.report.grouping import Group
from fedpfl.report.names import DATASET_TITLES
from fedpfl.report.run import Run
from fedpfl.report.table import Column, Table
from fedpfl.report.tables import ROW_COLUMNS, row_cells

ROUNDS = (100, 200, 300, 400)
SEED = 42
SETUP: Record = {
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


Log = Record
"""A row of logs.csv: `files` says which files it is of: those of the `tables`, of the `ablation`
(Table V), its variants with a `moving average`, or of SCORE_FILES (Figure 4); `before_100` is the
pooled accuracy in percent at round 100 before fine-tuning, nan where absent."""


@cache
def read_logs() -> pd.DataFrame:
    """Read all public files' numbers, those behind the tables first."""
    return pd.read_csv(Path(__file__).with_name("logs.csv"))


def find_log(run: Run, any_q: bool = False) -> Log | None:
    """Find the file of a run's method, data set, Dirichlet setting and hyperparameters.

    Args:
        run: Any run.
        any_q: Whether FedOBP's q may differ.
    """
    logs = _find_logs_on_data(run)
    logs = logs[logs["method"] == run.method_name]
    # Only FedOBP's files differ by hyperparameters.
    if run.method_name == "fedobp":
        config = FIXED_KEYS | VARIED_KEYS | run.config["method"]  # an older run may lack some
        if any(config[key] != value for key, value in FIXED_KEYS.items()):
            return None
        for key in VARIED_KEYS:
            logs = logs[logs[key] == config[key]]
        if not any_q:
            logs = logs[logs["q"] == run.q]
    return None if logs.empty else dict(logs.iloc[0])


def _find_logs_on_data(run: Run) -> pd.DataFrame:
    """Find the files on a run's data set and Dirichlet setting."""
    logs = read_logs()
    setting = f"Dir({run.config_value('partition.alpha')})"
    title = DATASET_TITLES.get(run.dataset_name, run.dataset_name)
    # Images are scaled as in the files, too: those of two data sets wrongly.
    is_faulty = run.dataset.endswith("as published")
    is_scaled_alike = (run.dataset_name in FAULTY_DATASETS) == is_faulty
    return logs[is_scaled_alike & (logs["dataset"] == title) & (logs["setting"] == setting)]


@cache
def read_best() -> dict[tuple[str, str, str], float]:
    """Return the best accuracies behind the tables, by method, data set and setting."""
    logs = read_logs()
    logs = logs[logs["files"] == "tables"].set_index(["method", "dataset", "setting"])
    return logs[[f"before_{number}" for number in ROUNDS]].max(axis=1).to_dict()


def best_accuracy(method: str, dataset: str, setting: str) -> float:
    """Return the best accuracy of a method's file behind the tables, or nan."""
    return read_best().get((method, DATASET_TITLES.get(dataset, dataset), setting), math.nan)


def past_weight(dataset_name: str) -> float:
    """Return the weight of past scores in a data set's files of Figure 4."""
    return PAST_WEIGHTS.get(dataset_name, 0.0)


def accuracy_by_quantile(run: Run) -> dict[float, float]:
    """Return the files' pooled accuracy by q, of a run's score and data.

    As in Figure 4, it is the better of rounds 100 and 200.
    """
    logs = _find_logs_on_data(run)
    score = run.config_value("method.score")
    logs = logs[logs["files"] == SCORE_FILES.get(score)]
    if score == "obp_as_published":
        logs = logs[logs["ema"] == past_weight(run.dataset_name)]
    return logs.set_index("q")[["before_100", "before_200"]].max(axis=1).to_dict()


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
            for moment, column in ACCURACY_COLUMNS.items():
                own_value = float(row.get(column, math.nan))
                logged_value = log[f"{moment}_{record['round']}"]
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
