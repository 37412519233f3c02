"""Fill a paper's table from runs: `python -m fedpfl.report paper fedobp/table3 fedselect/table1`.

Every cell shows the own value above the published one and their difference; missing cells
are listed with the commands that fill them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd

from fedpfl.papers import published
from fedpfl.papers.layout import (
    LAST,
    Layout,
    Measure,
    Part,
    Selection,
    TableColumn,
    TableRow,
    closeness_to_paper,
    list_parts,
)
from fedpfl.papers.registry import TABLES, paper_datasets
from fedpfl.report.grouping import Group, find_deviations
from fedpfl.report.table import Cell, Column, Table, format_number, mark_best, mean_and_std
from fedpfl.report.tables import describe_seeds, empty_cell_notes, judged_rows, selection_note
from fedpfl.report.text import join_few

SeedValues = dict[int, float]
"""A number by seed."""

DIFFERENCE_KINDS = {"percent": "difference", "decimal": "difference", "entries": "change"}
"""How own minus published is shown; a hyperparameter has no better or worse."""
SIGNIFICANCE = 0.05
TEST_TITLES = {"t": "t test", "wilcoxon": "Wilcoxon signed-rank test"}
ACCURACY_TEXTS = {
    "accuracy": "mean over clients",
    "accuracy_pooled": "pooled over all clients' test samples",
    "accuracy_worst10": "mean over the worst decile of clients",
    "cohort_after": "right after local training, pooled over the round's clients",
}
EVALUATION_TEXTS = {
    "last": "the last evaluation of each run",
    "best-checkpoint": "the best evaluation of each run (every {})",
    "validation": "each run's first evaluation of the best validation accuracy",
}


@dataclass
class FilledPart:
    """Hold the runs that fill a part of a cell.

    Attributes:
        part: The part.
        group: The runs, the nearest to the paper's of those that fit.
        values: Their numbers by seed; empty where one of them has none.
        is_ambiguous: Whether other groups fit too.
    """

    part: Part
    group: Group
    values: SeedValues
    is_ambiguous: bool


@dataclass
class FilledCell:
    """Hold the runs that fill a cell.

    Attributes:
        row: Its row.
        column: Its column.
        published: The number beside it, of nan if there is none.
        parts: Its parts that runs fill.
        is_different: Whether a test tells it from the last row.
    """

    row: TableRow
    column: TableColumn
    published: published.Published
    parts: list[FilledPart] = field(default_factory=list)
    is_different: bool = False

    @cached_property
    def values(self) -> SeedValues:
        """Its numbers: weighted means over the parts, of seeds that all parts have."""
        if len(self.parts) < len(list_parts(self.row, self.column)):
            return {}
        weights = [one.part.weight for one in self.parts]
        values = {}
        for seed in self.parts[0].values:
            numbers = [one.values.get(seed, math.nan) for one in self.parts]
            total = math.fsum(map(operator.mul, weights, numbers))
            if not math.isnan(total):
                values[seed] = total / sum(weights)
        return values

    @property
    def mean_and_deviation(self) -> tuple[float, float]:
        """The mean, and the deviation over seeds, or over the numbers that it mixes."""
        mean, deviation = mean_and_std([*self.values.values()])
        if len(self.row.shares) > 1 and self.values:
            weights = [one.part.weight for one in self.parts]
            squares = [(mean_and_std([*one.values.values()])[0] - mean) ** 2 for one in self.parts]
            # Of the whole: such numbers are no sample.
            variance = math.fsum(map(operator.mul, weights, squares)) / sum(weights)
            deviation = math.sqrt(variance)
        return mean, deviation

    @property
    def shown_groups(self) -> list[Group]:
        """Its groups, if it shows a number."""
        return [one.group for one in self.parts] if self.values else []

    @property
    def progress(self) -> str:
        """How far its runs are, "" if they have all planned rounds."""
        unfinished = [group.status for group in self.shown_groups if not group.is_complete]
        return unfinished[-1] if unfinished else ""

    @property
    def is_finished(self) -> bool:
        """True if it has runs, and all of these are finished."""
        statuses = {group.reported_runs[0].status for group in self.shown_groups}
        return statuses == {"finished"}


@dataclass
class FilledTable:
    """Hold the cells of a table, filled from runs.

    Attributes:
        layout: The table.
        rule: The accuracy and evaluation that are shown.
        rows: Its cells.
    """

    layout: Layout
    rule: Selection
    rows: list[list[FilledCell]]

    @property
    def cells(self) -> list[FilledCell]:
        """All cells, row by row."""
        return [cell for cells in self.rows for cell in cells]

    def empty_notes(self, groups: Sequence[Group]) -> Sequence[str]:
        """Return why groups hold no number where they are judged; nothing if they do."""
        return empty_cell_notes(groups, self.rule.select, self.rule.every, self.rule.by)

    def missing_parts(self) -> Iterator[Part]:
        """Yield the parts that runs would fill."""
        for cell in self.cells:
            if cell.values or cell.row.omission or cell.column.omission:
                continue
            # A run that ended without a number gives none when it is repeated.
            filled_parts = [
                one.part for one in cell.parts if one.values or self.empty_notes([one.group])
            ]
            for part in list_parts(cell.row, cell.column):
                if part not in filled_parts:
                    yield part


def fill_table(
    name: str,
    groups: Sequence[Group],
    rule: Selection | None = LAST,
    only: Sequence[str] = (),
    test: str = "",
) -> Table:
    """Fill table `paper/name` from groups of runs.

    Args:
        name: The table, as in TABLES.
        groups: Runs that differ by seed alone.
        rule: None for the paper's own.
        only: Data sets of the columns; by default the paper's, or those of the runs where none of
            the papers' is among them.
        test: "t" or "wilcoxon", to compare with the last row; "" for none.
    """
    # ---- Which columns
    layout = TABLES[name]
    assert isinstance(layout, Layout)
    run_datasets = tuple(dict.fromkeys(group.runs[0].dataset_name for group in groups))
    # Runs on none of the papers' data sets: the table has their columns, without published numbers.
    if not only and paper_datasets().isdisjoint(run_datasets):
        only = run_datasets
    if only:
        layout = layout.with_datasets(only)

    # ---- What fills them
    filled = _fill_cells(layout, groups, rule or layout.rule)
    notes = [*_notes(filled)]
    if test:
        notes.append(_mark_differences(filled, test))
    rows = [[_make_cell(cell) for cell in cells] for cells in filled.rows]
    _mark_best(filled, rows)
    records = []
    for filled_cells, cells in zip(filled.rows, rows, strict=True):
        pairs = zip(filled_cells, cells, strict=True)
        records += [_record(name, filled_cell, cell.mark) for filled_cell, cell in pairs]

    # ---- The table
    columns = [Column("")]
    for column in layout.columns:
        dataset_title, setting = column.heading
        columns.append(Column(setting, "percent", dataset_title))
    return Table(
        "",
        tuple(columns),
        [[Cell(row.label), *cells] for row, cells in zip(layout.rows, rows, strict=True)],
        pd.DataFrame(records),
        _caption(filled),
        tuple(notes),
        below="published",
        commands=_list_commands(filled.missing_parts()),
    )


# ---- Which runs fill which cells


def _fill_cells(layout: Layout, groups: Sequence[Group], rule: Selection) -> FilledTable:
    """Fill each cell from the fitting runs that are nearest to the paper's."""
    rows = []
    for row in layout.rows:
        cells = []
        for column in layout.columns:
            number = layout.find_published(row, column) or published.NOT_PUBLISHED
            parts = [
                _fill_part(layout, rule, part, fitting)
                for part in list_parts(row, column)
                if (fitting := [group for group in groups if part.is_filled_by(group.runs[0])])
            ]
            cells.append(FilledCell(row, column, number, parts))
        rows.append(cells)
    return FilledTable(layout, rule, rows)


