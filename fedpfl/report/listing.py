"""The list of runs, one line each: `python -m fedpfl.report ls [ROOT ...]`."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import pandas as pd

from fedpfl.ground.errors import FedpflError, pluralize
from fedpfl.ground.tasks import CLASSIFICATION
from fedpfl.report.grouping import groups, shared_settings_note
from fedpfl.report.load import Directory
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
SORTS = ("run", "status", "accuracy", "fine-tuned", "hours", "bits", "age", "seed", "path")
_LARGEST_FIRST = ("accuracy", "fine-tuned", "hours", "bits")


class Entry(NamedTuple):
    """One listed directory.

    Attributes:
        directory: the directory.
        record: its values for CSV and JSON, None where unknown.
        order: its position in tables.
    """

    directory: Directory
    record: dict[str, Any]
    order: int = 0

    def value(self, key: str) -> Any:
        """Return the value it is sorted by, None if unknown."""
        task = self.directory.run.task if self.directory.run else CLASSIFICATION
        keys = {"accuracy": task.score, "fine-tuned": f"ft_{task.score}"}
        value = self.record.get(keys.get(key, key))
        if key in keys and value is not None and not task.is_higher_better:
            value = -value
        values = {
            "run": self.order,
            "age": -self.directory.modified_at,  # the youngest has the least age
            "status": _STATUS_ORDER.index(self.directory.status),
        }
        return values.get(key, value)


def list_entries(directories: Iterable[Directory]) -> list[Entry]:
    """List directories in the order of tables, unreadable ones last."""
    all_directories = list(directories)
    by_run = {directory.run: directory for directory in all_directories if directory.run}
    # Groups put runs in the order of tables; each run leads back to its directory.
    ordered = [(by_run[run], group.method) for group in groups(by_run) for run in group.runs]
    ordered += [(directory, "") for directory in all_directories if not directory.run]
    return [
        Entry(directory, _make_record(directory, label), order)
        for order, (directory, label) in enumerate(ordered)
    ]


def select_statuses(entries: Sequence[Entry], statuses: Sequence[str] = ()) -> list[Entry]:
    """Return the entries of any of the statuses, all where none is named.

    Raises:
        FedpflError: a status does not exist.
    """
    unknown = [status for status in statuses if status not in STATUSES]
    if unknown:
        raise FedpflError(
            f"--status {unknown[0]}: no such status; choose of: {', '.join(STATUSES)}"
        )
    return [entry for entry in entries if not statuses or entry.directory.status in statuses]


def sort_entries(entries: Iterable[Entry], key: str = "run") -> list[Entry]:
    """Sort by one of SORTS; an entry without a value comes last."""
    in_table_order = sorted(entries, key=lambda entry: entry.order)
    with_value = [entry for entry in in_table_order if entry.value(key) is not None]
    with_value.sort(key=lambda entry: entry.value(key), reverse=key in _LARGEST_FIRST)
    return with_value + [entry for entry in in_table_order if entry.value(key) is None]


def entries_table(entries: Sequence[Entry], is_dated: bool = True) -> Table:
    """Make the table of the list.

    The reasons of broken, failed and diverged runs are its first notes.

    Args:
        entries: the directories.
        is_dated: whether to say how old they are.
    """
    # ---- Step 1: a row per entry.
    shown_keys = {key for entry in entries for key in entry.record if entry.record[key] is not None}
    shown_keys |= {"words", "age"} if is_dated else {"words"}
    columns = {key: column for key, column in COLUMNS.items() if key in shown_keys}
    records = []
    for entry in entries:
        directory = entry.directory
        age = time.time() - directory.modified_at
        display_values = {"words": directory.status_text, "age": age}
        records.append(dict.fromkeys(columns) | entry.record | display_values)

    # ---- Step 2: notes.
    reasons = [
        f"{entry.directory.path}: {entry.directory.reason}"
        for entry in entries
        if entry.directory.reason
    ]
    shown_groups = groups([entry.directory.run for entry in entries if entry.directory.run])
    status_counts = Counter(entry.directory.status for entry in entries)
    counts = [
        f"{status_counts[status]} {status}" for status in _STATUS_ORDER if status_counts[status]
    ]
    notes = (
        *reasons,
        *attendance_notes(shown_groups),
        *shared_settings_note(shown_groups),
        f"{pluralize(len(entries), 'run')}: {', '.join(counts)}. Scores: mean over clients at the "
        "last evaluation. Bits: down and up together, per client that took part in the last round. "
        "Age: since a file was last written.",
    )
    frame = pd.DataFrame([entry.record for entry in entries], dtype=object)
    return Table.of(records, columns, frame=frame, notes=notes)


def _make_record(directory: Directory, label: str) -> dict[str, Any]:
    # ---- Step 1: the last round and the last evaluation, empty for a run that cannot be read.
    run = directory.run
    last_round = last_evaluation = pd.Series(dtype=float)
    participants = 0.0
    task = run.task if run else CLASSIFICATION
    if run:
        last_round = run.last_round
        last_evaluation = run.last_evaluation
        if len(last_round):
            participants = float(run.participants.iloc[-1])
    bits = float(last_round.get("bits_down", math.nan)) + float(last_round.get("bits_up", math.nan))

    # ---- Step 2: numbers that may be missing, nan where they are.
    numbers = {
        task.score: float(last_evaluation.get(task.score, math.nan)),
        f"ft_{task.score}": float(last_evaluation.get(f"ft_{task.score}", math.nan)),
        "hours": directory.hours,
        "bits": bits / participants if participants else math.nan,
    }

    # ---- Step 3: the record, which JSON shows too: None for missing values.
    modified = datetime.fromtimestamp(directory.modified_at).astimezone()
    search_fields = {"search": directory.search_name} if directory.search_name else {}
    return {
        "status": directory.status,
        "round": run.rounds_done if run else None,
        "rounds": run.rounds_planned if run else None,
        "experiment": _experiment_name(directory) or None,
        "name": (run.config_value("name") or None) if run else None,
        **search_fields,
        "method": run.method_name if run else None,
        "label": label or None,
        "dataset": run.dataset if run else None,
        "partition": run.partition if run else None,
        "seed": run.seed if run else None,
        "evaluated": int(last_evaluation["round"]) if len(last_evaluation) else None,
        **{key: None if math.isnan(number) else number for key, number in numbers.items()},
        "changed": modified.isoformat(timespec="seconds"),
        "path": str(directory.path),
        "reason": directory.reason or None,
    }


def _experiment_name(directory: Directory) -> str:
    """Return the experiment's name, of a directory where runs put themselves; else nothing."""
    run = directory.run
    if run is None:
        return ""
    # The usual place is <experiment>/<method>/<key>/seed<k>.
    parents = (*directory.path.absolute().parts[:-5:-1], "", "", "", "")
    seed_folder, _, method_folder, experiment = parents[:4]
    is_usual_place = seed_folder == f"seed{run.seed}" and method_folder == run.method_name
    if not is_usual_place or experiment == run.config["dataset"]["name"]:
        return ""
    return experiment
