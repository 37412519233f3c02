"""The table of what ran, and by which evaluation a run is judged."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd

from fedpfl.ground.errors import FedpflError, choices_text
from fedpfl.record.columns import METRICS, VALIDATION_ACCURACY, Metric
from fedpfl.report.grouping import Group, group_by, groups, shared_settings_note
from fedpfl.report.run import SIMULATED, Run
from fedpfl.report.table import Column, Table, mark_best, seed_statistics
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
"""What may be drawn over rounds."""

ROW_COLUMNS = {
    "dataset": Column("data set"),
    "partition": Column("partition"),
    "method": Column("method"),
}
DEFAULT_COLUMNS = {
    **{
        "accuracy": 0,
        "accuracy_pooled": 4,
        "accuracy_worst10": 3,
        "ft_accuracy": 2,
        "ft_accuracy_pooled": 5,
    },
    **{
        VALIDATION_ACCURACY: 4,
        "unseen_accuracy": 2,
        "unseen_accuracy_worst10": 5,
        "unseen_ft_accuracy": 3,
        "gap": 2,
    },
    **{"published": 1, "difference": 1, "difference_pooled": 6},
    **{"values_down": 9, "values_up": 9, "bits_down": 7, "bits_up": 7, "seconds": 8},
    **{"round": 0, "seeds": 0, "status": 0},
}
"""What the table shows where no columns are chosen: each one's `spare`."""
_ABSENT = (
    VALIDATION_ACCURACY,
    "unseen_accuracy",
    "unseen_accuracy_worst10",
    "unseen_ft_accuracy",
    "gap",
)
"""What of it only some runs have: not even CSV has an empty column for the others."""

_EPOCHS = "further local epochs"
"""What a table of runs has the number of."""
_MEANINGS = {
    "mean": "mean: over clients",
    "pooled": "pooled: over all their test samples",
    "worst 10%": "worst 10%: mean of the clients' worst decile",
    "before": "before: personal models as they stand",
    "fine-tuned": f"fine-tuned: after {_EPOCHS}",
    "F1": "F1: of the classes that a client has or that are predicted, mean over clients",
    "balanced": "balanced: recall of the classes that a client has, mean over clients",
    "AUROC": "AUROC: of these classes one against the rest, mean over the clients with two or more",
    "ECE": "ECE: expected calibration error in 15 bins, mean over clients",
    "common": "common: on everybody's test samples",
    "validation": "validation: on held-out training samples",
    "unseen": "unseen: clients that never take part, and are in no other column",
    "cohort": "cohort: of the round's clients",
    "values": "values and bits: per client and round",
    "bits": "values and bits: per client and round",
    "s/round": "s/round: median",
    "gap": "gap: the participation gap, mean before minus unseen mean, in points",
}
"""By heading or group."""


def _column(heading: str, kind: str, *group: str) -> Column:
    meaning = "; ".join(_MEANINGS[word] for word in (*group, heading) if word in _MEANINGS)
    return Column(heading, kind, ", ".join(group), meaning=meaning)


def _metric(metric: Metric) -> Column:
    groups = {
        "traffic": (metric.words.split()[0],),
        "time": (),
        "test": () if metric.tuned else ("before",),
    }
    tuned = ("fine-tuned",) if metric.tuned else ()
    return _column(metric.heading, metric.kind, *groups.get(metric.about, (metric.about,)), *tuned)


COLUMNS = {
    **{name: _metric(metric) for name, metric in METRICS.items()},
    "gap": _column("gap", "difference", "unseen"),
    "published": Column("value", "percent", "published"),
    "difference": Column("Δ mean", "difference", "published"),
    "difference_pooled": Column("Δ pooled", "difference", "published"),
    "hours": Column("hours", "number"),
    SIMULATED: Column("sim hours", "number"),
    "round": Column("round", "whole"),
    "seeds": Column("seeds", "whole"),
    "status": Column("status"),
}
"""What a table may show of a configuration."""
TARGET = re.compile(rf"{SIMULATED}@(\d+(?:\.\d+)?)")
"""Further `sim_hours@80`: until an accuracy of 80 % was first reached."""


