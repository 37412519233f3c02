"""Choose the papers' tables and figures, and make them from runs: `python -m fedpfl.report paper`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fedpfl.ground.errors import FedpflError
from fedpfl.papers.costs import OURS, Device
from fedpfl.papers.fedobp.tables import beside
from fedpfl.papers.filling import fill
from fedpfl.papers.plan import Listing, Plan, Rule
from fedpfl.papers.registry import FIGURES, NAMES, TABLES, datasets
from fedpfl.report.grouping import Group
from fedpfl.report.table import Table
from fedpfl.report.tables import accuracy_table

AS_PUBLISHED = "as-published"
"""The selection that stands for each table's own rule."""


class Wish(NamedTuple):
    """What is asked for.

    names: of NAMES, or all of which there are runs. only: `tables` or `figures`. select, every: as in `accuracy_table`,
    every 0 for the paper's. datasets: only these columns. test: of `compare.LEAST`. out: the folder of figures.
    """

    out: Path
    names: Sequence[str] = ()
    only: str = ""
    select: str = "last"
    every: int = 0
    accuracy: str = "accuracy"
    datasets: Sequence[str] = ()
    test: str = ""
    device: Device = OURS


def show(gathered: Sequence[Group], wish: Wish) -> Iterator[tuple[str, Table | list[Path]]]:
    """Yield what is asked for by name: tables, and the files that a figure was written to.

    Raises FedpflError where a figure has no runs, and for a rule that contradicts `as-published`.
    """
    as_published = wish.select == AS_PUBLISHED
    if as_published and (wish.every or wish.accuracy != "accuracy"):
        raise FedpflError(
            f"--select {AS_PUBLISHED} has rounds and accuracy of its own; leave out --every and --accuracy"
        )
    rule = Rule(wish.accuracy, wish.select, wish.every or 100)
    gathered = [one for one in gathered if not wish.datasets or one.runs[0].dataset_name in wish.datasets]
    for name in chosen(gathered, wish):
        own = _rule(name.partition("/")[0]) if as_published else rule
        table = TABLES.get(name)
        if name in FIGURES:
            yield name, FIGURES[name].draw(name, gathered, wish.out, own)
        elif isinstance(table, Listing):
            members = [run for group in table.choose(gathered) for run in group.runs]
            yield name, accuracy_table(members, own.select, own.every, beside=beside)
        else:
            yield name, fill(name, gathered, None if as_published else rule, wish.datasets, wish.test, wish.device)


def _rule(paper: str) -> Rule:
    """The rule of a paper's first table."""
    return next(
        table.rule for name, table in TABLES.items() if name.startswith(f"{paper}/") and isinstance(table, Plan)
    )


def chosen(gathered: Sequence[Group], wish: Wish) -> list[str]:
    """Return the names to show: those asked for, or all of which there are runs."""

    def has_runs(name: str) -> bool:
        """Whether its paper's data sets are among the runs', and fill something."""
        table, known = TABLES.get(name), datasets(name.partition("/")[0])
        own = [group for group in gathered if group.runs[0].dataset_name in known]
        if isinstance(table, Plan):
            return bool(own) and bool(fill(name, own).frame["seeds"].any())
        return bool(own and (FIGURES[name].of(own) if table is None else table.choose(own)))

    names = wish.names or [name for name in NAMES if has_runs(name)]
    return [name for name in names if not wish.only or (name in FIGURES) == (wish.only == "figures")]


def device(text: str) -> Device:
    """Read `1e9,1e7`, operations and bits a second, for argparse."""
    try:
        speed, bandwidth = map(float, text.split(","))
    except ValueError:
        speed = bandwidth = math.nan
    if not (0 < speed < math.inf and 0 < bandwidth < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r} is not two positive numbers, such as 1e9,1e7")
    return Device(speed, bandwidth)
