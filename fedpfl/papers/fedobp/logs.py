"""FedOBP's public result files beside own runs: all clients at rounds 100 to 400, before and after
fine-tuning.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedpfl.ground.errors import FedpflError
from fedpfl.papers.layout import Selection
from fedpfl.papers.published import setup_differences
from fedpfl.report.figures import by_setting, legible, look, panels
from fedpfl.report.grouping import Group
from fedpfl.report.names import DATASETS
from fedpfl.report.run import Run
from fedpfl.report.table import Column, Table
from fedpfl.report.tables import ROW, row_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROUNDS = (100, 200, 300, 400)
SEED = 42
# What all the files say.
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
FAULTY = ("organamnist", "organcmnist")
"""Data sets that the files have with the faulty normalisation alone."""
_SCORED = {"score": "obp_as_published", "scope": "all", "cold_start": "paper"}
_HYPER = {"ema": 0.0, "norm": "global", "classifier_only": False}


class Log(NamedTuple):
    """One public file: pooled accuracies in percent by round, before and after fine-tuning, nan
    where there is none.

    files: those of the `tables`, of the `ablation` (Table V), its variants with a `moving average`,
    or of `scores` (Figure 4). method, dataset, setting: as ours. q, ema, norm, classifier_only:
    FedOBP's.
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
def logs() -> list[Log]:
    """Return all files' numbers, those behind the tables first."""
    with open(Path(__file__).with_name("logs.csv"), encoding="utf-8", newline="") as file:
        return [
            Log(
                row["files"],
                row["method"],
                row["dataset"],
                row["setting"],
                float(row["q"] or "nan"),
                float(row["ema"] or "nan"),
                row["norm"],
                row["classifier_only"] == "true",
                {
                    at: (float(row[f"before_{at}"] or "nan"), float(row[f"after_{at}"] or "nan"))
                    for at in ROUNDS
                },
            )
            for row in csv.DictReader(file)
        ]


def of_run(run: Run, any_q: bool = False) -> Log | None:
    """Return the file of a run's method, data set, Dirichlet setting and FedOBP's hyperparameters,
    if there is one.
    """
    own = {key: run.config["method"].get(key, usual) for key, usual in (_SCORED | _HYPER).items()}
    if run.method_name == "fedobp" and {**own, **_SCORED} != own:
        return None
    if (run.dataset_name in FAULTY) != run.dataset.endswith("as published"):
        return None
    where = (
        run.method_name,
        DATASETS.get(run.dataset_name, run.dataset_name),
        f"Dir({run.get('partition.alpha')})",
    )
    for log in logs():
        scored = all(getattr(log, key) == own[key] for key in _HYPER) and (any_q or log.q == run.q)
        if (log.method, log.dataset, log.setting) == where and (log.method != "fedobp" or scored):
            return log
    return None


def over_q(run: Run) -> dict[float, float]:
    """Return the better of rounds 100 and 200 by q, as Figure 4 shows it: the earlier score on a
    run's data set.
    """
    name = DATASETS.get(run.dataset_name, run.dataset_name)
    found = (log for log in logs() if (log.files, log.dataset, log.ema) == ("scores", name, 0.5))
    return {log.q: max(log.accuracy[100][0], log.accuracy[200][0]) for log in found}


def logged(gathered: Sequence[Group]) -> list[Group]:
    """Return the groups that a file can be held against: its settings, split and seed."""
    return [group for group in gathered if next(_pairs([group]), None)]


def _pairs(gathered: Sequence[Group]) -> Iterator[tuple[Group, Run, Log]]:
    """Each group's run of the files' seed, with its file."""
    for group in gathered:
        for run in group.used:
            log = (
                of_run(run)
                if run.seed == SEED and run.evaluations["round"].isin(ROUNDS).any()
                else None
            )
            if log and not setup_differences(run, SETUP):
                yield group, run, log


_COLUMNS = ROW | {
    "round": Column("round", "whole"),
    "before": Column("own", "percent", "before"),
    "before_logged": Column("log", "percent", "before"),
    "before_difference": Column("Δ", "difference", "before"),
    "after": Column("own", "percent", "fine-tuned"),
    "after_logged": Column("log", "percent", "fine-tuned"),
    "after_difference": Column("Δ", "difference", "fine-tuned"),
}


def log_table(gathered: Sequence[Group]) -> Table:
    """Tell how far the runs are from the public files, in points, at the rounds that both have."""
    records = []
    for group, run, log in _pairs(gathered):
        rows = run.evaluations.set_index("round")
        for at in ROUNDS:
            if at not in rows.index:
                continue
            record = row_of(group) | {"round": at}
            columns = zip(
                ("before", "after"),
                ("accuracy_pooled", "ft_accuracy_pooled"),
                log.accuracy[at],
                strict=True,
            )
            for when, column, theirs in columns:
                own = float(rows.loc[at].get(column, math.nan))
                record |= {when: own, f"{when}_logged": theirs, f"{when}_difference": own - theirs}
            records.append(record)
    if not records:
        raise FedpflError(
            "no runs for fedobp/public_logs; run `python -m fedpfl.train experiment=fedobp/as_published`"
        )
    caption = (
        "All clients' pooled test accuracy in percent beside the FedOBP authors' public result files (one run, seed "
        f"{SEED}, the same split and cohorts, another minibatch order); Δ: own minus theirs, in points."
    )
    return Table.of(records, _COLUMNS, caption=caption, by=2)


def log_figure(shown: list[Group], path: Path, rule: Selection) -> list[Path]:
    """A panel per data set and partition, before and after fine-tuning: own lines, the files'
    numbers as open marks.
    """
    halves = {"before fine-tuning": "accuracy_pooled", "fine-tuned": "ft_accuracy_pooled"}
    tuned = any("ft_accuracy_pooled" in run.rounds for group in shown for run in group.used)
    used = [half for half in halves if tuned or half.startswith("before")]
    titled = {
        f"{setting}\n{half}": (setting, half) for setting in by_setting(shown) for half in used
    }
    labels = list(dict.fromkeys(group.method for group in shown))

    def draw(ax: Axes, what: tuple[str, str]) -> None:
        setting, half = what
        for group, run, log in _pairs(by_setting(shown)[setting]):
            style = look(labels.index(group.method))
            own = (
                run.evaluations.set_index("round")
                .reindex(columns=[halves[half]])[halves[half]]
                .dropna()
            )
            ax.plot(own.index, own, label=legible(group.method), **style)
            theirs = {at: both[half == "fine-tuned"] for at, both in log.accuracy.items()}
            open_marks: Any = style | {
                "linestyle": "none",
                "markerfacecolor": "white",
                "markersize": 7,
            }
            ax.plot(
                [*theirs], [*theirs.values()], label="authors' public file (open)", **open_marks
            )
        ax.set(xlabel="round", ylabel="pooled accuracy (%)", xlim=(0, None))

    return panels(titled, path, draw)