class PublishedColumn(NamedTuple):
    """What stands beside a table's rows: of each a published accuracy and its deviation, in
    percent, or nan.
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
) -> Table:
    """Make the table with a row per data set, partition and configuration.

    select: `last` judges the last evaluation of a run; `validation` the one of highest accuracy on
    held-out samples; `best-checkpoint` the one of highest accuracy, which looks at test data and
    exists to match the published rule.
    every: with `best-checkpoint`, look at the evaluations after multiples of this many rounds only
    (published: 100).
    beside: says what is published. chosen: of COLUMNS, in this order; by default SHOWN. Raises
    FedpflError for an unknown selection or column.
    """
    targets = {
        own[0]: Column(f"sim hours to {own[1]} %", "number")
        for own in map(TARGET.fullmatch, chosen)
        if own
    }
    there = COLUMNS | targets
    for known, word in ((SELECTIONS, select), *((there, name) for name in chosen)):
        if word not in known:
            raise FedpflError(
                f"no such {'selection' if known is SELECTIONS else 'column'}: {choices_text(known, word)}"
            )
    gathered = groups(runs)
    published = (
        beside(gathered) if beside else PublishedColumn([(math.nan, math.nan)] * len(gathered), "")
    )
    keys = tuple(dict.fromkeys(chosen or DEFAULT_COLUMNS))
    records = [
        _record(group, select, every, keys, *own)
        for group, own in zip(gathered, published.values, strict=True)
    ]
    if not chosen:
        keys = tuple(
            key
            for key in keys
            if key not in _ABSENT or any(one[key] == one[key] for one in records)
        )
    tuned = f"{_tuning(gathered)} more"
    meanings = {key: there[key].meaning.replace(_EPOCHS, tuned) for key in keys} | {
        "published": published.meaning
    }
    columns = ROW_COLUMNS | {
        key: replace(there[key], spare=0 if chosen else DEFAULT_COLUMNS[key], meaning=meanings[key])
        for key in keys
    }
    frame = pd.DataFrame(records)
    frame = frame[
        [
            name
            for key in (*columns, "seed_list")
            for name in (key, f"{key}_seed_std")
            if name in frame
        ]
    ]
    notes = (
        *published.notes,
        *test_data_note(select),
        *empty_cell_notes(gathered, select, every),
        *_unmet(gathered),
    )
    unjudged = [
        one for one in gathered if not judged_rows(one, select, every) and not _blind(one, select)
    ]
    unjudged_titles = [
        one.title for one in unjudged if not all(run.is_untrained for run in one.reported_runs)
    ]
    notes += (
        *_note("No evaluation to judge yet", unjudged_titles),
        *shared_settings_note(gathered),
        *_codes(gathered),
    )
    notes += (*_guarantees(gathered), *_caveats(gathered))
    caption = _caption(gathered, select, every)
    table = Table.of(records, columns, frame=frame, caption=caption, notes=notes, by=2)
    for _, places in table.blocks():
        finished = [gathered[place].reported_runs[0].status == "finished" for place in places]
        for at, key in enumerate(columns):
            if key in METRICS and METRICS[key].best == "max" and key != VALIDATION_ACCURACY:
                mark_best([table.rows[place][at] for place in places], finished)
    return table


def judged_rows(
    group: Group, select: str = "last", every: int = 1, by: str = "accuracy"
) -> dict[Run, pd.Series]:
    """Return the rows of `rounds.csv` that the runs which speak for a group are judged by, of those
    that have one.

    by: with `best-checkpoint`, what the best row is the best by; a cohort's column is known in
    every round, others where all were evaluated.

    Runs that are not finished are judged as far as all of them came, so that none is averaged with
    a longer one. With `validation` there is no row of any where one has no accuracy on held-out
    samples.
    """
    known = {
        run: run.rounds if by.startswith("cohort_") else run.evaluations
        for run in group.reported_runs
    }
    rows = {run: own for run, own in known.items() if len(own)}
    if rows and group.reported_runs[0].status != "finished":
        last = min(own["round"].iloc[-1] for own in rows.values())
        rows = {run: own[own["round"] <= last] for run, own in rows.items()}
    if select == "best-checkpoint":
        rows = {run: own[own["round"] % every == 0] for run, own in rows.items()}
    chosen = {}
    for run, own in rows.items():
        if len(own):
            best = best_round(
                own, {"best-checkpoint": by, "validation": VALIDATION_ACCURACY}.get(select, "")
            )
            if select == "validation" and best.empty:
                return {}
            chosen[run] = own.iloc[-1] if best.empty else best
    return chosen


def best_round(rows: pd.DataFrame, by: str = VALIDATION_ACCURACY) -> pd.Series:
    """Return the row that is best by a column, of equal ones the first; an empty one where none has
    a number there.
    """
    known = by in rows and rows[by].notna().any()
    return rows.loc[rows[by].idxmax()] if known else pd.Series(dtype=float)


def no_validation_error(group: Group) -> FedpflError:
    """Return the error of what must choose by validation accuracy and cannot."""
    if any(run.is_untrained for run in group.reported_runs):
        return FedpflError(
            f"{group.title}: no client has made a step, so there is no round to choose"
        )
    return FedpflError(
        f"{group.title}: no samples are held out to choose a round by; train with validation=0.1"
    )


def test_data_note(select: str) -> tuple[str, ...]:
    """Say that rounds were chosen by what they are judged by, where they were; a line, or none."""
    if select != "best-checkpoint":
        return ()
    return (
        "Rounds were chosen on test data, as in the published tables, which flatters; --select validation does not.",
    )


def empty_cell_notes(
    gathered: Sequence[Group], select: str, every: int, by: str = "accuracy"
) -> tuple[str, ...]:
    """Say which judged evaluations hold no accuracy, or that none can be chosen, which leaves cells
    empty.
    """
    blind = [group.title for group in gathered if _blind(group, select)]
    silent = [
        f"{group.title} (seed {run.seed}, round {int(row['round'])})"
        for group in gathered
        for run, row in judged_rows(group, select, every, by).items()
        if math.isnan(row.get(by, math.nan))
    ]
    return (
        *attendance_notes(gathered),
        *_note(
            "Empty, as no samples are held out to choose a round by (validation=0.1 does)", blind
        ),
        *_note("Empty, as a model was not finite or no client has test samples", silent),
    )


def attendance_notes(gathered: Iterable[Group]) -> list[str]:
    """Say in which runs nobody or almost nobody trained."""
    untrained, few = list[str](), list[str]()
    for group in gathered:
        for run in group.reported_runs:
            if run.is_untrained:
                untrained.append(f"{group.title} (seed {run.seed})")
            elif run.low_attendance_note:
                few.append(f"{group.title} (seed {run.seed}: {run.low_attendance_note})")
    return [
        *_note("No accuracy, as no client has made a step", untrained),
        *_note("Almost nobody trained", few),
    ]


def _blind(group: Group, select: str) -> bool:
    evaluated = any(len(run.evaluations) for run in group.reported_runs)
    return select == "validation" and evaluated and not judged_rows(group, select)


def _unmet(gathered: Sequence[Group]) -> list[str]:
    """Say which rows' newcomers get no model before they fine-tune."""
    why = "as nothing is sent to clients and a newcomer has the model that all began with"
    unmet = [group.title for group in gathered if any(_silent(run) for run in group.reported_runs)]
    return _note(f"Empty under unseen before fine-tuning, {why}", unmet)


