"""The columns of rounds.csv: `columns.csv` has a line with the name, words, unit and kind of each.

A line with the scope `splits` is a statistic over clients: a column for each split (SPLITS), before
and after fine-tuning, such as `unseen_ft_accuracy_worst10`.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Collection, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpfl.ground.records import Record
from fedpfl.ground.tasks import CLASSIFICATION, MULTILABEL, TASKS, Task

SPLITS = {"test": "", "validation": "val_", "unseen": "unseen_"}
"""The samples that models are evaluated on, each with the prefix of its columns.

The test and the validation samples of clients that take part, and the test samples of newcomers.
"""
TUNED_PREFIX = "ft_"
"""Stands before the statistic after fine-tuning."""
COMMON_SCOPE = "common"
"""Scope of columns that judge models on the test samples of all clients that take part."""
PRIVACY_SCOPE = "privacy"
"""Scope of columns of private runs."""
CLIENT_PRIVACY = "privacy of clients"
"""Option of a run that clips clients' updates."""
ATTACK_OPTION = "attack"
"""Option of a run with an attack on data: columns of its success, on test samples alone."""
SHIFT_SCOPE = "shift"
"""Scope of columns of runs with samples that shift on the way."""
ALMOST_NOBODY_SHARE = 0.1
"""Share of the clients, or of the planned participations, up to which training hardly happened."""
PERSONAL_PREFIX = "personal/"
"""Stands before a tensor's name where its personalised entries are counted."""


@dataclass(frozen=True)
class Metric:
    """Describe one number of a round.

    Attributes:
        name: its column.
        scope: of SPLITS, COMMON_SCOPE or SHIFT_SCOPE if only evaluations measure it; `cohort`,
            `traffic`, `time`, `system` or `privacy` if every round has it.
        heading: the shortest word, for a table's column.
        phrase: without unit and split, as `mean over clients`.
        label: a full description with the unit, for an axis.
        unit: %, s, bits or nothing.
        kind: how tables write it (`report.table.format_number`).
        best: `max` or `min`, nothing where neither end is better.
        fine_tuned: whether it is measured after fine-tuning.
        option: the measure, `common`, `system`, `privacy`, `attack` or `shift`, that a run must
            ask for to have it.
        tasks: the tasks that have it.
    """

    name: str
    scope: str
    heading: str
    phrase: str
    label: str
    unit: str = ""
    kind: str = "short"
    best: str = ""
    fine_tuned: bool = False
    option: str = ""
    tasks: tuple[str, ...] = tuple(TASKS)

    @property
    def is_evaluated(self) -> bool:
        """Return True if only evaluations of all clients fill it."""
        return self.scope in (*SPLITS, COMMON_SCOPE, SHIFT_SCOPE)


def column_name(statistic: str, split: str = "test", fine_tuned: bool = False) -> str:
    """Return the column of a statistic.

    Args:
        statistic: its name in columns.csv.
        split: of SPLITS.
        fine_tuned: whether after fine-tuning.
    """
    return f"{SPLITS[split]}{TUNED_PREFIX if fine_tuned else ''}{statistic}"


def validation_column(task: Task = CLASSIFICATION) -> str:
    """Return the validation column; it chooses rounds without test data."""
    return column_name(task.score, "validation")


def task_of_columns(columns: Container[str]) -> Task:
    """Return the task of a run with these columns."""
    # Not by the score alone: AUROC may be a further metric of classification.
    tasks = (task for task in TASKS.values() if f"{task.score}_worst10" in columns)
    return next(tasks, CLASSIFICATION)


def _read_metrics() -> dict[str, Metric]:
    """Read columns.csv."""
    metrics = []
    with Path(__file__).with_suffix(".csv").open(newline="", encoding="utf-8") as file:
        for scope, group in itertools.groupby(csv.DictReader(file), lambda row: row["scope"]):
            rows = list(group)
            if scope == "splits":
                for split, fine_tuned in itertools.product(SPLITS, (False, True)):
                    metrics += _split_metrics(rows, split, fine_tuned)
            else:
                metrics += [_make_metric(**row) for row in rows]
    return {metric.name: metric for metric in metrics}


def _split_metrics(rows: list[dict[str, str]], split: str, fine_tuned: bool) -> list[Metric]:
    """Make the statistics of a split, before or after fine-tuning."""
    metrics = []
    for row in rows:
        if split == "validation" and row["option"] == ATTACK_OPTION:
            continue
        label = row["label"].format("validation" if split == "validation" else "test")
        if split == "unseen":
            label = f"unseen clients: {label}"
        if fine_tuned:
            label += " after fine-tuning"
        if row["unit"]:
            label += f" ({row['unit']})"
        name = column_name(row["name"], split, fine_tuned)
        changes: Record = {"name": name, "scope": split, "label": label}
        metrics.append(_make_metric(**{**row, **changes}, fine_tuned=fine_tuned))
    return metrics


def _make_metric(tasks: str, **values: Any) -> Metric:
    return Metric(**values, tasks=tuple(tasks.split()) or tuple(TASKS))


METRICS = _read_metrics()
"""By name, in the order of the file; columns of single methods are not among them."""
KIND_COLUMNS = ("kind", "parameters", "flops", "bits_down", "bits_up")
"""Columns of clients.csv where clients have networks of several kinds."""
CLIENT_COLUMNS = (
    *("round", "client", "name", "unseen", "attacker", "train", "validation", "test"),
    *KIND_COLUMNS,
)
"""Columns of files of a run that are no metrics."""


def list_measure_columns(name: str) -> dict[str, Metric]:
    """Return the columns of a measure that a plugin adds."""
    row = dict.fromkeys(("name", "heading", "phrase", "option"), name)
    row |= {
        "label": f"mean {{}} {name}",
        "unit": "",
        "tasks": f"{CLASSIFICATION.name} {MULTILABEL.name}",
    }
    metrics = []
    for split, fine_tuned in itertools.product(SPLITS, (False, True)):
        metrics += _split_metrics([row], split, fine_tuned)
    return {metric.name: metric for metric in metrics}


def round_columns(
    validation: bool = False,
    unseen: bool = False,
    options: Collection[str] = (),
    task: Task = CLASSIFICATION,
) -> tuple[str, ...]:
    """Return the columns of rounds.csv after `round`; a method's own follow.

    An empty cell means that nothing was measured.

    Args:
        validation: whether there are validation samples.
        unseen: whether there are newcomers.
        options: measures that the run asks for, `common`, `attack` where success is measured,
            `system` in simulated time, `shift` where samples shift on the way.
        task: of the run.
    """
    # Columns without samples would be empty in every row.
    has_samples = {"validation": validation, "unseen": unseen}
    return tuple(
        name
        for name, metric in METRICS.items()
        if has_samples.get(metric.scope, True)
        and metric.option in ("", *options, *task.measures)
        and task.name in metric.tasks
    )


def column_names(scope: str, fine_tuned: bool | None = None) -> tuple[str, ...]:
    """Return the columns of a scope.

    Args:
        scope: the scope.
        fine_tuned: only those after (True) or before (False) fine-tuning.
    """
    return tuple(
        name
        for name, metric in METRICS.items()
        if metric.scope == scope and fine_tuned in (None, metric.fine_tuned)
    )
