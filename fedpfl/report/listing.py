"""Lists runs, one line each: `python -m fedpfl.report ls [ROOT ...]`; see `--help`."""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fedpfl.errors import FedpflError
from fedpfl.report import layout, state
from fedpfl.report.layout import Field
from fedpfl.report.load import DATASETS, METHODS, directories, groups
from fedpfl.report.state import STATUSES, State
from fedpfl.report.text import csv_cell

FORMATS = ("terminal", "csv", "json")

COLUMNS = (
    Field("status"),
    Field("experiment"),
    Field("method"),
    Field("data set"),
    Field("partition"),
    Field("seed", True),
    Field("accuracy", True),
    Field("fine-tuned", True),
    Field("hours", True),
    Field("bits", True),
    Field("age", True),
    Field("path"),
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
    def bits(self) -> float | None:
        """Bits down and up per client of the cohort in the last round, None where not recorded."""
        last, run = self.state.last, self.state.run
        if run is None or not {"bits_down", "bits_up"} <= {*last.dropna().index}:
            return None
        return float(last["bits_down"] + last["bits_up"]) / float(run.participants[-1])

    def record(self) -> dict[str, Any]:
        """What stands in CSV and JSON; None where unknown."""
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
            "accuracy": _known(found.judged.get("accuracy")),
            "ft_accuracy": _known(found.judged.get("ft_accuracy")),
            "hours": _known(found.hours),
            "bits": self.bits,
            "changed": datetime.fromtimestamp(found.changed).astimezone().isoformat(timespec="seconds"),
            "path": str(found.path),
            "reason": found.reason or None,
        }

    def cells(self) -> list[str]:
        """What stands in COLUMNS."""
        found, run = self.state, self.state.run
        return [
            found.words,
            self.experiment,
            self.label,
            run.dataset if run else "",
            run.partition if run else "",
            str(run.seed) if run else "",
            layout.percent(found.judged.get("accuracy")),
            layout.percent(found.judged.get("ft_accuracy")),
            "" if math.isnan(found.hours) else f"{found.hours:.2f}",
            layout.short(self.bits),
            layout.duration(time.time() - found.changed),
            str(found.path),
        ]


SORTS: dict[str, tuple[Callable[[Entry], Any], bool]] = {
    "run": (lambda entry: entry.order, False),
    "status": (lambda entry: STATUSES.index(entry.state.status), False),
    "accuracy": (lambda entry: _known(entry.state.judged.get("accuracy")), True),
    "fine-tuned": (lambda entry: _known(entry.state.judged.get("ft_accuracy")), True),
    "hours": (lambda entry: _known(entry.state.hours), True),
    "bits": (lambda entry: entry.bits, True),
    "age": (lambda entry: -entry.state.changed, False),
    "seed": (lambda entry: entry.state.run.seed if entry.state.run else None, False),
    "path": (lambda entry: str(entry.state.path), False),
}
"""Each key's value, None where there is none, and whether the largest comes first."""


def entries(states: Iterable[State]) -> list[Entry]:
    """The directories in the order of tables: data set, partition, method, seed; those that cannot be read last."""
    every = list(states)
    readable = {id(found.run): found for found in every if found.run}
    placed = [
        (readable.pop(id(run)), group.method)
        for group in groups([found.run for found in every if found.run])
        for run in group.runs
    ]
    placed += [(found, "") for found in every if not found.run]
    return [Entry(found, label, order) for order, (found, label) in enumerate(placed)]


def select(
    listed: Sequence[Entry], statuses: Sequence[str] = (), methods: Sequence[str] = (), datasets: Sequence[str] = ()
) -> list[Entry]:
    """Those of any of the statuses, methods and data sets; an empty choice lets all through.

    Methods and data sets: as in the configuration or as tables show them. Raises FedpflError for a name that no
    directory has, and for a status that there is none of.
    """
    unknown = [word for word in statuses if word not in STATUSES]
    if unknown:
        raise FedpflError(f"--status {unknown[0]}: no such status; choose of: {', '.join(STATUSES)}")
    for option, words, names in (("--method", methods, _methods), ("--dataset", datasets, _datasets)):
        there = {_plain(name) for entry in listed for name in names(entry)}
        for word in words:
            if _plain(word) not in there:
                known = ", ".join(sorted({names(entry)[0] for entry in listed if entry.state.run})) or "none at all"
                raise FedpflError(f"{option} {word}: no such run here; there are: {known}")

    def chosen(words: Sequence[str], names: Sequence[str]) -> bool:
        return not words or not {_plain(word) for word in words}.isdisjoint(map(_plain, names))

    return [
        entry
        for entry in listed
        if chosen(statuses, [entry.state.status])
        and chosen(methods, _methods(entry))
        and chosen(datasets, _datasets(entry))
    ]