def _silent(run: Run) -> bool:
    rows = run.rounds
    return (
        "unseen_accuracy" in rows
        and rows["unseen_accuracy"].isna().all()
        and run.per_client("values_down") == 0
    )


def _codes(gathered: Iterable[Group]) -> list[str]:
    """Say which rows' methods were changed while their seeds were run."""
    changed = []
    for group in gathered:
        every = [
            own for run in group.reported_runs if isinstance(own := run.summary.get("code"), list)
        ]
        if len({json.dumps(code, sort_keys=True) for own in every for code in own}) > 1:
            changed.append(group.title)
    return _note("The method's code was changed between or within the runs of", changed)


def _guarantees(gathered: Iterable[Group]) -> list[str]:
    """Say what private runs protect."""
    told: dict[str, list[str]] = {}
    for group in gathered:
        for said in {
            str(run.summary["privacy"]) for run in group.reported_runs if run.summary.get("privacy")
        }:
            told.setdefault(said, []).append(group.title)
    return [
        note for said, titles in told.items() for note in _note(f"Privacy: {said}; so for", titles)
    ]


def _caveats(gathered: Iterable[Group]) -> list[str]:
    """Say which rows' networks began with weights that may have seen what they are tested on."""
    told: dict[str, list[str]] = {}
    for group in gathered:
        for caveat in {
            str(run.summary["caveat"]) for run in group.reported_runs if run.summary.get("caveat")
        }:
            told.setdefault(caveat, []).append(group.title)
    return [
        note
        for caveat, titles in told.items()
        for note in _note(f"Initial weights: {caveat}; so of", titles)
    ]


