"""Fill a paper's table from runs: `python -m fedpfl.report paper fedobp/table3 fedselect/table1`.

Every cell shows the own value above the published one and their difference; missing cells
are listed with the commands that fill them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from fedpfl.papers import published
from fedpfl.papers.layout import (
    LAST,
    Layout,
    Measure,
    Selection,
    closeness_to_paper,
    measure_fine_tuned,
)
from fedpfl.papers.registry import TABLES, paper_datasets
from fedpfl.report.grouping import Group, find_deviations
from fedpfl.report.table import Cell, Column, Table, format_number, mark_best, mean_and_std
from fedpfl.report.tables import describe_seeds, empty_cell_notes, judged_rows, selection_note
from fedpfl.report.text import join_few

CellIndex = tuple[int, int]
"""Row and column."""
CellPart = tuple[int, int, float | None]
"""Row, column and alpha: a cell shows the mean of its parts."""
SeedValues = dict[int, float]
"""A number by seed."""

DIFFERENCE_KINDS = {"percent": "difference", "decimal": "difference", "entries": "change"}
"""How own minus published is shown, by the kind of number."""
SIGNIFICANCE = 0.05
ACCURACY_TEXTS = {
    "accuracy": "mean over clients",
    "accuracy_pooled": "pooled over all clients' test samples",
    "accuracy_worst10": "mean over the worst decile of clients",
    "cohort_after": "right after local training, pooled over the round's clients",
}


@dataclass
class FilledCells:
    """Cells of a layout, filled from runs.

    Attributes:
        layout: The table.
        rule: The accuracy and evaluation that are shown.
        part_groups: The group that fills each part.
        part_values: Numbers of parts.
        cell_values: Numbers of cells: means over their parts.
        unfinished: How far the runs of a cell are, where they are not whole.
        ambiguous_titles: Groups that are one of several that fit.
    """

    layout: Layout
    rule: Selection
    part_groups: dict[CellPart, Group] = field(default_factory=dict)
    part_values: dict[CellPart, SeedValues] = field(default_factory=dict)
    cell_values: dict[CellIndex, SeedValues] = field(default_factory=dict)
    unfinished: dict[CellIndex, str] = field(default_factory=dict)
    ambiguous_titles: dict[str, None] = field(default_factory=dict)

    @property
    def cell_indices(self) -> list[CellIndex]:
        """All cells, row by row."""
        columns = range(len(self.layout.columns))
        return [(i, j) for i in range(len(self.layout.rows)) for j in columns]

    @property
    def shown_groups(self) -> dict[CellPart, Group]:
        """The groups of the cells that show a number."""
        return {
            part: group for part, group in self.part_groups.items() if self.cell_values[part[:2]]
        }

    @property
    def parts_without_number(self) -> set[CellPart]:
        """The parts with runs that hold no number where they are judged."""
        return {part for part, group in self.part_groups.items() if self.empty_notes([group])}

    def empty_notes(self, groups: Sequence[Group]) -> tuple[str, ...]:
        """Return why groups hold no number where they are judged; nothing if they do."""
        return tuple(empty_cell_notes(groups, self.rule.select, self.rule.every, self.rule.by))

    def missing_parts(self) -> Iterator[CellPart]:
        """Yield the parts that runs would fill."""
        parts_without_number = self.parts_without_number
        for i, j in self.cell_indices:
            column = self.layout.columns[j]
            is_omitted = self.layout.rows[i].omission or column.omission
            if is_omitted or self.cell_values[i, j]:
                continue
            for alpha in column.alphas:
                part = (i, j, alpha)
                if not self.part_values.get(part) and part not in parts_without_number:
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
    whole_layout = TABLES[name]
    assert isinstance(whole_layout, Layout)
    run_datasets = {group.runs[0].dataset_name: None for group in groups}
    # Runs on none of the papers' data sets: the table has their columns, without published numbers.
    has_other_datasets = run_datasets and not run_datasets.keys() & paper_datasets()
    layout = whole_layout
    if only or has_other_datasets:
        layout = whole_layout.with_datasets(only or tuple(run_datasets))

    # ---- What fills them
    filled = _fill_cells(layout, groups, rule or layout.rule)
    notes = [*_notes(filled)]
    different_cells: set[CellIndex] = set()
    if test:
        different_cells, test_note = _compare_with_last_row(filled, test)
        notes.append(test_note)
    cells = {index: _make_cell(filled, index, different_cells) for index in filled.cell_indices}
    _mark_best(filled, cells)

    # ---- The table
    columns = [Column("")]
    for column in layout.columns:
        dataset_title, setting = column.heading
        columns.append(Column(setting, "percent", dataset_title))
    rows = [
        [Cell(row.label), *(cells[i, j] for j in range(len(layout.columns)))]
        for i, row in enumerate(layout.rows)
    ]
    records = [_record(name, filled, index, cells[index]) for index in filled.cell_indices]
    return Table(
        "",
        tuple(columns),
        rows,
        pd.DataFrame(records),
        _caption(filled),
        tuple(notes),
        below="published",
        commands=_commands_that_fill(layout, whole_layout, [*filled.missing_parts()]),
    )


# ---- Which runs fill which cells


def _fill_cells(layout: Layout, groups: Sequence[Group], rule: Selection) -> FilledCells:
    """Fill each cell from the fitting runs that are nearest to the paper's."""
    filled = FilledCells(layout, rule)
    for i, j in filled.cell_indices:
        column = layout.columns[j]
        measure = column.measure or layout.rows[i].measure
        for alpha in column.alphas:
            fitting = [group for group in groups if layout.fits(group.runs[0], i, j, alpha)]
            if not fitting:
                continue
            nearest = max(
                fitting,
                key=lambda group: closeness_to_paper(group, layout.setup_of(group.runs[0], j)),
            )
            filled.part_groups[i, j, alpha] = nearest
            filled.part_values[i, j, alpha] = _measure_group(nearest, measure, rule)
            if len(fitting) > 1:
                filled.ambiguous_titles[nearest.title] = None
        values_of_parts = [filled.part_values.get((i, j, alpha), {}) for alpha in column.alphas]
        filled.cell_values[i, j] = _mean_over_parts(values_of_parts)
    for part, group in filled.shown_groups.items():
        if not group.is_complete:
            filled.unfinished[part[:2]] = group.status
    return filled


