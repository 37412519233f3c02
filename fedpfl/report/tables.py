"""The table of what ran, and by which evaluation a run is judged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from fedpfl.ground.errors import FedpflError
from fedpfl.record.columns import METRICS, VALIDATION, names
from fedpfl.report.grouping import Group, by, groups, worlds
from fedpfl.report.load import to_stderr
from fedpfl.report.run import Run
from fedpfl.report.table import Column, Table, mark, summed_up
from fedpfl.report.text import few, span

SELECTIONS = ("last", "best-checkpoint", "validation")
ACCURACIES = ("accuracy", "accuracy_pooled", "accuracy_worst10", "ft_accuracy", "ft_accuracy_pooled")
UNSEEN = ("unseen_accuracy", "unseen_accuracy_worst10", "unseen_ft_accuracy")
TRAFFIC = names("traffic")
CURVES = (*ACCURACIES, "loss", VALIDATION, "unseen_accuracy", "unseen_ft_accuracy")
"""What `compare` may draw over rounds."""

ROW = {"dataset": Column("data set"), "partition": Column("partition"), "method": Column("method")}


def _metric(name: str, group: str = "", spare: int = 0, heading: str = "") -> Column:
    metric = METRICS[name]
    return Column(heading or metric.heading, metric.kind, group, spare)


ACCURACY_COLUMNS = ROW | {
    "accuracy": _metric("accuracy", "before"),
    "accuracy_pooled": _metric("accuracy_pooled", "before", 4),
    "accuracy_worst10": _metric("accuracy_worst10", "before", 3),
    "ft_accuracy": _metric("ft_accuracy", "fine-tuned", 2),
    "ft_accuracy_pooled": _metric("ft_accuracy_pooled", "fine-tuned", 5),
    VALIDATION: _metric(VALIDATION, spare=4, heading="validation"),
    "unseen_accuracy": _metric("unseen_accuracy", "unseen", 2),
    "unseen_accuracy_worst10": _metric("unseen_accuracy_worst10", "unseen", 5),
    "unseen_ft_accuracy": _metric("unseen_ft_accuracy", "unseen", 3, "fine-tuned"),
    "gap": Column("gap", "difference", "unseen", spare=2),
    "published": Column("value", "percent", "published", spare=1),
    "difference": Column("Δ mean", "difference", "published", spare=1),
    "difference_pooled": Column("Δ pooled", "difference", "published", spare=6),
    "values_down": _metric("values_down", "values", 9),
    "values_up": _metric("values_up", "values", 9),
    "bits_down": _metric("bits_down", "bits", 7),
    "bits_up": _metric("bits_up", "bits", 7),
    "seconds": _metric("seconds", spare=8),
    "round": Column("round", "whole"),
    "seeds": Column("seeds", "whole"),
    "status": Column("status"),
}


class Beside(NamedTuple):
    """What stands beside a table's rows: of each a published accuracy and its deviation, in percent, or nan."""

    values: Sequence[tuple[float, float]]
    caption: str
    notes: tuple[str, ...] = ()


def accuracy_table(
    runs: Iterable[Run],
    select: str = "last",
    every: int = 1,
    warn: Callable[[str], None] = to_stderr,
    beside: Callable[[Sequence[Group]], Beside] | None = None,
) -> Table:
    """Make the table with a row per data set, partition and configuration.

    select: `last` judges the last evaluation of a run; `validation` the one of highest accuracy on held-out samples;
    `best-checkpoint` the one of highest accuracy, which looks at test data and exists to match the published rule.
    every: with `best-checkpoint`, look at the evaluations after multiples of this many rounds only (published: 100).
    beside: says what is published. Raises FedpflError for an unknown selection.
    """
    if select not in SELECTIONS:
        raise FedpflError(f"unknown selection {select!r}; choose one of: {', '.join(SELECTIONS)}")
    gathered = groups(runs)
    published = beside(gathered) if beside else Beside([(math.nan, math.nan)] * len(gathered), "")
    records = [_record(group, select, every, *own) for group, own in zip(gathered, published.values, strict=True)]
    for record, group in zip(records, gathered, strict=True):
        if not record["round"]:
            kind = "with held-out samples" if select == "validation" else "of all clients"
            warn(f"{group.title}: no evaluation {kind} to judge")
    notes = (*published.notes, *chosen_on(select), *emptiness(gathered, select, every), *_unmet(gathered))
    notes += (*worlds(gathered), *_codes(gathered))
    absent = {key for key in (VALIDATION, *UNSEEN, "gap") if all(math.isnan(record[key]) for record in records)}
    columns = {key: column for key, column in ACCURACY_COLUMNS.items() if key not in absent}
    for record in records:
        for key in absent:
            del record[key], record[f"{key}_seed_std"]
    caption = _caption(gathered, records, select, every, published.caption)
    table = Table.of(records, columns, caption=caption, notes=notes, by=2)
    for _, places in table.blocks():
        finished = [gathered[place].used[0].status == "finished" for place in places]
        for at, key in enumerate(columns):
            if key in (*ACCURACIES, *UNSEEN):
                mark([table.rows[place][at] for place in places], finished)
    return table