def _fill_part(layout: Layout, rule: Selection, part: Part, fitting: Sequence[Group]) -> FilledPart:
    """Fill a part from the nearest of the fitting groups."""

    def closeness(group: Group) -> tuple[Any, ...]:
        return closeness_to_paper(group, layout.setup_of(group.runs[0], part.column))

    nearest = max(fitting, key=closeness)
    values = _measure_group(nearest, part.column.measure or part.row.measure, rule)
    return FilledPart(part, nearest, values, is_ambiguous=len(fitting) > 1)


def _measure_group(group: Group, measure: Measure, rule: Selection) -> SeedValues:
    """Return a cell's values of a group, by seed."""
    rows = judged_rows(group, rule.select, rule.every, rule.by)
    values = {run.seed: measure(run, row, rule) for run, row in rows.items()}
    # Where a seed lacks the value, a mean without it would not be the group's.
    if any(map(math.isnan, values.values())):
        return {}
    return values


# ---- Cells


def _make_cell(cell: FilledCell) -> Cell:
    """Return a cell: the own value, and below it the published one and the difference."""
    kind = cell.row.kind
    mean, deviation = cell.mean_and_deviation
    below = format_number(kind, cell.published.value)
    if not math.isnan(cell.published.std):
        below += f"({format_number(kind, cell.published.std)})"
    if kind in DIFFERENCE_KINDS:
        below += f" {format_number(DIFFERENCE_KINDS[kind], mean - cell.published.value)}"
    flag = ("°" if cell.progress else "") + ("†" if cell.is_different else "")
    shown_deviation = deviation if kind == "percent" else math.nan
    return Cell(mean, shown_deviation, kind, flag=flag, below=below.strip())