def _measure_group(group: Group, measure: Measure, rule: Selection) -> SeedValues:
    """Return a cell's values of a group, by seed."""
    rows = judged_rows(group, rule.select, rule.every, rule.by)
    values = {run.seed: measure(run, row, rule) for run, row in rows.items()}
    # Where a seed lacks the value, a mean without it would not be the group's.
    if any(map(math.isnan, values.values())):
        return {}
    return values


def _mean_over_parts(parts: Sequence[SeedValues]) -> SeedValues:
    """Return the mean over the parts, by the seeds that all have."""
    common_seeds = [seed for seed in parts[0] if all(seed in part for part in parts)]
    return {seed: math.fsum(part[seed] for part in parts) / len(parts) for seed in common_seeds}


# ---- Cells


def _published_value(filled: FilledCells, index: CellIndex) -> tuple[float, float]:
    """Return the published number of a cell and its deviation, nan without one."""
    i, j = index
    entry = published.lookup(filled.layout.published_key(i, j))
    return (entry.value, entry.std) if entry else (math.nan, math.nan)


def _make_cell(filled: FilledCells, index: CellIndex, different_cells: set[CellIndex]) -> Cell:
    """Return a cell: the own value, and below it the published one and the difference."""
    kind = filled.layout.rows[index[0]].kind
    published_value, _ = _published_value(filled, index)
    mean, deviation = mean_and_std(list(filled.cell_values[index].values()))
    flag = ""
    if index in filled.unfinished:
        flag += "°"
    if index in different_cells:
        flag += "†"
    difference = ""
    # A hyperparameter has no better or worse; own minus published would say nothing.
    if kind != "exact":
        difference = format_number(DIFFERENCE_KINDS[kind], mean - published_value)
    below = f"{format_number(kind, published_value)} {difference}".strip()
    return Cell(
        mean,
        deviation if kind == "percent" else math.nan,
        kind,
        flag=flag,
        below=below,
    )


def _record(name: str, filled: FilledCells, index: CellIndex, cell: Cell) -> dict[str, Any]:
    """Return a cell as a row of the table's CSV."""
    i, j = index
    dataset_title, setting = filled.layout.columns[j].heading
    published_value, published_deviation = _published_value(filled, index)
    values = filled.cell_values[index]
    mean, deviation = mean_and_std(list(values.values()))
    return {
        "table": name,
        "row": filled.layout.rows[i].label,
        "dataset": dataset_title,
        "setting": setting,
        "own": mean,
        "own_seed_std": deviation,
        "seeds": " ".join(map(str, sorted(values))),
        "unfinished": filled.unfinished.get(index, ""),
        "published": published_value,
        "published_std": published_deviation,
        "difference": mean - published_value,
        "rank": {"best": 1, "second": 2}.get(cell.mark),
    }