def judged(group: Group, select: str = "last", every: int = 1, by: str = "accuracy") -> dict[Run, pd.Series]:
    """Return the rows of `rounds.csv` that the runs which speak for a group are judged by, of those that have one.

    by: with `best-checkpoint`, what the best row is the best by; a cohort's column is known in every round, others
    where all were evaluated.

    Runs that are not finished are judged as far as all of them came, so that none is averaged with a longer one. With
    `validation` there is no row of any where one has no accuracy on held-out samples.
    """
    known = {run: run.rounds if by.startswith("cohort_") else run.evaluations for run in group.used}
    rows = {run: own for run, own in known.items() if len(own)}
    if rows and group.used[0].status != "finished":
        last = min(own["round"].iloc[-1] for own in rows.values())
        rows = {run: own[own["round"] <= last] for run, own in rows.items()}
    if select == "best-checkpoint":
        rows = {run: own[own["round"] % every == 0] for run, own in rows.items()}
    chosen = {}
    for run, own in rows.items():
        if len(own):
            best = chosen_round(own, {"best-checkpoint": by, "validation": VALIDATION}.get(select, ""))
            if select == "validation" and best.empty:
                return {}
            chosen[run] = own.iloc[-1] if best.empty else best
    return chosen


def chosen_round(rows: pd.DataFrame, by: str = VALIDATION) -> pd.Series:
    """Return the row that is best by a column, of equal ones the first; an empty one where none has a number there."""
    known = by in rows and rows[by].notna().any()
    return rows.loc[rows[by].idxmax()] if known else pd.Series(dtype=float)


def unchosen(group: Group) -> FedpflError:
    """Return the error of what must choose by validation accuracy and cannot."""
    return FedpflError(f"{group.title}: no samples are held out to choose a round by; train with validation=0.1")


def chosen_on(select: str) -> tuple[str, ...]:
    """Say that rounds were chosen by what they are judged by, where they were; a line, or none."""
    if select != "best-checkpoint":
        return ()
    return (
        "Rounds were chosen on test data, as in the published tables, which flatters; --select validation does not.",
    )


def emptiness(gathered: Sequence[Group], select: str, every: int, by: str = "accuracy") -> tuple[str, ...]:
    """Say which judged evaluations hold no accuracy, or that none can be chosen, which leaves cells empty."""
    blind = [
        group.title
        for group in gathered
        if select == "validation" and not judged(group, select) and any(len(run.evaluations) for run in group.used)
    ]
    silent = [
        f"{group.title} (seed {run.seed}, round {int(row['round'])})"
        for group in gathered
        for run, row in judged(group, select, every, by).items()
        if math.isnan(row.get(by, math.nan))
    ]
    return (
        *_note("Empty, as no samples are held out to choose a round by (validation=0.1 does)", blind),
        *_note("Empty, as a model was not finite or no client has test samples", silent),
    )


def _unmet(gathered: Sequence[Group]) -> list[str]:
    """Say which rows' newcomers get no model before they fine-tune."""
    why = "as nothing is sent to clients and a newcomer has the model that all began with"
    unmet = [group.title for group in gathered if any(_silent(run) for run in group.used)]
    return _note(f"Empty under unseen before fine-tuning, {why}", unmet)


def _silent(run: Run) -> bool:
    rows = run.rounds
    return "unseen_accuracy" in rows and rows["unseen_accuracy"].isna().all() and run.per_client("values_down") == 0