def _record(name: str, cell: FilledCell, mark: str) -> dict[str, Any]:
    """Return a cell as a row of the table's CSV."""
    dataset_title, setting = cell.column.heading
    mean, deviation = cell.mean_and_deviation
    return {
        "table": name,
        "row": cell.row.label,
        "dataset": dataset_title,
        "setting": setting,
        "own": mean,
        "own_seed_std": deviation,
        "seeds": " ".join(map(str, sorted(cell.values))),
        "unfinished": cell.progress,
        "published": cell.published.value,
        "published_std": cell.published.std,
        "difference": mean - cell.published.value,
        "rank": {"best": 1, "second": 2}.get(mark),
    }


def _mark_best(filled: FilledTable, rows: Sequence[Sequence[Cell]]) -> None:
    """Mark the best and the second of each column, among accuracies."""
    accuracy_rows = [
        i for i, row in enumerate(filled.layout.rows) if row.kind == "percent" and not row.beside
    ]
    for j in range(len(filled.layout.columns)):
        are_finished = [filled.rows[i][j].is_finished for i in accuracy_rows]
        mark_best([rows[i][j] for i in accuracy_rows], are_finished)


def _mark_differences(filled: FilledTable, test: str) -> str:
    """Compare each row with the last one, paired over seeds.

    Returns:
        A note on the test.
    """
    from fedpfl.report.compare import MIN_PAIRS, paired_test

    # ---- Test each cell that shares two seeds or more
    *compared_rows, last_row = filled.rows
    pair_counts: set[int] = set()
    for cells in compared_rows:
        for cell, last_cell in zip(cells, last_row, strict=True):
            seeds = sorted(cell.values.keys() & last_cell.values.keys())
            if len(seeds) > 1:
                pair_counts.add(len(seeds))
                differences = [cell.values[seed] - last_cell.values[seed] for seed in seeds]
                cell.is_different = paired_test(differences, test) < SIGNIFICANCE

    # ---- Say how it went
    label = filled.layout.rows[-1].label
    if not pair_counts:
        return f"No paired test against {label}: no two of its seeds were run with another method."
    fewest = min(pair_counts)
    seeds_text = " to ".join(map(str, sorted({fewest, max(pair_counts)})))
    warning = ""
    if fewest < MIN_PAIRS[test]:
        warning = f" (never met with fewer than {MIN_PAIRS[test]})"
    return (
        f"† differs from {label}: paired {TEST_TITLES[test]} over {seeds_text} seeds, "
        f"p < {SIGNIFICANCE}{warning}, not corrected for many."
    )


# ---- Notes and caption


def _notes(filled: FilledTable) -> Iterator[str]:
    """Yield the notes below the caption."""
    layout = filled.layout
    rule = filled.rule

    # ---- Step 1: what differs from the paper, or within a column.
    yield from published.departures(_compared_setups(filled))
    yield from _unequal_column_notes(filled)
    if any(row.kind == "percent" for row in layout.rows):
        yield from selection_note(rule.select)

    # ---- Step 2: which runs were shown, and why some are not.
    parts = [one for cell in filled.cells for one in cell.parts]
    yield from filled.empty_notes(_distinct(one.group for one in parts))
    ambiguous = dict.fromkeys(one.group.title for one in parts if one.is_ambiguous)
    if ambiguous:
        yield (
            f"Several configurations fit {join_few(ambiguous)}; shown is the one"
            " nearest to the paper's, then the longest."
        )
    progress = dict.fromkeys(cell.progress for cell in filled.cells if cell.progress)
    if progress:
        yield (
            f"° not all planned rounds: the last evaluation that there is ({join_few(progress)})."
        )

    # ---- Step 3: the table's own notes.
    if layout.note:
        yield layout.note
    omitted: dict[str, list[str]] = {}
    for row in layout.rows:
        omitted.setdefault(row.omission, []).append(row.label)
    for column in layout.columns:
        omitted.setdefault(column.omission, []).append(column.setting)
    for omission, names in omitted.items():
        if omission:
            yield f"Without own values: {', '.join(names)}; {omission}."


