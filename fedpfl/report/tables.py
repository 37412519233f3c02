"""The table of all runs, and the evaluation that a run is judged by."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd

from fedpfl.ground.errors import FedpflError, choices_text
from fedpfl.ground.tasks import CLASSIFICATION, REGRESSION, Task
from fedpfl.record.columns import ATTACK_OPTION, METRICS, Metric, validation_column
from fedpfl.report.grouping import (
    Group,
    common_task,
    group_by,
    groups,
    shared_settings_note,
    task_metric,
)
from fedpfl.report.run import GIGABYTES, SIMULATED, SPENDINGS, Run
from fedpfl.report.table import (
    Column,
    Table,
    confidence_half_width,
    mark_best,
    seed_statistics,
)
from fedpfl.report.text import format_range, join_few

SELECTIONS = ("last", "best-checkpoint", "validation")
ACCURACIES = (
    "accuracy",
    "accuracy_pooled",
    "accuracy_worst10",
    "ft_accuracy",
    "ft_accuracy_pooled",
)
CURVES = tuple(name for name, metric in METRICS.items() if metric.best)
"""Columns that may be drawn over rounds."""

INTERVAL_TEXT = "half-width of its 95 % confidence interval (Student's t)"

ROW_COLUMNS = {
    "dataset": Column("data set"),
    "partition": Column("partition"),
    "method": Column("method"),
}
DEFAULT_COLUMNS = {
    "accuracy": 0,
    "accuracy_pooled": 4,
    "accuracy_worst10": 3,
    "ft_accuracy": 2,
    "ft_accuracy_pooled": 5,
    "asr": 2,
    "asr_worst10": 6,
    "ft_asr": 3,
    "val_accuracy": 4,
    "unseen_accuracy": 2,
    "unseen_accuracy_worst10": 5,
    "unseen_ft_accuracy": 3,
    "gap": 2,
    "published": 1,
    "difference": 1,
    "difference_pooled": 6,
    "values_down": 9,
    "values_up": 9,
    "bits_down": 7,
    "bits_up": 7,
    "seconds": 8,
    "round": 0,
    "seeds": 0,
    "status": 0,
}
"""The columns shown by default, each with its `spare`; see `_default_columns`."""
_OPTIONAL = ("asr", "ft_asr", "val_", "unseen_", "gap")
"""Beginnings of default columns that are left out, also of CSV, if no run has them."""
_EPOCHS = "further local epochs"
"""A table of runs has their number instead."""
_MEANINGS = {
    "mean": "mean: over clients",
    "pooled": "pooled: over all their test samples",
    "worst 10%": "worst 10%: mean of the clients' worst decile",
    "before": "before: personal models as they stand",
    "fine-tuned": f"fine-tuned: after {_EPOCHS}",
    "F1": "F1: of the classes that a client has or that are predicted, mean over clients",
    "balanced": "balanced: recall of the classes that a client has, mean over clients",
    "AUROC": "AUROC: of a class against the rest, or of a label, averaged over those that a client "
    "has with and without, then over clients",
    "ECE": "ECE: expected calibration error in 15 bins, mean over clients",
    "attack": "attack: on an attack's samples of honest clients, how many are answered as it wants",
    "common": "common: on everybody's test samples",
    "validation": "validation: on held-out training samples",
    "unseen": "unseen: clients that never take part, and are in no other column",
    "cohort": "cohort: of the round's clients",
    "values": "values and bits: per client and round",
    "bits": "values and bits: per client and round",
    "s/round": "s/round: median",
    "gap": "gap: the participation gap, mean before minus unseen mean, in points",
}
"""Explanations by heading or group."""


_SUMMARY_NOTES = {
    "privacy": "Privacy: {}; so for",
    "attack": "Attack: {}; so for",
    # Weights from elsewhere may have seen test samples.
    "caveat": "Initial weights: {}; so of",
}
"""Notes by the key of summary.json that they are about, in the order of the page."""


def _make_column(heading: str, kind: str, group: Sequence[str]) -> Column:
    meanings = [_MEANINGS[text] for text in (*group, heading) if text in _MEANINGS]
    return Column(
        heading,
        kind,
        ", ".join(group),
        meaning="; ".join(meanings),
    )


def _metric_column(metric: Metric) -> Column:
    if metric.scope == "traffic":
        group = [metric.phrase.split()[0]]
    elif metric.scope == "time":
        group = []
    elif metric.option == ATTACK_OPTION:
        group = ["attack"]
    elif metric.scope == "test":
        group = [] if metric.fine_tuned else ["before"]
    else:
        group = [metric.scope]
    if metric.fine_tuned:
        group.append("fine-tuned")
    return _make_column(metric.heading, metric.kind, group)


COLUMNS = {
    **{name: _metric_column(metric) for name, metric in METRICS.items()},
    "gap": _make_column("gap", "difference", ["unseen"]),
    "published": Column("value", "percent", "published"),
    "difference": Column("Δ mean", "difference", "published"),
    "difference_pooled": Column("Δ pooled", "difference", "published"),
    "hours": Column("hours", "number"),
    SIMULATED: Column("sim hours", "number"),
    GIGABYTES: Column("GB", "number"),
    "round": Column("round", "whole"),
    "seeds": Column("seeds", "whole"),
    "status": Column("status"),
}
"""Columns that a table may show of a configuration."""
TARGET = re.compile(rf"({'|'.join(SPENDINGS)})@(\d+(?:\.\d+)?)")
"""Further columns such as `rounds@80`: until an accuracy of 80 % was first reached."""


class PublishedColumn(NamedTuple):
    """Published accuracies beside the rows of a table.

    Attributes:
        values: of each row the accuracy and its deviation, in percent, or nan.
        meaning: an explanation of the column.
        notes: further lines for the reader.
    """

    values: Sequence[tuple[float, float]]
    meaning: str
    notes: tuple[str, ...] = ()


def accuracy_table(
    runs: Iterable[Run],
    select: str = "last",
    every: int = 1,
    beside: Callable[[Sequence[Group]], PublishedColumn] | None = None,
    chosen: Sequence[str] = (),
    interval: bool = False,
) -> Table:
    """Make the table with a row per data set, partition and configuration.

    Args:
        runs: the runs.
        select: `last` judges the last evaluation of a run; `validation` the one of highest
            validation accuracy; `best-checkpoint` the one of highest accuracy, which looks at test
            data and exists to match the published rule.
        every: with `best-checkpoint`, look at the evaluations after multiples of this many rounds
            only (published: 100).
        beside: returns the published values.
        chosen: of COLUMNS, in this order; by default DEFAULT_COLUMNS, with the task's score in
            place of the accuracy.
        interval: whether cells show 95 % confidence intervals rather than deviations over seeds.

    Raises:
        FedpflError: the selection or a column is unknown, or runs are of several tasks.
    """
    # ---- Step 1: a record per configuration.
    shown_groups = groups(runs)
    available_columns = _available_columns(select, chosen, shown_groups)
    task = common_task(group.runs[0] for group in shown_groups)
    default_columns = _default_columns(task)
    published = PublishedColumn([(math.nan, math.nan)] * len(shown_groups), "")
    if beside:
        published = beside(shown_groups)
    keys = tuple(dict.fromkeys(chosen or default_columns))
    records = [
        _make_record(group, select, every, keys, published_value)
        for group, published_value in zip(shown_groups, published.values, strict=True)
    ]

    # ---- Step 2: columns, by default without those that these runs do not have.
    if not chosen:
        keys = tuple(key for key in keys if not key.startswith(_OPTIONAL) or _has_any(records, key))
    columns = dict(ROW_COLUMNS)
    for key in keys:
        spare = 0 if chosen else default_columns[key]
        column = available_columns[key]
        meaning = column.meaning.replace(_EPOCHS, _describe_epochs(shown_groups))
        columns[key] = replace(column, spare=spare, meaning=meaning)
    if "published" in columns:
        columns["published"] = replace(columns["published"], meaning=published.meaning)
    if interval:
        records = [_add_intervals(record) for record in records]
    frame = _make_frame(records, (*columns, "seed_list"))

    # ---- Step 3: notes, and marks of the best.
    notes = (*published.notes, *_accuracy_notes(shown_groups, select, every))
    caption = _make_caption(shown_groups, select, every)
    if interval:
        # Captions of rows with different seeds name the deviation too.
        caption = caption.replace("sample standard deviation", INTERVAL_TEXT)
    table = Table.of(records, columns, frame=frame, caption=caption, notes=notes, by=2)
    _mark_best_of_blocks(table, [*columns], shown_groups)
    return table


def _default_columns(task: Task) -> dict[str, int]:
    """Return the columns shown by default, each with its `spare`."""
    if task is CLASSIFICATION:
        return DEFAULT_COLUMNS
    columns = {}
    for key, spare in DEFAULT_COLUMNS.items():
        name = task_metric(key, task)
        # Points are percent, and a regression's error is better if it is less.
        is_of_points = name == "gap" and not task.unit
        if name in COLUMNS and COLUMNS[name].group != "published" and not is_of_points:
            columns[name] = spare
        if key == "accuracy_worst10":
            columns["r2" if task is REGRESSION else "f1"] = 2
    return columns


def _available_columns(
    select: str, chosen: Sequence[str], shown_groups: Sequence[Group]
) -> dict[str, Column]:
    """Return COLUMNS with targets and keys of the configuration among the chosen.

    Raises:
        FedpflError: a name is unknown.
    """
    columns = dict(COLUMNS)
    for key in chosen:
        if any(run.config_value(key) is not None for group in shown_groups for run in group.runs):
            columns.setdefault(key, Column(key))
    for target in map(TARGET.fullmatch, chosen):
        if target:
            quantity = columns.get(target[1], Column("rounds"))
            columns[target[0]] = Column(f"{quantity.heading} to {target[2]} %", "number")
    if select not in SELECTIONS:
        raise FedpflError(f"no such selection: {choices_text(SELECTIONS, select)}")
    for name in chosen:
        if name not in columns:
            raise FedpflError(f"no such column: {choices_text(columns, name)}")
    return columns


def _has_any(records: Sequence[Mapping[str, Any]], key: str) -> bool:
    """True if a record has a value that is not nan."""
    # Only nan differs from itself; texts do not.
    return any(record[key] == record[key] for record in records)


def _mark_best_of_blocks(table: Table, keys: Sequence[str], shown_groups: Sequence[Group]) -> None:
    """Mark the best accuracies of each data set and partition."""
    for _, row_indices in table.blocks():
        finished = [
            shown_groups[row_index].reported_runs[0].status == "finished"
            for row_index in row_indices
        ]
        for column_index, key in enumerate(keys):
            if key not in METRICS or key == validation_column(shown_groups[0].task):
                continue
            metric = METRICS[key]
            # Errors are scores of a regression, and losses of other tasks none.
            is_error = metric.best == "min" and metric.tasks == (REGRESSION.name,)
            if metric.best == "max" or (is_error and metric.is_evaluated):
                cells = [table.rows[row_index][column_index] for row_index in row_indices]
                mark_best(cells, finished, metric.kind, is_lowest_best=is_error)


def judged_rows(
    group: Group, select: str = "last", every: int = 1, by: str = "accuracy"
) -> dict[Run, pd.Series]:
    """Return the row of `rounds.csv` that each reported run of a group is judged by.

    Runs that are not finished are judged as far as all of them came, so that none is averaged with
    a longer one.

    Args:
        group: the group.
        select: as in `accuracy_table`.
        every: as in `accuracy_table`.
        by: with `best-checkpoint`, the column that is best in the row; a cohort's column is known
            in every round, any other after evaluations. `accuracy` means the task's score.

    Returns:
        A row of each run that has one. With `validation`, none of any run where one has no
        validation accuracy.
    """
    # ---- Step 1: the rows that a run may be judged by.
    candidates = {}
    by = task_metric(by, group.task)
    for run in group.reported_runs:
        rows = run.rounds if by.startswith("cohort_") else run.evaluations
        if len(rows):
            candidates[run] = rows
    # Scores get better with rounds: unfinished seeds are comparable only up to the shortest.
    if candidates and group.reported_runs[0].status != "finished":
        last_common_round = min(rows["round"].iloc[-1] for rows in candidates.values())
        for run, rows in candidates.items():
            candidates[run] = rows[rows["round"] <= last_common_round]

    # ---- Step 2: the row that the selection chooses.
    validation = validation_column(group.task)
    selection_column = {"best-checkpoint": by, "validation": validation}.get(select, "")
    selected = {}
    for run, rows in candidates.items():
        if select == "best-checkpoint":
            rows = rows[rows["round"] % every == 0]
        if not len(rows):
            continue
        best_row = best_round(rows, selection_column)
        # A mean over some seeds alone would not be the configuration's.
        if select == "validation" and best_row.empty:
            return {}
        selected[run] = rows.iloc[-1] if best_row.empty else best_row
    return selected


def best_round(rows: pd.DataFrame, by: str) -> pd.Series:
    """Return the first row with the best value of a column.

    It is empty where no row has a number there.
    """
    if by in rows and rows[by].notna().any():
        if by in METRICS and METRICS[by].best == "min":
            return rows.loc[rows[by].idxmin()]
        return rows.loc[rows[by].idxmax()]
    return pd.Series(dtype=float)


def no_validation_error(group: Group) -> FedpflError:
    """Return the error that no round can be chosen by validation samples."""
    if any(run.is_untrained for run in group.reported_runs):
        return FedpflError(
            f"{group.title}: no client has made a step, so there is no round to choose"
        )
    return FedpflError(
        f"{group.title}: no samples are held out to choose a round by; train with validation=0.1"
    )


def selection_note(select: str) -> tuple[str, ...]:
    """Say that rounds were chosen on test data, where they were; a line, or none."""
    if select != "best-checkpoint":
        return ()
    return (
        "Rounds were chosen on test data, as in the published tables, which flatters; "
        "--select validation does not.",
    )


def empty_cell_notes(
    shown_groups: Sequence[Group], select: str, every: int, by: str = "accuracy"
) -> tuple[str, ...]:
    """Say why cells are empty: no accuracy, or no round that can be chosen.

    Arguments are those of `judged_rows`.
    """
    without_validation = [group.title for group in shown_groups if _lacks_validation(group, select)]
    without_accuracy = []
    for group in shown_groups:
        for run, row in judged_rows(group, select, every, by).items():
            if math.isnan(row.get(task_metric(by, group.task), math.nan)):
                place = f"seed {run.seed}, round {int(row['round'])}"
                without_accuracy.append(f"{group.title} ({place})")
    return (
        *attendance_notes(shown_groups),
        *title_note(
            "Empty, as no samples are held out to choose a round by (validation=0.1 does)",
            without_validation,
        ),
        *title_note(
            "Empty, as a model was not finite, a client did not answer or none has test samples",
            without_accuracy,
        ),
    )


def attendance_notes(shown_groups: Iterable[Group]) -> list[str]:
    """Name runs without training clients, or with very few."""
    untrained = []
    almost_untrained = []
    for group in shown_groups:
        for run in group.reported_runs:
            if run.is_untrained:
                untrained.append(f"{group.title} (seed {run.seed})")
            elif run.low_attendance_note:
                almost_untrained.append(
                    f"{group.title} (seed {run.seed}: {run.low_attendance_note})"
                )
    return [
        *title_note("No accuracy, as no client has made a step", untrained),
        *title_note("Almost nobody trained", almost_untrained),
    ]


def describe_seeds(seeds: Mapping[str, Sequence[int]]) -> str:
    """Say over which seeds means are, for each row where they differ.

    Args:
        seeds: the seeds of each row.
    """
    rows_by_seeds = group_by(
        seeds,
        lambda row: ", ".join(map(str, sorted(seeds[row]))),
    )
    if not rows_by_seeds:
        return "no runs"
    if len(rows_by_seeds) == 1:
        (seed_list,) = rows_by_seeds
        if "," in seed_list:
            return f"mean and sample standard deviation over seeds {seed_list}"
        return f"one seed ({seed_list})"
    most_rows_first = sorted(
        rows_by_seeds.items(),
        key=lambda item: -len(item[1]),
    )
    parts = [f"{seed_list} ({join_few(rows)})" for seed_list, rows in most_rows_first]
    return f"mean and sample standard deviation over different seeds: {'; '.join(parts)}"


def row_cells(group: Group) -> dict[str, Any]:
    """Return the values of ROW_COLUMNS."""
    return {"dataset": group.dataset, "partition": group.partition, "method": group.method}


def _accuracy_notes(shown_groups: Sequence[Group], select: str, every: int) -> tuple[str, ...]:
    """Return the notes of `accuracy_table`."""
    not_evaluated = [
        group.title
        for group in shown_groups
        if not judged_rows(group, select, every)
        and not _lacks_validation(group, select)
        and not all(run.is_untrained for run in group.reported_runs)
    ]
    return (
        *selection_note(select),
        *empty_cell_notes(shown_groups, select, every),
        *title_note("No evaluation to judge yet", not_evaluated),
        *shared_settings_note(shown_groups),
        *_summary_notes(shown_groups),
    )


def _lacks_validation(group: Group, select: str) -> bool:
    is_evaluated = any(len(run.evaluations) for run in group.reported_runs)
    return select == "validation" and is_evaluated and not judged_rows(group, select)


def _summary_notes(shown_groups: Sequence[Group]) -> list[str]:
    """Give notes of summaries: privacy, attack, initial weights, changed code."""
    notes = []
    titles: dict[tuple[str, str], list[str]] = defaultdict(list)
    changed = []
    for group in shown_groups:
        for key in _SUMMARY_NOTES:
            for text in {str(run.summary.get(key) or "") for run in group.reported_runs} - {""}:
                titles[key, text].append(group.title)
        codes = [run.summary.get("code") for run in group.reported_runs]
        if len({json.dumps(code, sort_keys=True) for run in codes for code in run or ()}) > 1:
            changed.append(group.title)
    notes += title_note("The method's code was changed between or within the runs of", changed)
    for key, form in _SUMMARY_NOTES.items():
        for (of_key, text), members in titles.items():
            if of_key == key:
                notes += title_note(form.format(text), members)
    return notes


def title_note(text: str, titles: Sequence[str]) -> list[str]:
    """Say a text of some rows, nothing of none."""
    return [f"{text}: {join_few(titles)}."] if titles else []


def _make_record(
    group: Group,
    select: str,
    every: int,
    keys: Iterable[str],
    published_value: tuple[float, float],
) -> dict[str, Any]:
    """Return a row's values by column."""
    # ---- Step 1: the rounds that judge its seeds.
    # Seeds without an evaluation yet say nothing, unless there is no other.
    rows = judged_rows(group, select, every)
    if not rows:
        rows = dict.fromkeys(group.reported_runs, pd.Series(dtype=float))
    published, published_std = published_value
    round_numbers = [int(row["round"]) for row in rows.values() if len(row)]
    fields = {
        "published": published,
        "published_seed_std": published_std,
        "round": format_range(round_numbers) or None,
        "seeds": len(rows),
        "seed_list": " ".join(str(run.seed) for run in rows),
        "status": group.status,
    }

    for key in keys:
        if key not in COLUMNS and not TARGET.fullmatch(key):
            texts = {str(run.config_value(key)) for run in group.reported_runs}
            fields[key] = " / ".join(sorted(texts))

    # ---- Step 2: metrics over seeds; the difference needs both accuracies, shown or not.
    record = row_cells(group)
    compared_keys = ("accuracy", "accuracy_pooled") if group.task is CLASSIFICATION else ()
    for key in dict.fromkeys((*keys, *compared_keys)):
        if key not in fields and not key.startswith("difference"):
            values = [run.metric_value(key, row) for run, row in rows.items()]
            record |= seed_statistics(key, values)

    # ---- Step 3: against the published value.
    differences = dict.fromkeys(("difference", "difference_pooled"), math.nan)
    if compared_keys:
        differences = {
            "difference": record["accuracy"] - published,
            "difference_pooled": record["accuracy_pooled"] - published,
        }
    return record | fields | differences


