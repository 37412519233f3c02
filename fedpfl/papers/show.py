"""Make the papers' tables and figures from runs: `python -m fedpfl.report paper`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tasks import CLASSIFICATION
from fedpfl.papers.filling import fill_table
from fedpfl.papers.layout import Layout, Listing, Selection
from fedpfl.papers.registry import FIGURES, NAMES, TABLES, paper_datasets
from fedpfl.report.grouping import Group
from fedpfl.report.load import print_to_stderr
from fedpfl.report.table import Table

AS_PUBLISHED = "as-published"
"""The selection that stands for each table's own rule."""


def make_tables_and_figures(
    groups: Sequence[Group],
    out: Path,
    rule: Selection | None,
    names: Sequence[str] = (),
) -> Iterator[tuple[str, Table | list[Path]]]:
    """Yield names, each with its table or with the files of its figure.

    Args:
        groups: Runs that differ by seed alone.
        out: The folder of figures.
        rule: None for each table's own.
        names: Of NAMES; by default all with runs.

    Raises:
        FedpflError: if a figure has no runs.
    """
    # All papers are about classification.
    groups = [group for group in groups if group.task is CLASSIFICATION]
    for name in names or [name for name in NAMES if _has_runs(name, groups)]:
        table = TABLES.get(name)
        if isinstance(table, Layout):
            yield name, fill_table(name, groups, rule)
        elif isinstance(table, Listing):
            yield name, table.make(table.choose(groups))
        else:
            files = _draw_figure(name, groups, out, rule, is_asked_for=name in names)
            if files:
                yield name, files


def _draw_figure(
    name: str, groups: Sequence[Group], out: Path, rule: Selection | None, is_asked_for: bool
) -> list[Path]:
    """Draw a figure, by the rule of its paper's first table if none is given."""
    paper_rules = [
        table.rule
        for table_name, table in TABLES.items()
        if table_name.partition("/")[0] == name.partition("/")[0] and isinstance(table, Layout)
    ]
    try:
        return FIGURES[name].draw(name, groups, out, rule or paper_rules[0])
    except FedpflError as error:
        if is_asked_for:
            raise
        print_to_stderr(f"not drawn: {name}: {error}")
        return []


def _has_runs(name: str, groups: Sequence[Group]) -> bool:
    """Return True if runs on the paper's data sets fill a part."""
    datasets = paper_datasets(name.partition("/")[0])
    fitting_groups = [group for group in groups if group.runs[0].dataset_name in datasets]
    if not fitting_groups:
        return False
    table = TABLES.get(name)
    if isinstance(table, Layout):
        return bool(fill_table(name, fitting_groups).frame["seeds"].any())
    if isinstance(table, Listing):
        return bool(table.choose(fitting_groups))
    return bool(FIGURES[name].choose(fitting_groups))