def _distinct(groups: Iterable[Group]) -> list[Group]:
    """Return every group once, in the order in which they come first."""
    return list({id(group): group for group in groups}.values())


def _compared_setups(filled: FilledTable) -> list[tuple[Group, Mapping[str, Any], str]]:
    """Return every shown group once, with its published set-up and the published note."""
    comparisons: dict[int, tuple[Group, Mapping[str, Any], str]] = {}
    for cell in filled.cells:
        for group in cell.shown_groups if cell.published.source else []:
            setup = filled.layout.setup_of(group.runs[0], cell.column)
            comparisons.setdefault(id(group), (group, setup, cell.published.note))
    return list(comparisons.values())


def _unequal_column_notes(filled: FilledTable) -> list[str]:
    """Return a note on runs that differ from their column in more than the method."""
    groups_by_column: dict[str, list[Group]] = {}
    for cell in filled.cells:
        # Rows that set other keys differ in these on purpose.
        if all(key.startswith("method.") for key in cell.row.config):
            for one in cell.parts:
                key = f"{cell.column} {one.part.alpha} {one.part.config}"
                groups_by_column.setdefault(key, []).append(one.group)
    descriptions: dict[str, None] = {}
    for members in groups_by_column.values():
        groups = _distinct(members)
        for group, deviations in zip(groups, find_deviations(groups), strict=True):
            if deviations:
                text = f"{group.runs[0].method_title} on {group.setting} ({', '.join(deviations)})"
                descriptions[text] = None
    if not descriptions:
        return []
    return [f"Not alike in what a column should share: {join_few(descriptions)}."]


def _caption(filled: FilledTable) -> str:
    """Return the caption."""
    layout = filled.layout
    rule = filled.rule
    if layout.rows[0].kind != "percent":
        about = f" {layout.about[0].upper()}{layout.about[1:]}." if layout.about else ""
        return f"{layout.title}: own, below it the published number and the difference.{about}"
    accuracy = ACCURACY_TEXTS.get(rule.accuracy, rule.accuracy)
    evaluation = EVALUATION_TEXTS[rule.select].format(rule.every)
    seeds = {
        f"{cell.row.label} on {', '.join(cell.column.heading)}": [*cell.values]
        for cell in filled.cells
        if cell.values
    }
    return (
        f"{layout.title}. Test accuracy in percent, {accuracy} at {evaluation}; "
        f"{describe_seeds(seeds)}. Below: the published value, and own minus "
        f"published; {layout.about}."
    )


# ---- Commands


def _list_commands(missing_parts: Iterable[Part]) -> tuple[str, ...]:
    """Return the commands that fill the missing parts, as few as say it."""
    # ---- Jobs with the same keys can share a command
    jobs_by_keys: dict[tuple[str, ...], dict[tuple[str, ...], None]] = {}
    for part in missing_parts:
        overrides = part.overrides
        jobs_by_keys.setdefault(tuple(overrides), {})[tuple(overrides.values())] = None

    # ---- Jobs that have all other keys in common become one, key by key
    commands = []
    for keys, jobs in jobs_by_keys.items():
        frame = pd.DataFrame([*jobs], columns=keys)
        for key in keys[1:]:
            # Key by key is not always the fewest commands, but none runs a job twice.
            other_keys = [name for name in frame if name != key]
            frame = frame.groupby(other_keys, sort=False)[key].agg(",".join).reset_index()
        for job in frame[[*keys]].to_dict("records"):
            words = " ".join(f"{key}={value}" for key, value in job.items())
            commands.append(f"python -m fedpfl.train {words}")
    return tuple(commands)
