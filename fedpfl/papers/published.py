"""The papers' published numbers, and in what runs depart from how they were made."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fedpfl.report.grouping import Group
from fedpfl.report.names import DATASETS
from fedpfl.report.run import Run
from fedpfl.report.text import bare, few


class Published(NamedTuple):
    """One published number, an accuracy in percent or what its metric says; std is nan and note
    empty where unknown.
    """

    value: float
    std: float
    source: str
    note: str


Key = tuple[str, str, str, str, str]
"""Source, metric, method, data set and setting of a published number."""


def lookup(key: Key) -> Published | None:
    """Return a published number. The data set may be a name of the configuration, the method in any
    spelling.
    """
    source, metric, method, dataset, setting = key
    return numbers().get((source, metric, bare(method), DATASETS.get(dataset, dataset), setting))


@cache
def numbers() -> dict[Key, Published]:
    """Return all published numbers."""
    texts = [
        path.read_text(encoding="utf-8")
        for path in sorted(Path(__file__).parent.glob("*/published.csv"))
    ]
    return {
        (
            row["source"],
            row["metric"],
            bare(row["method"]),
            row["dataset"],
            row["setting"],
        ): Published(float(row["value"]), float(row["std"] or "nan"), row["source"], row["note"])
        for text in texts
        for row in csv.DictReader(text.splitlines())
    }


def departures(compared: Iterable[tuple[Group, Mapping[str, Any], str]]) -> tuple[str, ...]:
    """Say in what runs depart from the published set-up, and what is known about the published
    code; a line each.

    compared: groups, each with its set-up by dotted key and what is known.
    """
    every = list(compared)
    behind: dict[str, dict[str, None]] = {}
    differing: dict[str, list[tuple[str, Group]]] = {}
    for group, setup, note in every:
        if note:
            behind.setdefault(note, {})[group.runs[0].called] = None
        for what, own, theirs in setup_differences(group.runs[0], setup):
            differing.setdefault(f"{what} {{}} (published {theirs})", []).append((own, group))
    told = []
    for words, found in differing.items():
        text = words.format(few(dict.fromkeys(own for own, _ in found)))
        if len(found) < len(every):
            text += f" for {few(dict.fromkeys(group.method for _, group in found))}"
        told.append(text)
    lines = [f"Set-up that differs from the published one: {'; '.join(told)}."] if told else []
    return (*lines, *(f"{', '.join(names)}: {note}." for note, names in behind.items()))


def setup_differences(run: Run, setup: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return what, own value and published value, where a run has another one."""
    found = [(key.removeprefix("method."), run.get(key), value) for key, value in setup.items()]
    return [(key, str(own), str(value)) for key, own, value in found if own not in (None, value)]
