"""Fill a paper's table from runs: `python -m fedpfl.report paper fedobp/table3 fedselect/table1`.

Every cell shows the own value above the published one and their difference; missing cells
are listed with the commands that fill them.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd

from fedpfl.ground.records import Record, Values
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
from fedpfl.papers.published import NOT_PUBLISHED, Published, departures, lookup
from fedpfl.papers.registry import TABLES, paper_datasets
from fedpfl.report.grouping import Group
from fedpfl.report.table import Cell, Column, Table, format_number, mark_best, mean_and_std
from fedpfl.report.tables import describe_seeds, empty_cell_notes, judged_rows, selection_note
from fedpfl.report.text import join_few

SeedValues = dict[int, float]
"""A number by seed."""

DIFFERENCE_KINDS = {"percent": "difference", "decimal": "difference", "entries": "change"}
"""How own minus published is shown; a hyperparameter has no better or worse."""
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
        published: The number beside it, or nan.
        computed: Its number by arithmetic, of nan if only runs tell.
        seconds: What runs of its missing parts would take, nan if unknown.
        parts: Its parts that runs fill.
    """

    row: TableRow
    column: TableColumn
    published: Published
    computed: Published
    parts: list[FilledPart]
    seconds: float = math.nan

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
        if not self.values:
            return self.computed.value, math.nan
        mean, deviation = mean_and_std([*self.values.values()])
        if len(self.row.shares) > 1:
            weights = [one.part.weight for one in self.parts]
            squares = [(mean_and_std([*one.values.values()])[0] - mean) ** 2 for one in self.parts]
            # Of the whole: such numbers are no sample.
            variance = math.fsum(map(operator.mul, weights, squares)) / sum(weights)
            deviation = math.sqrt(variance)
        return mean, deviation

    @property
    def is_computed(self) -> bool:
        """True if it shows a number that needs no runs."""
        return not self.values and not math.isnan(self.computed.value)

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

    def estimate_costs(self, groups: Sequence[Group]) -> None:
        """Tell missing cells their cost."""
        costs: dict[tuple[TableRow, TableColumn], float] = defaultdict(float)
        for part in self.missing_parts():
            costs[part.row, part.column] += estimate_seconds(self.layout, part, groups)
        for cell in self.cells:
            cell.seconds = costs.get((cell.row, cell.column), math.nan)

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
            if cell.values or cell.is_computed or cell.row.omission or cell.column.omission:
                continue
            # A run that ended without a number gives none when it is repeated.
            filled_parts = [
                one.part for one in cell.parts if one.values or self.empty_notes([one.group])
            ]
            for part in list_parts(cell.row, cell.column):
                if part not in filled_parts:
                    yield part


def fill_table(name: str, groups: Sequence[Group], rule: Selection | None = LAST) -> Table:
    """Fill table `paper/name` from groups of runs.

    Where no paper has the runs' data sets, columns of these come before the paper's.

    Args:
        name: The table, as in TABLES.
        groups: Runs that differ by seed alone.
        rule: None for the paper's own.
    """
    # ---- Step 1: which columns.
    layout = TABLES[name]
    assert isinstance(layout, Layout)
    paper_columns = layout.columns
    run_datasets = dict.fromkeys(group.runs[0].dataset_name for group in groups)
    is_in_small = bool(groups) and paper_datasets().isdisjoint(run_datasets)
    if is_in_small:
        # Runs in small seldom reach the round that a paper judges first.
        small_columns = layout.columns_of(run_datasets)
        layout = replace(layout, columns=small_columns + paper_columns, rule=LAST)

    # ---- Step 2: what fills them.
    filled = fill_cells(layout, groups, rule or layout.rule)
    filled.estimate_costs(groups)
    rows = [[_make_cell(cell) for cell in cells] for cells in filled.rows]
    _mark_best(filled, rows)
    notes = [*_notes(filled)]
    if is_in_small:
        titles = join_few(dict.fromkeys(column.heading[0] for column in small_columns))
        notes.insert(0, f"In small: no paper has {titles}, and nothing is published beside it.")

    # ---- Step 3: the table.
    columns = [Column("")]
    for column in layout.columns:
        dataset_title, setting = column.heading
        columns.append(Column(setting, "percent", dataset_title))
    missing_parts = [part for part in filled.missing_parts() if part.column in paper_columns]
    return Table(
        "",
        tuple(columns),
        [[Cell(row.label), *cells] for row, cells in zip(layout.rows, rows, strict=True)],
        pd.DataFrame(_list_records(name, filled, rows, groups)),
        _caption(filled),
        tuple(notes),
        below="published",
        commands=list_commands(missing_parts),
    )


# ---- Which runs fill which cells


def fill_cells(layout: Layout, groups: Sequence[Group], rule: Selection) -> FilledTable:
    """Fill each cell from the fitting runs that are nearest to the paper's."""
    rows = []
    for row in layout.rows:
        cells = []
        for column in layout.columns:
            number = layout.find_published(row, column) or NOT_PUBLISHED
            key = layout.published_key(row, column)
            computed = lookup(key, "computed.csv") or NOT_PUBLISHED
            parts = [
                _fill_part(layout, rule, part, fitting)
                for part in list_parts(row, column)
                if (fitting := [group for group in groups if part.is_filled_by(group.runs[0])])
            ]
            cells.append(FilledCell(row, column, number, computed, parts))
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


