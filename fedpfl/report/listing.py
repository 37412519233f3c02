"""The list of runs, one line each: `python -m fedpfl.report ls [ROOT ...]`."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

import pandas as pd

from fedpfl.ground.errors import FedpflError, choices_text, pluralize
from fedpfl.ground.records import Record
from fedpfl.ground.tasks import CLASSIFICATION
from fedpfl.record.columns import METRICS
from fedpfl.report.grouping import groups, shared_settings_note
from fedpfl.report.load import Directory, experiment_folder
from fedpfl.report.run import STATUSES
from fedpfl.report.table import Column, Table
from fedpfl.report.tables import attendance_notes

COLUMNS = {
    "words": Column("status"),
    "experiment": Column("experiment", spare=1),
    "name": Column("name", spare=2),
    "search": Column("trial of", spare=2),
    "label": Column("method"),
    "dataset": Column("data set"),
    "partition": Column("partition"),
    "seed": Column("seed", "whole"),
    "accuracy": Column("accuracy", "percent"),
    "ft_accuracy": Column("fine-tuned", "percent", spare=3),
    "auroc": Column("AUROC", "percent"),
    "ft_auroc": Column("AUROC, fine-tuned", "percent", spare=3),
    "rmse": Column("RMSE", "score"),
    "ft_rmse": Column("RMSE, fine-tuned", "score", spare=3),
    "age": Column("age", "age", spare=4),
    "hours": Column("hours", "number", spare=5),
    "bits": Column("bits", "short", spare=6),
    "path": Column("path", "long"),
}
_STATUS_ORDER = (*STATUSES[1:], STATUSES[0])  # what may need help first


class Entry(NamedTuple):
    """One listed directory.

    Attributes:
        directory: the directory.
        record: its values for CSV and JSON, None where unknown.
    """

    directory: Directory
    record: Record


def list_entries(directories: Iterable[Directory]) -> list[Entry]:
    """Return an entry per directory, in the order of tables; broken ones last."""
    all_directories = list(directories)
    by_run = {directory.run: directory for directory in all_directories if directory.run}
    # Groups put runs in the order of tables; each run leads back to its directory.
    ordered = [(by_run[run], group.method) for group in groups(by_run) for run in group.runs]
    ordered += [(directory, "") for directory in all_directories if not directory.run]
    return [Entry(directory, _describe_directory(directory, label)) for directory, label in ordered]


def sort_entries(entries: Sequence[Entry], key: str) -> list[Entry]:
    """Sort by a key of the records, the best, largest or latest first.

    An entry without a value comes last.

    Raises:
        FedpflError: there is no such key.
    """
    frame = pd.DataFrame([entry.record for entry in entries])
    if key not in frame and key in COLUMNS and key in METRICS:
        frame[key] = math.nan  # a score of tasks that no run has
    if key not in frame:
        raise FedpflError(f"--sort: {choices_text([*frame], key)}")
    is_best_highest = key in METRICS and METRICS[key].best == "max"
    is_descending = is_best_highest or key in ("hours", "bits", "changed")
    ordered = frame[key].sort_values(ascending=not is_descending, kind="stable")
    return [entries[index] for index in ordered.index]


def entries_table(entries: Sequence[Entry], is_dated: bool = True) -> Table:
    """Make the table of the list.

    The reasons of broken, failed and diverged runs are its first notes.

    Args:
        entries: the directories.
        is_dated: whether to say how old they are.
    """
    # ---- Step 1: a row per entry, and the columns that an entry has.
    records = []
    for entry in entries:
        record = entry.record | {"words": entry.directory.status_text}
        if is_dated:
            record["age"] = time.time() - entry.directory.modified_at
        records.append(dict.fromkeys(COLUMNS) | record)
    columns = {}
    for key, column in COLUMNS.items():
        if any(record[key] is not None for record in records):
            columns[key] = column

    # ---- Step 2: notes.
    reasons = []
    for directory, _ in entries:
        if directory.reason:
            reasons.append(f"{directory.path}: {directory.reason}")
    shown_groups = groups([entry.directory.run for entry in entries if entry.directory.run])
    counts = Counter(entry.directory.status for entry in entries)
    count_texts = [f"{counts[status]} {status}" for status in _STATUS_ORDER if counts[status]]
    notes = (
        *reasons,
        *attendance_notes(shown_groups),
        *shared_settings_note(shown_groups),
        f"{pluralize(len(entries), 'run')}: {', '.join(count_texts)}. Scores: mean over clients at "
        "the last evaluation. Bits: down and up together, per client that took part in the last "
        "round. Age: since a file was last written.",
    )
    frame = pd.DataFrame([entry.record for entry in entries], dtype=object)
    return Table.of(records, columns, frame=frame, notes=notes)


def _describe_directory(directory: Directory, label: str) -> Record:
    """Return the values of a directory, which JSON shows too: None for missing ones."""
    # ---- Step 1: of any directory.
    run = directory.run
    score = (run.task if run else CLASSIFICATION).score
    keys = (
        *("status", "round", "rounds", "experiment", "name", "method", "label", "dataset"),
        *("partition", "seed", "evaluated", score, f"ft_{score}", "hours", "bits"),
        *("changed", "path", "reason"),
    )
    modified = datetime.fromtimestamp(directory.modified_at).astimezone()
    record: Record = dict.fromkeys(keys) | {
        "status": directory.status,
        "experiment": experiment_folder(directory.path).name,
        "label": label or None,
        "changed": modified.isoformat(timespec="seconds"),
        "path": str(directory.path),
        "reason": directory.reason or None,
    }
    if run is None:
        return record

    # ---- Step 2: of a run, with the numbers of its last round and evaluation.
    record |= {
        "round": run.rounds_done,
        "rounds": run.rounds_planned,
        "name": run.config_value("name") or None,
        "method": run.method_name,
        "dataset": run.dataset,
        "partition": run.partition,
        "seed": run.seed,
    }
    if run.search_name:
        record["search"] = run.search_name
    evaluation = run.last_evaluation
    if run.is_evaluated:
        record["evaluated"] = int(evaluation["round"])
    last_round = run.last_round
    bits = last_round.get("bits_down", math.nan) + last_round.get("bits_up", math.nan)
    numbers = {
        score: evaluation.get(score, math.nan),
        f"ft_{score}": evaluation.get(f"ft_{score}", math.nan),
        "hours": run.hours,
        "bits": bits / (run.last_participants or math.nan),
    }
    known_numbers = {key: float(number) for key, number in numbers.items() if number == number}
    return record | known_numbers
