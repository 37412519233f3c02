"""Look up the papers' published numbers, and say in what runs depart from how they were made."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fedpfl.ground.records import Values
from fedpfl.report.grouping import Group
from fedpfl.report.names import DATASET_TITLES
from fedpfl.report.run import Run
from fedpfl.report.text import join_few, letters_and_digits


class Published(NamedTuple):
    """Hold one published number.

    Attributes:
        value: An accuracy in percent, or what its metric says.
        std: Its standard deviation, nan where unknown.
        source: Paper and table.
        note: On how it was made, "" for none.
    """

    value: float
    std: float
    source: str
    note: str


NOT_PUBLISHED = Published(math.nan, math.nan, "", "")
Key = tuple[str, str, str, str, str]
"""Source, metric, method, data set and setting of a published number."""


def lookup(key: Key, file_name: str = "published.csv") -> Published | None:
    """Return a published number, or None.

    Args:
        key: The data set may be a name of the configuration, the method in any spelling.
        file_name: `computed.csv` for numbers that follow without runs; their notes are the rules.
    """
    source, metric, method, dataset, setting = key
    dataset_title = DATASET_TITLES.get(dataset, dataset)
    return published_numbers(file_name).get(
        (source, metric, letters_and_digits(method), dataset_title, setting)
    )


@cache
def published_numbers(file_name: str = "published.csv") -> dict[Key, Published]:
    """Return all papers' numbers of a file, as in `lookup`."""
    number_by_key: dict[Key, Published] = {}
    for path in sorted(Path(__file__).parent.glob(f"*/{file_name}")):
        text = path.read_text(encoding="utf-8")
        for row in csv.DictReader(text.splitlines()):
            method = letters_and_digits(row["method"])
            key = (row["source"], row["metric"], method, row["dataset"], row["setting"])
            number_by_key[key] = Published(
                value=float(row["value"]),
                std=float(row["std"]) if row["std"] else math.nan,
                source=row["source"],
                note=row["note"],
            )
    return number_by_key


def departures(comparisons: Iterable[tuple[Group, Values, str]]) -> tuple[str, ...]:
    """Return lines on what differs from the published set-up, and on the published code.

    Args:
        comparisons: Groups, each with its published set-up by dotted key and the note on the code.
    """
    # ---- Gather by note, and by key and published value
    methods_by_note: dict[str, dict[str, None]] = {}
    differing: dict[tuple[str, str], list[tuple[str, str]]] = {}
    group_count = 0
    for group, setup, note in comparisons:
        group_count += 1
        if note:
            methods_by_note.setdefault(note, {})[group.runs[0].method_title] = None
        for key, run_value, published_value in setup_differences(group.runs[0], setup):
            differing.setdefault((key, published_value), []).append((run_value, group.method))

    # ---- One line on all differences, one for each note
    differences = []
    for (key, published_value), values_and_methods in differing.items():
        values = dict.fromkeys(value for value, _ in values_and_methods)
        text = f"{key} {join_few(values)} (published {published_value})"
        # A difference that all have needs no list of them.
        if len(values_and_methods) < group_count:
            methods = dict.fromkeys(method for _, method in values_and_methods)
            text += f" for {join_few(methods)}"
        differences.append(text)
    lines = []
    if differences:
        lines.append(f"Set-up that differs from the published one: {'; '.join(differences)}.")
    for note, methods in methods_by_note.items():
        lines.append(f"{', '.join(methods)}: {note}.")
    return tuple(lines)


def setup_differences(run: Run, setup: Values) -> list[tuple[str, str, str]]:
    """Return key, the run's value and the published one, where these differ."""
    differences = []
    for key, published_value in setup.items():
        run_value = run.config_value(key)
        # A partition without a seed has the run's.
        if key == "partition.seed" and run_value is None:
            run_value = run.seed
        if run_value not in (None, published_value):
            name = key.removeprefix("method.")
            differences.append((name, str(run_value), str(published_value)))
    return differences
