"""The list of runs, one line each: `python -m fedpfl.report ls [ROOT ...]`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import pandas as pd

from fedpfl.ground.errors import FedpflError
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
    "age": Column("age", "age", spare=4),
    "hours": Column("hours", "number", spare=5),
    "bits": Column("bits", "short", spare=6),
    "path": Column("path", "long"),
}
_ORDER = (*STATUSES[1:], STATUSES[0])  # what may need somebody first
SORTS = ("run", "status", "accuracy", "fine-tuned", "hours", "bits", "age", "seed", "path")
_LARGEST_FIRST = ("accuracy", "fine-tuned", "hours", "bits")


class Entry(NamedTuple):
    """One listed directory. record: what CSV and JSON hold, None where unknown. order: its place in
    tables.
    """

    state: Directory
    record: dict[str, Any]
    order: int = 0

    def value(self, key: str) -> Any:
        """Return what it is sorted by, None where there is nothing."""
        own = {
            "run": self.order,
            "age": -self.state.modified_at,
            "status": _ORDER.index(self.state.status),
        }
        return (
            own[key] if key in own else self.record["ft_accuracy" if key == "fine-tuned" else key]
        )


def list_entries(states: Iterable[Directory]) -> list[Entry]:
    """Return the directories in the order of tables: data set, partition, method, seed; unreadable
    ones last.
    """
    every = list(states)
    readable = {id(found.run): found for found in every if found.run}
    gathered = groups([found.run for found in every if found.run])
    placed = [(readable[id(run)], group.method) for group in gathered for run in group.runs]
    placed += [(found, "") for found in every if not found.run]
    return [
        Entry(found, _record(found, label), order) for order, (found, label) in enumerate(placed)
    ]


def select_statuses(listed: Sequence[Entry], statuses: Sequence[str] = ()) -> list[Entry]:
    """Return those of any of the statuses, all where none is named. Raises FedpflError for one that
    there is not.
    """
    if unknown := [word for word in statuses if word not in STATUSES]:
        raise FedpflError(
            f"--status {unknown[0]}: no such status; choose of: {', '.join(STATUSES)}"
        )
    return [entry for entry in listed if not statuses or entry.state.status in statuses]


def sort_entries(listed: Iterable[Entry], key: str = "run", reverse: bool = False) -> list[Entry]:
    """Sort by one of SORTS; where it has no value an entry comes last, in whatever direction."""
    every = sorted(listed, key=lambda entry: entry.order)
    known = [entry for entry in every if entry.value(key) is not None]
    known.sort(key=lambda entry: entry.value(key), reverse=(key in _LARGEST_FIRST) != reverse)
    return known + [entry for entry in every if entry.value(key) is None]


def entries_table(listed: Sequence[Entry]) -> Table:
    """Return the list as a table; the reasons of broken, failed and diverged runs are its first
    notes.
    """
    empty = {
        key for key in ("name", "search") if not any(entry.record.get(key) for entry in listed)
    }
    columns = {key: column for key, column in COLUMNS.items() if key not in empty}
    records = [
        entry.record
        | {
            "words": entry.state.status_text,
            "search": entry.state.search_name,
            "age": time.time() - entry.state.modified_at,
        }
        for entry in listed
    ]
    counts = [(status, sum(entry.state.status == status for entry in listed)) for status in _ORDER]
    counted = ", ".join(f"{count} {status}" for status, count in counts if count)
    last = (
        f"{len(listed)} {'run' if len(listed) == 1 else 'runs'}{': ' + counted if counted else ''}. "
        "Accuracy: mean over clients in percent at the last evaluation. Bits: down and up together, per client that "
        "took part in the last round. Age: since a file was last written."
    )
    reasons = [
        f"{entry.state.path}: {entry.state.reason}" for entry in listed if entry.state.reason
    ]
    gathered = groups([entry.state.run for entry in listed if entry.state.run])
    told = (*attendance_notes(gathered), *shared_settings_note(gathered))
    frame = pd.DataFrame([entry.record for entry in listed], dtype=object)
    return Table.of(records, columns, frame=frame, notes=(*reasons, *told, last))


def _record(found: Directory, label: str) -> dict[str, Any]:
    run, empty = found.run, pd.Series(dtype=float)
    last, judged = (run.last_round, run.last_evaluation) if run else (empty, empty)
    both = float(last.get("bits_down", math.nan)) + float(last.get("bits_up", math.nan))
    numbers = {key: float(judged.get(key, math.nan)) for key in ("accuracy", "ft_accuracy")}
    clients = float(run.participants.iloc[-1]) if run and len(last) else 0.0
    numbers |= {"hours": found.hours, "bits": both / clients if clients else math.nan}
    return {
        "status": found.status,
        "round": run.rounds_done if run else None,
        "rounds": run.rounds_planned if run else None,
        "experiment": _experiment(found) or None,
        "name": (run.config_value("name") or None) if run else None,
        **({"search": found.search_name} if found.search_name else {}),
        "method": run.method_name if run else None,
        "label": label or None,
        "dataset": run.dataset if run else None,
        "partition": run.partition if run else None,
        "seed": run.seed if run else None,
        "evaluated": int(judged["round"]) if len(judged) else None,
        **{key: None if math.isnan(value) else value for key, value in numbers.items()},
        "changed": datetime.fromtimestamp(found.modified_at)
        .astimezone()
        .isoformat(timespec="seconds"),
        "path": str(found.path),
        "reason": found.reason or None,
    }


def _experiment(found: Directory) -> str:
    """The experiment's name, of a directory that lies where runs put themselves; else nothing."""
    seed, _, method, place = (*found.path.absolute().parts[:-5:-1], "", "", "", "")[:4]
    run = found.run
    usual = run and seed == f"seed{run.seed}" and method == run.method_name
    return place if usual and run and place != run.config["dataset"]["name"] else ""