def _mark_best(filled: FilledCells, cells: Mapping[CellIndex, Cell]) -> None:
    """Mark the best and the second of each column, among accuracies."""
    accuracy_rows = [i for i, row in enumerate(filled.layout.rows) if row.kind == "percent"]
    for j in range(len(filled.layout.columns)):
        are_finished = [_is_finished(filled, (i, j)) for i in accuracy_rows]
        mark_best([cells[i, j] for i in accuracy_rows], are_finished)


def _is_finished(filled: FilledCells, index: CellIndex) -> bool:
    """Return True if a cell has groups, and all of these are finished."""
    groups = [group for part, group in filled.shown_groups.items() if part[:2] == index]
    return bool(groups) and all(group.reported_runs[0].status == "finished" for group in groups)


# ---- Notes and caption


def _notes(filled: FilledCells) -> Iterator[str]:
    """Yield the notes below the caption."""
    layout = filled.layout
    rule = filled.rule

    # ---- Step 1: what differs from the paper, or within a column.
    yield from published.departures(_compared_setups(filled))
    yield from _unequal_column_notes(filled)
    if any(row.kind == "percent" for row in layout.rows):
        yield from selection_note(rule.select)

    # ---- Step 2: which runs were shown, and why some are not.
    empty_parts = filled.parts_without_number
    yield from filled.empty_notes(_distinct(filled.part_groups[part] for part in empty_parts))
    if filled.ambiguous_titles:
        yield (
            f"Several configurations fit {join_few(filled.ambiguous_titles)}; shown is the one"
            " nearest to the paper's, then the longest."
        )
    if filled.unfinished:
        progress = join_few(dict.fromkeys(filled.unfinished.values()))
        yield f"° not all planned rounds: the last evaluation that there is ({progress})."

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


def _compared_setups(filled: FilledCells) -> list[tuple[Group, Mapping[str, Any], str]]:
    """Return every shown group once, with its published set-up and the published note."""
    setup_by_group: dict[int, tuple[Group, Mapping[str, Any], str]] = {}
    for (i, j, _), group in filled.shown_groups.items():
        entry = published.lookup(filled.layout.published_key(i, j))
        if entry:
            setup = filled.layout.setup_of(group.runs[0], j)
            setup_by_group.setdefault(
                id(group),
                (group, setup, entry.note),
            )
    return list(setup_by_group.values())


def _unequal_column_notes(filled: FilledCells) -> list[str]:
    """Return a note on runs that differ from their column in more than the method."""
    layout = filled.layout
    # Rows that set other keys differ in these on purpose.
    comparable_rows = [
        i
        for i, row in enumerate(layout.rows)
        if all(key.startswith("method.") for key in row.config)
    ]
    descriptions: dict[str, None] = {}
    for j, column in enumerate(layout.columns):
        for alpha in column.alphas:
            parts = [(i, j, alpha) for i in comparable_rows if (i, j, alpha) in filled.part_groups]
            groups = _distinct(filled.part_groups[part] for part in parts)
            for group, deviations in zip(groups, find_deviations(groups), strict=True):
                if deviations:
                    heading = ", ".join(column.heading)
                    description = (
                        f"{group.runs[0].method_title} on {heading} ({', '.join(deviations)})"
                    )
                    descriptions[description] = None
    if not descriptions:
        return []
    return [f"Not alike in what a column should share: {join_few(descriptions)}."]


def _compare_with_last_row(filled: FilledCells, test: str) -> tuple[set[CellIndex], str]:
    """Compare each row with the last one, paired over seeds.

    Returns:
        The cells that differ, and a note on the test.
    """
    from fedpfl.report.compare import MIN_PAIRS, paired_test

    # ---- Test each cell that shares two seeds or more
    last_row = len(filled.layout.rows) - 1
    seed_counts: set[int] = set()
    different_cells: set[CellIndex] = set()
    for (i, j), values in filled.cell_values.items():
        last_values = filled.cell_values[last_row, j]
        seeds = sorted(values.keys() & last_values.keys())
        if i == last_row or len(seeds) < 2:
            continue
        seed_counts.add(len(seeds))
        differences = [values[seed] - last_values[seed] for seed in seeds]
        if paired_test(differences, test) < SIGNIFICANCE:
            different_cells.add((i, j))

    # ---- Say how it went
    label = filled.layout.rows[last_row].label
    if not seed_counts:
        return (
            different_cells,
            f"No paired test against {label}: no two of its seeds were run with another method.",
        )
    test_title = {"t": "t test", "wilcoxon": "Wilcoxon signed-rank test"}[test]
    fewest = min(seed_counts)
    most = max(seed_counts)
    seeds_text = " to ".join(map(str, sorted({fewest, most})))
    warning = ""
    if fewest < MIN_PAIRS[test]:
        warning = f" (never met with fewer than {MIN_PAIRS[test]})"
    return (
        different_cells,
        (
            f"† differs from {label}: paired {test_title} over {seeds_text} seeds, "
            f"p < {SIGNIFICANCE}{warning}, not corrected for many."
        ),
    )


