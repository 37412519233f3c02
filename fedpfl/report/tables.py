"""The table of all runs, and the evaluation that a run is judged by."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import pandas as pd

from fedpfl.ground.dotted import flatten_keys
from fedpfl.ground.errors import FedpflError, choices_text
from fedpfl.ground.records import Record
from fedpfl.ground.tasks import CLASSIFICATION, NEXT_TOKEN, REGRESSION, SURVIVAL, Task
from fedpfl.record.columns import ATTACK_OPTION, METRICS, Metric, column_names, validation_column
from fedpfl.report.grouping import (
    Group,
    common_task,
    group_by,
    groups,
    shared_settings_note,
    task_metric,
)
from fedpfl.report.power import describe_interval, half_width_over_clients
from fedpfl.report.run import GIGABYTES, SIMULATED, SPENDINGS, TERAFLOPS, Run
from fedpfl.report.table import (
    Column,
    Table,
    mark_best,
    mean_and_std,
    seed_statistics,
)
from fedpfl.report.text import format_range, join_few

SELECTIONS = ("last", "best-checkpoint", "validation")
ACCURACIES = (
    *("accuracy", "accuracy_pooled", "accuracy_worst10", "ft_accuracy", "ft_accuracy_pooled"),
    *("balanced", "ft_balanced", "auroc", "ft_auroc"),
)
CURVES = tuple(name for name, metric in METRICS.items() if metric.best)
"""Columns that may be drawn over rounds."""

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
_MEANINGS = {
    "mean": "mean: over clients",
    "pooled": "pooled: over all their test samples",
    "worst 10%": "worst 10%: mean of the clients' worst decile",
    "before": "before: personal models as they stand",
    "fine-tuned": "fine-tuned: after further local epochs",
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
_MOSTLY_ONE_CLASS = 0.75
"""Share of the larger of two classes from which on accuracy says little."""
_TELLING_MEASURES = ("balanced", "auroc", "auprc")
_LARGER_CLASS = (
    "Of two classes a client's larger one is {:.1%} of its samples (mean over clients), an accuracy"
    " that no model is needed for; balanced accuracy, AUROC and AUPRC tell more (metrics=...)"
)
_UPPER_LINE = "An upper line, neither ranked nor marked: it trains on all samples together"
_CHANGED_CODE = "The method's code was changed between or within the runs of"
_NOT_HELD_OUT = "Empty, as no samples are held out to choose a round by (validation=0.1 does)"
_WITHOUT_SCORE = (
    "Empty, as a model was not finite, a client did not answer or none has test samples"
)

JudgedRows = dict[Run, pd.Series]
"""The row of `rounds.csv` that each run is judged by."""


def _make_column(heading: str, kind: str, group: Sequence[str]) -> Column:
    meanings = [_MEANINGS[text] for text in (*group, heading) if text in _MEANINGS]
    return Column(heading, kind, ", ".join(group), meaning="; ".join(meanings))


def _metric_column(metric: Metric) -> Column:
    group = [metric.scope]
    if metric.scope == "traffic":
        group = [metric.phrase.split()[0]]
    elif metric.option == ATTACK_OPTION:
        group = ["attack"]
    elif metric.scope == "time" or (metric.scope == "test" and metric.fine_tuned):
        group = []
    elif metric.scope == "test":
        group = ["before"]
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
    TERAFLOPS: Column("TFLOPs", "number"),
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
    interval: str = "",
) -> Table:
    """Make the table with a row per data set, partition and configuration.

    Args:
        runs: the runs.
        select: `last` judges the last evaluation of a run; `validation` the one of highest
            validation accuracy, or of the best value in a validation column that it names;
            `best-checkpoint` the one of highest accuracy, which looks at test
            data and exists to match the published rule.
        every: with `best-checkpoint`, look at the evaluations after multiples of this many rounds
            only (published: 100).
        beside: returns the published values.
        chosen: of COLUMNS, in this order; by default DEFAULT_COLUMNS, with the task's score in
            place of the accuracy.
        interval: of INTERVAL_TEXTS, for 95 % confidence intervals rather than deviations over
            seeds; `client` and `both` have them where clients.csv tells, at the last evaluation.

    Raises:
        FedpflError: the selection or a column is unknown, or runs are of several tasks.
    """
    # ---- Step 1: a record per configuration.
    if select not in (*SELECTIONS, *column_names("validation")):
        raise FedpflError(f"no such selection: {choices_text(SELECTIONS, select)}")
    shown_groups = groups(runs)
    task = common_task(shown_groups)
    available_columns = _available_columns(chosen, shown_groups)
    spare_by_key = dict.fromkeys(chosen, 0) or _default_columns(task, shown_groups)
    published = PublishedColumn([(math.nan, math.nan)] * len(shown_groups), "")
    if beside:
        published = beside(shown_groups)
    judged = {group: judged_rows(group, select, every) for group in shown_groups}
    records = []
    for group, published_value in zip(shown_groups, published.values, strict=True):
        record = _make_record(group, judged[group], spare_by_key, published_value, interval)
        records.append(record)

    # ---- Step 2: columns, by default without those that these runs do not have.
    columns = dict(ROW_COLUMNS)
    for key, spare in spare_by_key.items():
        is_optional = not chosen and key.startswith(_OPTIONAL)
        if is_optional and pd.isna([record[key] for record in records]).all():
            continue
        columns[key] = replace(available_columns[key], spare=spare)
    if "published" in columns:
        columns["published"] = replace(columns["published"], meaning=published.meaning)
    frame = pd.DataFrame(records)
    names = [name for key in columns for name in (key, f"{key}_seed_std", f"{key}_seed_ci95")]
    frame = frame[[name for name in (*names, "seed_list") if name in frame]]

    # ---- Step 3: the caption, notes, and marks of the best.
    caption = _make_caption(judged, select, every)
    caption = describe_interval(caption, interval)
    notes = (*published.notes, *_accuracy_notes(judged, select, every))
    table = Table.of(records, columns, frame=frame, caption=caption, notes=notes, by=2)
    _mark_best_of_blocks(table, [*columns], shown_groups)
    return table


def _default_columns(task: Task, shown_groups: Sequence[Group]) -> dict[str, int]:
    """Return the columns shown by default, each with its `spare`.

    Where clients are mostly one of two classes, measures that runs asked for come first.
    """
    if task is CLASSIFICATION:
        asked = [
            group.runs[0].config_value("metrics") or ()
            for group in shown_groups
            if group.reported_runs[0].larger_class_share >= _MOSTLY_ONE_CLASS
        ]
        leading = [name for name in _TELLING_MEASURES if any(name in names for names in asked)]
        return dict.fromkeys(leading, 0) | DEFAULT_COLUMNS
    columns = {}
    for key, spare in DEFAULT_COLUMNS.items():
        name = task_metric(key, task)
        # Points are percent, and a regression's error is better if it is less.
        is_of_points = name == "gap" and not task.unit
        if name in COLUMNS and COLUMNS[name].group != "published" and not is_of_points:
            columns[name] = spare
        if key == "accuracy_worst10":
            columns[task.second_score] = 2
    return columns


def _available_columns(chosen: Sequence[str], shown_groups: Sequence[Group]) -> dict[str, Column]:
    """Return COLUMNS with targets and keys of the configuration among the chosen.

    Raises:
        FedpflError: a name is unknown.
    """
    columns = dict(COLUMNS)
    shown_runs = [run for group in shown_groups for run in group.runs]
    configs = [group.runs[0].config for group in shown_groups]
    config_keys = sorted({key for config in configs for key, _ in flatten_keys(config)})
    for key in chosen:
        target = TARGET.fullmatch(key)
        if target:
            quantity = columns.get(target[1], Column("rounds"))
            columns[key] = Column(f"{quantity.heading} to {target[2]} %", "number")
        elif key in config_keys:
            columns.setdefault(key, Column(key))
        elif _is_measure_of_plugin(key, shown_runs):
            columns.setdefault(key, Column(key, "short"))
        if key not in columns:
            raise FedpflError(
                f"no such column: {choices_text(columns, key)}; keys of config.yaml are columns too, "
                "such as local.lr"
            )
    return columns


def _is_measure_of_plugin(key: str, shown_runs: Iterable[Run]) -> bool:
    return any(key in (run.config_value("metrics") or ()) for run in shown_runs)


_TASKS_OF_ERRORS = [(task.name,) for task in (REGRESSION, SURVIVAL, NEXT_TOKEN)]


def _mark_best_of_blocks(table: Table, keys: Sequence[str], shown_groups: Sequence[Group]) -> None:
    """Mark the best accuracies of each data set and partition."""
    is_finished = [group.reported_runs[0].status == "finished" for group in shown_groups]
    for index, key in enumerate(keys):
        metric = METRICS.get(key)
        if metric is None or key == validation_column(shown_groups[0].task):
            continue
        # Errors are scores of a regression and of survival, and losses of other tasks none.
        is_error = metric.is_evaluated and metric.tasks in _TASKS_OF_ERRORS
        if metric.best == "max" or (metric.best == "min" and is_error):
            for _, block_indices in table.blocks():
                row_indices = [row for row in block_indices if not shown_groups[row].is_upper_line]
                mark_best(
                    [table.rows[row][index] for row in row_indices],
                    [is_finished[row] for row in row_indices],
                    metric.kind,
                    is_lowest_best=metric.best == "min",
                )


def judged_rows(
    group: Group, select: str = "last", every: int = 1, by: str = "accuracy"
) -> JudgedRows:
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
    by = task_metric(by, group.task)
    candidates = {}
    for run in group.reported_runs:
        rows = run.rounds if by.startswith("cohort_") else run.evaluations
        if len(rows):
            candidates[run] = rows
    # Scores get better with rounds: unfinished seeds are comparable only up to the shortest.
    last_common_round = min((rows["round"].iloc[-1] for rows in candidates.values()), default=0)
    is_unfinished = group.reported_runs[0].status != "finished"

    # ---- Step 2: the row that the selection chooses.
    judged = {}
    for run, rows in candidates.items():
        if is_unfinished:
            rows = rows[rows["round"] <= last_common_round]
        if select == "best-checkpoint":
            rows = rows[rows["round"] % every == 0]
            best_row = best_round(rows, by)
        elif validation := _selecting_column(select, group.task):
            best_row = best_round(rows, validation)
            # A mean over some seeds alone would not be the configuration's.
            if best_row.empty:
                return {}
        else:
            best_row = pd.Series(dtype=float)
        if len(rows):
            judged[run] = rows.iloc[-1] if best_row.empty else best_row
    return judged


def _selecting_column(select: str, task: Task) -> str:
    """Return the validation column that chooses rounds, "" where another rule does."""
    if select == "validation":
        return validation_column(task)
    return select if select in column_names("validation") else ""


def describe_validation(select: str, task: Task) -> str:
    """Name the validation score that chooses rounds, in a sentence."""
    if select == "validation":
        return f"validation {task.score_word}"
    return f"{select} ({METRICS[select].label.removesuffix(' (%)')})"


def best_round(rows: pd.DataFrame, by: str) -> pd.Series:
    """Return the first row with the best value of a column.

    It is empty where no row has a number there.
    """
    if by not in rows or rows[by].isna().all():
        return pd.Series(dtype=float)
    is_lowest_best = by in METRICS and METRICS[by].best == "min"
    return rows.loc[rows[by].idxmin() if is_lowest_best else rows[by].idxmax()]


def no_validation_error(group: Group) -> FedpflError:
    """Return the error that no round can be chosen by validation samples."""
    reason = "no samples are held out to choose a round by; train with validation=0.1"
    if any(run.is_untrained for run in group.reported_runs):
        reason = "no client has made a step, so there is no round to choose"
    return FedpflError(f"{group.title}: {reason}")


# ---- notes


def titled_notes(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line per text, with the titles of the rows that it is about.

    Args:
        pairs: texts, each with a title.
    """
    titles: dict[str, list[str]] = defaultdict(list)
    for text, title in pairs:
        titles[text].append(title)
    return [f"{text}: {join_few(members)}." for text, members in titles.items()]


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
) -> list[str]:
    """Say why cells are empty: no accuracy, or no round that can be chosen.

    Arguments are those of `judged_rows`.
    """
    judged = {group: judged_rows(group, select, every, by) for group in shown_groups}
    return _empty_notes(judged, select, by)


