"""Choose the papers' tables and figures, and make them from runs: `python -m fedpfl.report paper`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedpfl.papers.filling import fill
from fedpfl.papers.layout import Layout, Listing, Selection
from fedpfl.papers.registry import FIGURES, NAMES, TABLES
from fedpfl.papers.registry import datasets as of_paper
from fedpfl.report.grouping import Group
from fedpfl.report.table import Table

AS_PUBLISHED = "as-published"
"""The selection that stands for each table's own rule."""


def show(
    gathered: Sequence[Group],
    out: Path,
    rule: Selection | None,
    names: Sequence[str] = (),
    only: str = "",
    datasets: Sequence[str] = (),
    test: str = "",
) -> Iterator[tuple[str, Table | list[Path]]]:
    """Yield what is asked for by name: tables, and the files that a figure was written to.

    out: the folder of figures. rule: None for each table's own. names: of NAMES, or all of which
    there are runs. only: `tables` or `figures`. datasets: only these columns. test: of
    `compare.LEAST`. Raises FedpflError where a figure has no runs.
    """
    gathered = [one for one in gathered if not datasets or one.runs[0].dataset_name in datasets]
    for name in names or [name for name in NAMES if _has_runs(name, gathered)]:
        if only and (name in FIGURES) != (only == "figures"):
            continue
        table, judging = TABLES.get(name), rule or _rule(name.partition("/")[0])
        if name in FIGURES:
            yield name, FIGURES[name].draw(name, gathered, out, judging)
        elif isinstance(table, Listing):
            yield name, table.make(table.choose(gathered), judging)
        else:
            yield name, fill(name, gathered, rule, datasets, test)


def _rule(paper: str) -> Selection:
    """The rule of a paper's first table."""
    return next(
        table.rule
        for name, table in TABLES.items()
        if name.startswith(f"{paper}/") and isinstance(table, Layout)
    )


def _has_runs(name: str, gathered: Sequence[Group]) -> bool:
    """Whether its paper's data sets are among the runs', and fill something."""
    table, known = TABLES.get(name), of_paper(name.partition("/")[0])
    fitting = [group for group in gathered if group.runs[0].dataset_name in known]
    if isinstance(table, Layout):
        return bool(fitting) and bool(fill(name, fitting).frame["seeds"].any())
    return bool(fitting and (FIGURES[name].of(fitting) if table is None else table.choose(fitting)))