def _caption(filled: FilledCells) -> str:
    """Return the caption."""
    layout = filled.layout
    rule = filled.rule
    if layout.rows[0].kind != "percent":
        about = f" {layout.about[0].upper()}{layout.about[1:]}." if layout.about else ""
        return f"{layout.title}: own, below it the published number and the difference.{about}"
    accuracy = ACCURACY_TEXTS.get(rule.accuracy, rule.accuracy)
    has_fine_tuned_row = any(row.measure is measure_fine_tuned for row in layout.rows)
    if has_fine_tuned_row and not rule.accuracy.startswith("cohort_"):
        accuracy = f"{accuracy}, before fine-tuning but for FedAvg+FT,"
    evaluation = "the last evaluation of each run"
    if rule.select == "best-checkpoint":
        evaluation = f"the best evaluation of each run (every {rule.every})"
    elif rule.select == "validation":
        evaluation = "each run's first evaluation of the best validation accuracy"
    return (
        f"{layout.title}. Test accuracy in percent, {accuracy} at {evaluation}; "
        f"{describe_seeds(_seeds_by_row(filled))}. Below: the published value, and own minus "
        f"published; {layout.about}."
    )


def _seeds_by_row(filled: FilledCells) -> dict[str, list[int]]:
    """Return the seeds of each row, of each of its cells where these differ."""
    layout = filled.layout
    seeds_by_label: dict[str, list[int]] = {}
    for i, row in enumerate(layout.rows):
        seeds_by_column = {
            j: sorted(filled.cell_values[i, j])
            for j in range(len(layout.columns))
            if filled.cell_values[i, j]
        }
        has_same_seeds = len({tuple(seeds) for seeds in seeds_by_column.values()}) == 1
        for j, seeds in seeds_by_column.items():
            label = row.label
            if not has_same_seeds:
                label = f"{row.label} on {', '.join(layout.columns[j].heading)}"
            seeds_by_label[label] = seeds
    return seeds_by_label


# ---- Commands


def _commands_that_fill(
    layout: Layout, whole_layout: Layout, missing_parts: Sequence[CellPart]
) -> tuple[str, ...]:
    """Return the commands that fill the missing parts, as few as say it.

    Args:
        layout: The table.
        whole_layout: The same with all columns.
        missing_parts: Of `layout`.
    """
    # ---- Jobs with the same keys can share a command
    swept_values = _swept_values(whole_layout)
    jobs_by_keys: dict[tuple[str, ...], dict[tuple[str, ...], None]] = {}
    for i, j, alpha in missing_parts:
        overrides = layout.overrides_of(i, j, alpha)
        jobs_by_keys.setdefault(tuple(overrides), {})[tuple(overrides.values())] = None

    # ---- Jobs that have all other keys in common become one, key by key
    commands = []
    for keys, jobs in jobs_by_keys.items():
        frame = pd.DataFrame([*jobs], columns=keys)
        for key in keys[1:]:
            # Key by key is not always the fewest commands, but none runs a job twice.
            other_keys = [name for name in frame if name != key]
            frame = frame.groupby(other_keys, sort=False)[key].agg(tuple).reset_index()
        for experiment, *values_of_keys in frame[[*keys]].values:
            command = [f"python -m fedpfl.train experiment={experiment}"]
            for key, values in zip(keys[1:], values_of_keys, strict=True):
                # The experiment's own sweep need not be typed.
                if {*values} != swept_values.get((experiment, key)):
                    command.append(f"{key}={','.join(values)}")
            commands.append(" ".join(command))
    return tuple(commands)


def _swept_values(layout: Layout) -> dict[tuple[str, str], set[str]]:
    """Return the values that an experiment sweeps over by itself, by experiment and key."""
    values_by_key: dict[tuple[str, str], set[str]] = {}
    if not layout.is_whole_sweep:
        return values_by_key
    for i in range(len(layout.rows)):
        for j, column in enumerate(layout.columns):
            for alpha in column.alphas:
                overrides = layout.overrides_of(i, j, alpha)
                for key, value in overrides.items():
                    values_by_key.setdefault((overrides["experiment"], key), set()).add(value)
    return values_by_key
