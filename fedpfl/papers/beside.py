"""FedOBP's published numbers beside the report's own, and in what the set-up of runs departs from the published one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedpfl.papers.published import QUANTILE, SETUP, of_run
from fedpfl.report.grouping import Group
from fedpfl.report.run import Run
from fedpfl.report.tables import Beside
from fedpfl.report.text import few

CAPTION = (
    "Published: FedOBP (arXiv:2604.16574), Tables III and IV; described there as mean over clients, in the authors' "
    "logs pooled, the best of rounds 100, 200, 300 and 400 before fine-tuning. Δ: own minus published, in points."
)


def beside(gathered: Sequence[Group]) -> Beside:
    """Return what FedOBP's tables have published of the configurations, for `report.tables.accuracy_table`."""
    known = [of_run(group.runs[0]) for group in gathered]
    compared = [(group, setup_of(group.runs[0]), one.note) for group, one in zip(gathered, known, strict=True) if one]
    values = [(one.value, one.std) if one else (math.nan, math.nan) for one in known]
    return Beside(values, CAPTION, departures(compared))


def departures(compared: Iterable[tuple[Group, Mapping[str, Any], str]]) -> tuple[str, ...]:
    """Say in what runs depart from the published set-up, and what is known about the published code; a line each.

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


def setup_of(run: Run) -> dict[str, Any]:
    """Return the set-up of FedOBP's tables for a run's method, data set and partition."""
    q = of_run(run, QUANTILE)
    return (
        SETUP
        | ({"method.q": q.value} if q else {})
        | ({"method.norm": "global"} if run.method_name == "fedobp" else {})
    )


def setup_differences(run: Run, setup: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return what, own value and published value, where a run has another one."""
    found = [(key.removeprefix("method."), run.get(key), value) for key, value in setup.items()]
    return [(key, str(own), str(value)) for key, own, value in found if own not in (None, value)]
