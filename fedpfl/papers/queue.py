"""Run what fills the missing cells of papers' tables, the cheapest first, for so long.

`python -m fedpfl.report paper fedobp/table4 --fill 30m --with data_dir=DIR`
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

from fedpfl.ground.errors import FedpflError
from fedpfl.papers.filling import FilledTable, estimate_seconds, fill_cells, list_commands
from fedpfl.papers.layout import Layout, Part
from fedpfl.papers.registry import TABLES
from fedpfl.report.grouping import Group
from fedpfl.report.load import print_to_stderr
from fedpfl.report.table import format_number

UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600}
LEAST_SECONDS = 10
"""With less time left no run begins."""
LOCKSTEP_JOBS = 4
"""Runs that a GPU plays together: with more it is little faster, and all end later."""


def parse_duration(text: str) -> float:
    """Return the seconds of `90s`, `30m` or `1.5h`.

    Raises:
        argparse.ArgumentTypeError: if the text is no such time.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 90s, 30m or 2h")
    return float(match[1]) * UNIT_SECONDS[match[2]]


def run_missing(
    names: Sequence[str], groups: Sequence[Group], seconds: float, overrides: Sequence[str]
) -> None:
    """Run the missing parts of tables until the time is over.

    A run that is cut goes on the next time.

    Args:
        names: Tables, as in TABLES.
        groups: The existing runs.
        seconds: How long.
        overrides: Further overrides of all runs, such as `data_dir=DIR`.

    Raises:
        FedpflError: if none of the names is a table with commands, or commands failed.
    """
    layouts = [table for name in names if isinstance(table := TABLES.get(name), Layout)]
    if not layouts:
        raise FedpflError("--fill needs the name of a table, such as fedobp/table4")
    end = time.monotonic() + seconds
    failures = 0
    for words in _list_jobs(layouts, groups):
        time_left = end - time.monotonic()
        if time_left < LEAST_SECONDS:
            break
        print_to_stderr(f"{format_number('age', time_left)} left: {' '.join(words)}")
        process = subprocess.Popen([sys.executable, *words[1:], *overrides])
        try:
            failures += process.wait(timeout=time_left) != 0
        except subprocess.TimeoutExpired:
            # The run keeps its state, and the same command goes on with it.
            process.terminate()
            process.wait()
    if failures:
        raise FedpflError(f"{failures} of these commands failed, as they said above")


def _list_jobs(layouts: Iterable[Layout], groups: Sequence[Group]) -> list[list[str]]:
    """Return the words of the commands, the cheapest first; of unknown cost last.

    On a GPU a command has several jobs, which run in lockstep.
    """
    # ---- Step 1: each job once; rows of a method share theirs
    part_by_words: dict[tuple[str, ...], Part] = {}
    cost_by_words: dict[tuple[str, ...], float] = {}
    for layout in layouts:
        for part in _parts_to_run(fill_cells(layout, groups, layout.rule)):
            words = tuple(f"{key}={value}" for key, value in part.overrides.items())
            cost = estimate_seconds(layout, part, groups)
            part_by_words[words] = part
            cost_by_words[words] = math.inf if math.isnan(cost) else cost

    # ---- Step 2: the order, and on a GPU runs together
    ordered = sorted(cost_by_words, key=cost_by_words.__getitem__)
    if not shutil.which("nvidia-smi"):
        return [["python", "-m", "fedpfl.train", *words] for words in ordered]
    by_dataset: dict[str, list[Part]] = defaultdict(list)
    for words in ordered:
        part = part_by_words[words]
        by_dataset[part.column.dataset].append(part)
    return [
        command.split()
        for parts in by_dataset.values()
        for start in range(0, len(parts), LOCKSTEP_JOBS)
        for command in list_commands(parts[start : start + LOCKSTEP_JOBS])
    ]


def _parts_to_run(filled: FilledTable) -> list[Part]:
    """Return the parts without runs, or with runs that lack planned rounds."""
    unfinished = [
        one.part for cell in filled.cells for one in cell.parts if not one.group.is_complete
    ]
    return [*unfinished, *filled.missing_parts()]