def _note(text: str, where: Sequence[str]) -> list[str]:
    return [f"{text}: {join_few(where)}."] if where else []


def describe_seeds(seeds: Mapping[str, Sequence[int]]) -> str:
    """Say over which seeds means are, for each row where they differ. seeds: by row."""
    by_seeds = group_by(seeds, lambda row: ", ".join(map(str, sorted(seeds[row]))))
    if not by_seeds:
        return "no runs"
    if len(by_seeds) == 1:
        (own,) = by_seeds
        return (
            f"mean and sample standard deviation over seeds {own}"
            if "," in own
            else f"one seed ({own})"
        )
    told = [
        f"{own} ({join_few(rows)})"
        for own, rows in sorted(by_seeds.items(), key=lambda item: -len(item[1]))
    ]
    return f"mean and sample standard deviation over different seeds: {'; '.join(told)}"


def _record(
    group: Group,
    select: str,
    every: int,
    keys: Iterable[str],
    published: float,
    published_std: float,
) -> dict[str, Any]:
    # Seeds without an evaluation yet say nothing, unless there is no other.
    rows = judged_rows(group, select, every) or dict.fromkeys(
        group.reported_runs, pd.Series(dtype=float)
    )
    told = {
        "published": published,
        "published_seed_std": published_std,
        "round": format_range([int(row["round"]) for row in rows.values() if len(row)]) or None,
        "seeds": len(rows),
        "seed_list": " ".join(str(run.seed) for run in rows),
        "status": group.status,
    }
    record = row_cells(group)
    for key in dict.fromkeys((*keys, "accuracy", "accuracy_pooled")):
        if key not in told and not key.startswith("difference"):
            record |= seed_statistics(
                key, [run.metric_value(key, row) for run, row in rows.items()]
            )
    return record | {
        **told,
        "difference": record["accuracy"] - published,
        "difference_pooled": record["accuracy_pooled"] - published,
    }


def row_cells(group: Group) -> dict[str, Any]:
    """Return the cells of ROW."""
    return {"dataset": group.dataset, "partition": group.partition, "method": group.method}


def _tuning(gathered: Iterable[Group]) -> str:
    """How long models were fine-tuned: `5 local epochs`."""
    told = {
        run.config_value("eval.finetune_epochs")
        for group in gathered
        for run in group.reported_runs
    }
    epochs = {count for count in told if isinstance(count, int) and count > 0}
    return f"{format_range(epochs)} local epoch{'s' if epochs != {1} else ''}"


def _caption(gathered: list[Group], select: str, every: int) -> str:
    which = "the last evaluation"
    if select == "best-checkpoint":
        which = "the best evaluation" + (
            f" after a multiple of {every} rounds" if every > 1 else ""
        )
    elif select == "validation":
        which = "the first evaluation of the best validation accuracy"
    alone = len({group.setting for group in gathered}) == 1
    seeds = {
        group.method if alone else group.title: [
            run.seed for run in judged_rows(group, select, every) or group.reported_runs
        ]
        for group in gathered
    }
    return f"Test accuracy in percent at {which}; {describe_seeds(seeds)}."