def ordered(listed: Iterable[Entry], key: str = "run", reverse: bool = False) -> list[Entry]:
    """Sorted by a key of SORTS; where it has no value an entry comes last, in whatever direction."""
    value, largest = SORTS[key]
    every = sorted(listed, key=lambda entry: entry.order)
    known = [entry for entry in every if value(entry) is not None]
    known.sort(key=value, reverse=largest != reverse)
    return known + [entry for entry in every if value(entry) is None]


def render(listed: Sequence[Entry], form: str = "terminal", width: int | None = None) -> str:
    """The list in one of FORMATS. width: of the terminal, in characters; by default as wide as needed."""
    if form == "json":
        return json.dumps([entry.record() for entry in listed], indent=2) + "\n"
    if form == "csv":
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, list(_NOTHING.record()), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: csv_cell(value) for key, value in entry.record().items()} for entry in listed)
        return buffer.getvalue()
    text, left_out = _table(listed, width)
    reasons = [f"{entry.state.path}: {entry.state.reason}" for entry in listed if entry.state.reason]
    return text + "".join("\n" + layout.paragraph(line, width) for line in (*reasons, _caption(listed, left_out)))


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit code. Raises FedpflError for a mistake of the user's."""
    options = _parser().parse_args(words)
    listed = entries(map(state.read, directories(*options.roots)))
    if not listed:
        raise FedpflError(
            f"no runs found below {', '.join(map(str, options.roots))}; "
            "run `python -m fedpfl.train` first or name another folder"
        )
    listed = select(listed, options.status, options.method, options.dataset)
    text = render(ordered(listed, options.sort, options.reverse), options.format, layout.screen())
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        # `ls | head` has seen enough; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def words_of(text: str) -> list[str]:
    """`a,b` as its words."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fedpfl.report ls",
        description="Lists runs, one line each: status, what, accuracy, cost, age and path. Broken ones too.",
    )
    parser.add_argument(
        "roots", nargs="*", metavar="ROOT", type=Path, default=[Path("outputs")], help="default: outputs"
    )
    parser.add_argument("--status", type=words_of, default=[], metavar="A,B", help=f"only these: {', '.join(STATUSES)}")
    parser.add_argument("--method", type=words_of, default=[], metavar="A,B", help="only these, such as fedobp,fedavg")
    parser.add_argument("--dataset", type=words_of, default=[], metavar="A,B", help="only these, such as fmnist")
    parser.add_argument(
        "--sort", choices=SORTS, default="run", metavar="KEY", help=f"{', '.join(SORTS)}; default: run, as in tables"
    )
    parser.add_argument("--reverse", action="store_true", help="the other way round")
    parser.add_argument("--format", choices=FORMATS, default="terminal", help="default: terminal")
    return parser


_LEFT_OUT: tuple[set[str], ...] = (
    set(),
    {"experiment"},
    {"experiment", "hours", "bits"},
    {"experiment", "hours", "bits", "fine-tuned", "age"},
)


def _table(listed: Sequence[Entry], width: int | None) -> tuple[str, set[str]]:
    """The table, and what a narrow window leaves out; there the path stands below its row."""
    cells = [entry.cells() for entry in listed]
    if layout.fits(COLUMNS, cells, width):
        return layout.terminal(COLUMNS, cells), set()
    for left_out in _LEFT_OUT:
        kept = [place for place, column in enumerate(COLUMNS[:-1]) if column.heading not in left_out]
        columns, rows = [COLUMNS[place] for place in kept], [[row[place] for place in kept] for row in cells]
        if layout.fits(columns, rows, width, folded=bool(left_out)):
            break
    return layout.terminal(columns, rows, width=width, below=[row[-1] for row in cells]), left_out


def _caption(listed: Sequence[Entry], left_out: set[str]) -> str:
    counts = [(status, sum(entry.state.status == status for entry in listed)) for status in STATUSES]
    told = ", ".join(f"{count} {status}" for status, count in counts if count)
    without = [column.heading for column in COLUMNS if column.heading in left_out - {"experiment"}]
    parts = [
        f"{len(listed)} {'run' if len(listed) == 1 else 'runs'}{': ' + told if told else ''}.",
        "Accuracy: mean over clients in percent at the last evaluation.",
        "" if "bits" in left_out else "Bits: down and up together, per client of the cohort, in the last round.",
        "" if "age" in left_out else "Age: since a file was last written.",
        f"Left out for room: {', '.join(without)}." if without else "",
    ]
    return " ".join(part for part in parts if part)


def _methods(entry: Entry) -> list[str]:
    run = entry.state.run
    return [run.method_name, METHODS.get(run.method_name, ""), entry.label] if run else []


def _datasets(entry: Entry) -> list[str]:
    run = entry.state.run
    name = str(run.config["dataset"]["name"]) if run else ""
    return [name, DATASETS.get(name, ""), run.dataset] if run else []


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


_NOTHING = Entry(State(Path(), "broken", 0.0))