def attendance_notes(shown_groups: Iterable[Group]) -> list[str]:
    """Name runs without training clients, or with very few."""
    pairs = []
    for group in shown_groups:
        for run in group.reported_runs:
            if run.is_untrained:
                title = f"{group.title} (seed {run.seed})"
                pairs.append(("No accuracy, as no client has made a step", title))
            elif run.low_attendance_note:
                title = f"{group.title} (seed {run.seed}: {run.low_attendance_note})"
                pairs.append(("Almost nobody trained", title))
    return titled_notes(pairs)


def describe_seeds(seeds: Mapping[str, Sequence[int]]) -> str:
    """Say over which seeds means are, for each row where they differ.

    Args:
        seeds: the seeds of each row.
    """
    rows_by_seeds = group_by(seeds, lambda row: ", ".join(map(str, sorted(seeds[row]))))
    most_rows_first = sorted(rows_by_seeds.items(), key=lambda item: -len(item[1]))
    if not most_rows_first:
        return "no runs"
    seed_list, _ = most_rows_first[0]
    if len(most_rows_first) > 1:
        parts = [f"{seed_list} ({join_few(rows)})" for seed_list, rows in most_rows_first]
        return f"mean and sample standard deviation over different seeds: {'; '.join(parts)}"
    if "," in seed_list:
        return f"mean and sample standard deviation over seeds {seed_list}"
    return f"one seed ({seed_list})"