def estimate_seconds(layout: Layout, part: Part, groups: Sequence[Group]) -> float:
    """Estimate the seconds of a part's runs by existing runs on its data set.

    It is nan without any. Runs of its method count, or else all.
    """
    measured = [
        run
        for group in groups
        for run in group.reported_runs
        if run.dataset_name == part.column.dataset and run.rounds_done
    ]
    own = [run for run in measured if run.method_name == part.row.method]
    hours = [run.hours / run.rounds_done for run in own or measured]
    seeds = part.overrides.get("seed", "").count(",") + 1
    rounds = part.column.setup.get("rounds", layout.rounds)
    return float(pd.Series(hours).median()) * 3600 * rounds * max(seeds, layout.seeds)


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
    if not math.isnan(cell.seconds):
        below += f" ~{format_number('age', cell.seconds)}"
    flag = "=" if cell.is_computed else "°" if cell.progress else ""
    shown_deviation = deviation if kind == "percent" else math.nan
    return Cell(mean, shown_deviation, kind, flag=flag, below=below.strip())


def _list_records(
    name: str, filled: FilledTable, rows: Sequence[Sequence[Cell]], groups: Sequence[Group]
) -> Iterator[Record]:
    """Yield the rows of the table's CSV, with numbers by our rule too."""
    by_our_rule = fill_cells(filled.layout, groups, LAST).cells
    cells = itertools.chain.from_iterable(rows)
    for cell, shown, last in zip(filled.cells, cells, by_our_rule, strict=True):
        dataset_title, setting = cell.column.heading
        mean, deviation = cell.mean_and_deviation
        yield {
            "table": name,
            "row": cell.row.label,
            "dataset": dataset_title,
            "setting": setting,
            "own": mean,
            "own_seed_std": deviation,
            "own_last": last.mean_and_deviation[0],
            "seeds": " ".join(map(str, sorted(cell.values))),
            "unfinished": cell.progress,
            "cost_seconds": cell.seconds,
            "published": cell.published.value,
            "published_std": cell.published.std,
            "difference": mean - cell.published.value,
            "rank": {"best": 1, "second": 2}.get(shown.mark),
        }


def _mark_best(filled: FilledTable, rows: Sequence[Sequence[Cell]]) -> None:
    """Mark the best and the second of each column, among accuracies."""
    accuracy_rows = [
        i for i, row in enumerate(filled.layout.rows) if row.kind == "percent" and not row.beside
    ]
    for j in range(len(filled.layout.columns)):
        are_finished = [filled.rows[i][j].is_finished for i in accuracy_rows]
        mark_best([rows[i][j] for i in accuracy_rows], are_finished)


# ---- Notes and caption


def _notes(filled: FilledTable) -> Iterator[str]:
    """Yield the notes below the caption."""
    layout = filled.layout
    rule = filled.rule

    # ---- Step 1: what differs from the paper, or within a column.
    yield from departures(_compared_setups(filled))
    if any(row.kind == "percent" for row in layout.rows):
        yield from selection_note(rule.select)

    # ---- Step 2: which runs were shown, and why some are not.
    parts = [one for cell in filled.cells for one in cell.parts]
    yield from filled.empty_notes([*dict.fromkeys(one.group for one in parts)])
    ambiguous = dict.fromkeys(one.group.title for one in parts if one.is_ambiguous)
    if ambiguous:
        yield (
            f"Several configurations fit {join_few(ambiguous)}; shown is the one"
            " nearest to the paper's, then the longest."
        )
    unjudged = [one.group.title for one in parts if not one.values]
    if unjudged and rule.select == "best-checkpoint":
        titles = join_few(dict.fromkeys(unjudged))
        yield f"No evaluation that this rule judges yet (--select last): {titles}."
    progress = dict.fromkeys(cell.progress for cell in filled.cells if cell.progress)
    if progress:
        yield (
            f"° not all planned rounds: the last evaluation that there is ({join_few(progress)})."
        )

    computed = [cell for cell in filled.cells if cell.is_computed]
    for rule_text in dict.fromkeys(cell.computed.note for cell in computed):
        rows = [cell.row for cell in computed if cell.computed.note == rule_text]
        methods = dict.fromkeys(row.published_name or row.label for row in rows)
        yield f"= computed, not run: {rule_text} ({join_few(methods)})."

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


def _compared_setups(filled: FilledTable) -> Iterator[tuple[Group, Values, str]]:
    """Yield every shown group once, with its published set-up and the published note."""
    seen = set()
    for cell in filled.cells:
        for group in cell.shown_groups:
            if cell.published.source and group not in seen:
                seen.add(group)
                setup = filled.layout.setup_of(group.runs[0], cell.column)
                yield group, setup, cell.published.note


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
        f"{describe_seeds(seeds)}. Below: the published value, and own minus published, or ~ the "
        f"time of the missing runs by the rate of those here; {layout.about}. `own_last` of the "
        "CSV: by our rule, the mean over clients at the last evaluation (--select last)."
    )


# ---- Commands


def list_commands(missing_parts: Iterable[Part]) -> tuple[str, ...]:
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