def _make_frame(records: Sequence[dict[str, Any]], keys: Iterable[str]) -> pd.DataFrame:
    """Return the columns of a CSV, each with its spreads over seeds."""
    frame = pd.DataFrame(records)
    names = []
    for key in keys:
        names += [key, f"{key}_seed_std", f"{key}_seed_ci95"]
    return frame[[name for name in names if name in frame]]


def _add_intervals(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with a half-width beside each deviation over its seeds."""
    half_widths = {}
    for key, std in record.items():
        # Papers do not name the seeds of a deviation.
        if key.endswith("_seed_std") and not key.startswith("published"):
            name = key.removesuffix("std") + "ci95"
            half_widths[name] = confidence_half_width(std, record["seeds"])
    return record | half_widths | {"published_seed_ci95": math.nan}


def _describe_epochs(shown_groups: Iterable[Group]) -> str:
    """Describe the length of fine-tuning: `5 local epochs more`."""
    all_runs = [run for group in shown_groups for run in group.reported_runs]
    epochs = {run.config_value("eval.finetune_epochs") or 0 for run in all_runs} - {0}
    return f"{format_range(epochs)} local epoch{'s' if epochs != {1} else ''} more"


def _make_caption(shown_groups: list[Group], select: str, every: int) -> str:
    task = common_task(group.runs[0] for group in shown_groups)
    evaluation = "the last evaluation"
    if select == "best-checkpoint":
        evaluation = "the best evaluation"
        if every > 1:
            evaluation += f" after a multiple of {every} rounds"
    elif select == "validation":
        evaluation = f"the first evaluation of the best validation {task.score_word}"
    has_one_setting = len({group.setting for group in shown_groups}) == 1
    seeds = {}
    for group in shown_groups:
        judged_runs = judged_rows(group, select, every) or group.reported_runs
        title = group.method if has_one_setting else group.title
        seeds[title] = [run.seed for run in judged_runs]
    unit = " in percent" if task.unit else ""
    return f"Test {task.score_word}{unit} at {evaluation}; {describe_seeds(seeds)}."