def row_cells(group: Group) -> Record:
    """Return the values of ROW_COLUMNS."""
    return {"dataset": group.dataset, "partition": group.partition, "method": group.method}


def _empty_notes(judged: Mapping[Group, JudgedRows], select: str, by: str) -> list[str]:
    """Say why cells of judged configurations are empty."""
    pairs = []
    for group, rows in judged.items():
        if _lacks_validation(group, rows, select):
            pairs.append((_NOT_HELD_OUT, group.title))
    for group, rows in judged.items():
        for run, row in rows.items():
            if math.isnan(row.get(task_metric(by, group.task), math.nan)):
                title = f"{group.title} (seed {run.seed}, round {int(row['round'])})"
                pairs.append((_WITHOUT_SCORE, title))
    return [*attendance_notes(judged), *titled_notes(pairs)]


def _lacks_validation(group: Group, rows: JudgedRows, select: str) -> bool:
    is_evaluated = any(run.is_evaluated for run in group.reported_runs)
    return bool(_selecting_column(select, group.task)) and is_evaluated and not rows


def _accuracy_notes(judged: Mapping[Group, JudgedRows], select: str, every: int) -> tuple[str, ...]:
    """Return the notes of `accuracy_table`."""
    # ---- Step 1: runs without an evaluation, and with changed code.
    early = []
    told = []
    for group, rows in judged.items():
        reported = group.reported_runs
        is_untrained = all(run.is_untrained for run in reported)
        if not rows and not is_untrained and not _lacks_validation(group, rows, select):
            early.append(("No evaluation to judge yet", group.title))
        codes = itertools.chain(*(run.summary.get("code") or () for run in reported))
        share = reported[0].larger_class_share if group.task is CLASSIFICATION else math.nan
        if share >= _MOSTLY_ONE_CLASS:
            told.append((_LARGER_CLASS.format(share), group.title))
        if group.is_upper_line:
            told.append((_UPPER_LINE, group.title))
        if len({json.dumps(code, sort_keys=True) for code in codes}) > 1:
            told.append((_CHANGED_CODE, group.title))

    # ---- Step 2: privacy, attacks and initial weights, as summaries tell them.
    for key, form in _SUMMARY_NOTES.items():
        for group in judged:
            for text in {str(run.summary.get(key) or "") for run in group.reported_runs} - {""}:
                told.append((form.format(text), group.title))
    return (
        *selection_note(select),
        *_empty_notes(judged, select, "accuracy"),
        *titled_notes(early),
        *shared_settings_note([*judged]),
        *titled_notes(told),
    )


