"""The list of runs, one line each: `python -m fedpfl.report ls [ROOT ...]`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pandas as pd

from fedpfl.errors import FedpflError
from fedpfl.report.load import DATASETS, METHODS, groups
from fedpfl.report.published import plain
from fedpfl.report.state import STATUSES, State
from fedpfl.report.table import Cell, Column, Table

COLUMNS = (
    Column("status"),
    Column("experiment", spare=True),
    Column("method"),
    Column("data set"),
    Column("partition"),
    Column("seed", "whole"),
    Column("accuracy", "percent"),
    Column("fine-tuned", "percent", spare=True),
    Column("age", "age", spare=True),
    Column("hours", "number", spare=True),
    Column("bits", "short", spare=True),
    Column("path", "long"),
)


@dataclass(frozen=True, eq=False)
class Entry:
    """One listed directory. label: its method, told apart from all others listed. order: its place in tables."""

    state: State
    label: str = ""
    order: int = 0

    @property
    def experiment(self) -> str:
        """The experiment's name, of a directory that lies where runs put themselves; else nothing."""
        run = self.state.run
        if run is None:
            return ""
        seed, _, method, place = (*self.state.path.absolute().parts[:-5:-1], "", "", "", "")[:4]
        usual = seed == f"seed{run.seed}" and method == run.method_name
        return place if usual and place != run.config["dataset"]["name"] else ""

    @property
    def bits(self) -> float:
        """Bits down and up per client that took part in the last round, nan where not recorded."""
        last, run = self.state.last, self.state.run
        both = float(last.get("bits_down", math.nan)) + float(last.get("bits_up", math.nan))
        return both / run.participants[-1] if run and not math.isnan(both) else math.nan

    def number(self, key: str) -> float | None:
        """Return a number of the entry, None where it has none: a judged accuracy, hours, bits or seed."""
        if key == "seed":
            return self.state.run.seed if self.state.run else None
        own = {"hours": lambda: self.state.hours, "bits": lambda: self.bits}
        value = own[key]() if key in own else float(self.state.judged.get(key, math.nan))
        return None if math.isnan(value) else value

    def record(self) -> dict[str, Any]:
        """Return what stands in CSV and JSON; None where unknown."""
        found, run = self.state, self.state.run
        return {
            "status": found.status,
            "round": run.reached if run else None,
            "rounds": run.planned if run else None,
            "experiment": self.experiment or None,
            "method": run.method_name if run else None,
            "label": self.label or None,
            "dataset": run.dataset if run else None,
            "partition": run.partition if run else None,
            "seed": run.seed if run else None,
            "evaluated": int(found.judged["round"]) if len(found.judged) else None,
            **{key: self.number(key) for key in ("accuracy", "ft_accuracy", "hours", "bits")},
            "changed": datetime.fromtimestamp(found.changed).astimezone().isoformat(timespec="seconds"),
            "path": str(found.path),
            "reason": found.reason or None,
        }


SORTS: dict[str, tuple[Callable[[Entry], Any], bool]] = {
    "run": (lambda entry: entry.order, False),
    "status": (lambda entry: STATUSES.index(entry.state.status), False),
    "accuracy": (lambda entry: entry.number("accuracy"), True),
    "fine-tuned": (lambda entry: entry.number("ft_accuracy"), True),
    "hours": (lambda entry: entry.number("hours"), True),
    "bits": (lambda entry: entry.number("bits"), True),
    "age": (lambda entry: -entry.state.changed, False),
    "seed": (lambda entry: entry.number("seed"), False),
    "path": (lambda entry: str(entry.state.path), False),
}
"""Each key's value, None where there is none, and whether the largest comes first."""


def entries(states: Iterable[State]) -> list[Entry]:
    """Return the directories in the order of tables: data set, partition, method, seed; unreadable ones last."""
    every = list(states)
    readable = {id(found.run): found for found in every if found.run}
    gathered = groups([found.run for found in every if found.run])
    placed = [(readable[id(run)], group.method) for group in gathered for run in group.runs]
    placed += [(found, "") for found in every if not found.run]
    return [Entry(found, label, order) for order, (found, label) in enumerate(placed)]


def select(
    listed: Sequence[Entry], statuses: Sequence[str] = (), methods: Sequence[str] = (), datasets: Sequence[str] = ()
) -> list[Entry]:
    """Return those of any of the statuses, methods and data sets; an empty choice lets all through.

    Methods and data sets: as in the configuration or as tables show them. Raises FedpflError for a name that no
    directory has, and for a status that there is none of.
    """
    if unknown := [word for word in statuses if word not in STATUSES]:
        raise FedpflError(f"--status {unknown[0]}: no such status; choose of: {', '.join(STATUSES)}")
    kept = [entry for entry in listed if not statuses or entry.state.status in statuses]
    for option, words, names in (("--method", methods, _methods), ("--dataset", datasets, _datasets)):
        there = {plain(name) for entry in listed for name in names(entry)}
        for word in words:
            if plain(word) not in there:
                known = ", ".join(sorted({names(entry)[0] for entry in listed if entry.state.run})) or "none at all"
                raise FedpflError(f"{option} {word}: no such run here; there are: {known}")
        wanted = {plain(word) for word in words}
        kept = [entry for entry in kept if not words or not wanted.isdisjoint(map(plain, names(entry)))]
    return kept


def ordered(listed: Iterable[Entry], key: str = "run", reverse: bool = False) -> list[Entry]:
    """Sort by a key of SORTS; where it has no value an entry comes last, in whatever direction."""
    value, largest = SORTS[key]
    every = sorted(listed, key=lambda entry: entry.order)
    known = [entry for entry in every if value(entry) is not None]
    known.sort(key=value, reverse=largest != reverse)
    return known + [entry for entry in every if value(entry) is None]


def table(listed: Sequence[Entry]) -> Table:
    """Return the list as a table; the reasons of broken, failed and diverged runs are its first notes."""
    rows = []
    for entry in listed:
        found, run = entry.state, entry.state.run
        cells: list[Any] = [found.words, entry.experiment, entry.label]
        cells += [run.dataset, run.partition, run.seed] if run else [None, None, None]
        cells += [entry.number("accuracy"), entry.number("ft_accuracy"), time.time() - found.changed]
        cells += [entry.number("hours"), entry.number("bits"), str(found.path)]
        rows.append([Cell(value) for value in cells])
    counts = [(status, sum(entry.state.status == status for entry in listed)) for status in STATUSES]
    told = ", ".join(f"{count} {status}" for status, count in counts if count)
    last = (
        f"{len(listed)} {'run' if len(listed) == 1 else 'runs'}{': ' + told if told else ''}. Accuracy: mean over "
        "clients in percent at the last evaluation. Bits: down and up together, per client that took part in the last "
        "round. Age: since a file was last written."
    )
    reasons = [f"{entry.state.path}: {entry.state.reason}" for entry in listed if entry.state.reason]
    frame = pd.DataFrame([entry.record() for entry in listed], dtype=object)
    return Table("", COLUMNS, rows, frame, notes=(*reasons, last))


def as_json(listed: Sequence[Entry]) -> str:
    """Return the list as JSON."""
    return json.dumps([entry.record() for entry in listed], indent=2) + "\n"


def _methods(entry: Entry) -> list[str]:
    run = entry.state.run
    return [run.method_name, METHODS.get(run.method_name, ""), entry.label] if run else []


def _datasets(entry: Entry) -> list[str]:
    run = entry.state.run
    name = str(run.config["dataset"]["name"]) if run else ""
    return [name, DATASETS.get(name, ""), run.dataset] if run else []