def _codes(gathered: Iterable[Group]) -> list[str]:
    """Say which rows' methods were changed while their seeds were run."""
    changed = []
    for group in gathered:
        every = [own for run in group.used if isinstance(own := run.summary.get("code"), list)]
        if len({json.dumps(code, sort_keys=True) for own in every for code in own}) > 1:
            changed.append(group.title)
    return _note("The method's code was changed between or within the runs of", changed)


def _note(text: str, where: Sequence[str]) -> list[str]:
    return [f"{text}: {few(where)}."] if where else []


def over_which(seeds: Mapping[str, Sequence[int]]) -> str:
    """Say over which seeds means are, for each row where they differ. seeds: by row."""
    by_seeds = by(seeds, lambda row: ", ".join(map(str, sorted(seeds[row]))))
    if not by_seeds:
        return "no runs"
    if len(by_seeds) == 1:
        (own,) = by_seeds
        return f"mean(sample standard deviation) over seeds {own}" if "," in own else f"one seed ({own})"
    told = [f"{own} ({few(rows)})" for own, rows in sorted(by_seeds.items(), key=lambda item: -len(item[1]))]
    return f"mean(sample standard deviation) over different seeds: {'; '.join(told)}"


def _record(group: Group, select: str, every: int, published: float, published_std: float) -> dict[str, Any]:
    rows = judged(group, select, every)
    # Seeds without an evaluation yet say nothing, unless there is no other.
    used = list(rows) or list(group.used)
    record = row_of(group)
    for key in (*ACCURACIES, VALIDATION, *UNSEEN):
        record |= summed_up(key, [run.value(key, row) for run, row in rows.items()])
    gaps = [run.value("accuracy", row) - run.value("unseen_accuracy", row) for run, row in rows.items()]
    record |= summed_up("gap", gaps)
    record |= {"published": published, "published_seed_std": published_std}
    record["difference"] = record["accuracy"] - published
    record["difference_pooled"] = record["accuracy_pooled"] - published
    for key in (*TRAFFIC, "seconds"):
        record |= summed_up(key, [run.value(key, {}) for run in used])
    return record | {
        "round": span([int(row["round"]) for row in rows.values()]) or None,
        "seeds": len(used),
        "seed_list": " ".join(str(run.seed) for run in used),
        "status": group.status,
    }


def row_of(group: Group) -> dict[str, Any]:
    """Return the cells of ROW."""
    return {"dataset": group.dataset, "partition": group.partition, "method": group.method}


def _caption(gathered: list[Group], records: list[dict[str, Any]], select: str, every: int, published: str) -> str:
    def shown(key: str) -> bool:
        return not all(math.isnan(record.get(key, math.nan)) for record in records)

    told = [run.get("eval.finetune_epochs") for group in gathered for run in group.used]
    tuning = {epochs for epochs in told if isinstance(epochs, int) and epochs > 0} or {0}
    which = "the last evaluation of each run"
    if select == "best-checkpoint":
        among = "its evaluations" if every == 1 else f"its evaluations after multiples of {every} rounds"
        which = f"the best of {among}"
    elif select == "validation":
        which = "each run's first evaluation of the best validation accuracy"
    alone = len({group.setting for group in gathered}) == 1
    rows = [group.method if alone else group.title for group in gathered]
    seeds = {row: [int(seed) for seed in own["seed_list"].split()] for row, own in zip(rows, records, strict=True)}
    parts = [
        f"Test accuracy in percent over all clients at {which} (column round); {over_which(seeds)}.",
        "Mean: over clients; pooled: over all their test samples; worst 10%: the clients' worst decile.",
        "Before: each client's personal model as it stands"
        + (f"; fine-tuned: after {span(tuning)} local epochs more." if shown("ft_accuracy") else "."),
    ]
    if shown(VALIDATION):
        parts.append("Validation: mean over clients, on training samples that are held out.")
    if any(map(shown, UNSEEN)):
        parts.append(
            "Unseen: clients that never take part, as newcomers, and in no other column; gap: the participation gap, "
            "mean before minus unseen mean, in points."
        )
    parts.append("Values and bits: per client that took part and round; s/round: median over rounds.")
    return " ".join([*parts, published] if shown("published") else parts)