# ---- rows


def _make_record(
    group: Group,
    rows: JudgedRows,
    keys: Iterable[str],
    published_value: tuple[float, float],
    interval: str,
) -> Record:
    """Return a row's values by column."""
    # ---- Step 1: the rounds that judge its seeds, and the configuration.
    round_numbers = [int(row["round"]) for row in rows.values()]
    # Seeds without an evaluation yet say nothing, unless there is no other.
    rows = rows or dict.fromkeys(group.reported_runs, pd.Series(dtype=float))
    published, published_std = published_value
    record = row_cells(group) | {
        "published": published,
        "published_seed_std": published_std,
        "round": format_range(round_numbers) or None,
        "seeds": len(rows),
        "seed_list": " ".join(str(run.seed) for run in rows),
        "status": group.status,
        "difference": math.nan,
        "difference_pooled": math.nan,
    }
    for key in keys:
        is_metric = key in COLUMNS or TARGET.fullmatch(key)
        if not is_metric and not _is_measure_of_plugin(key, group.reported_runs):
            texts = {str(run.config_value(key)) for run in group.reported_runs}
            record[key] = " / ".join(sorted(texts))

    # ---- Step 2: metrics over seeds.
    for key in keys:
        if key not in record:
            values = [run.metric_value(key, row) for run, row in rows.items()]
            record |= seed_statistics(key, values, bool(interval))
            if interval in ("client", "both"):
                record[f"{key}_seed_ci95"] = _client_half_width(rows, key, interval)

    # ---- Step 3: against the published value, which no interval goes with.
    if group.task is CLASSIFICATION:
        for name, key in (("difference", "accuracy"), ("difference_pooled", "accuracy_pooled")):
            values = [run.metric_value(key, row) for run, row in rows.items()]
            record[name] = mean_and_std(values)[0] - published
    return record | ({"published_seed_ci95": math.nan} if interval else {})


def _make_caption(judged: Mapping[Group, JudgedRows], select: str, every: int) -> str:
    task = common_task(judged)
    evaluation = "the last evaluation"
    if select == "best-checkpoint":
        evaluation = "the best evaluation"
        if every > 1:
            evaluation += f" after a multiple of {every} rounds"
    elif select != "last":
        evaluation = f"the first evaluation of the best {describe_validation(select, task)}"
    has_one_setting = len({group.setting for group in judged}) == 1
    seeds = {}
    for group, rows in judged.items():
        title = group.method if has_one_setting else group.title
        seeds[title] = [run.seed for run in rows or group.reported_runs]
    unit = " in percent" if task.unit else ""
    return f"Test {task.score_word}{unit} at {evaluation}; {describe_seeds(seeds)}."


def _client_half_width(rows: JudgedRows, key: str, interval: str) -> float:
    """Return half the interval of a column that covers the choice of clients, or nan."""
    column = key.removesuffix("_worst10")
    metric = METRICS.get(key)
    is_of_clients = metric is not None and metric.scope in ("test", "validation")
    # The worst of errors are the highest.
    if not is_of_clients or (column != key and METRICS[key].best != "max"):
        return math.nan
    values = []
    for run, row in rows.items():
        is_last = not run.last_evaluation.empty and row["round"] == run.last_evaluation["round"]
        if not is_last or column not in run.participating_clients:
            return math.nan
        values.append(run.participating_clients[column].dropna().to_numpy(float))
    return half_width_over_clients(values, column != key, interval)
