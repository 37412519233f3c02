"""Declare a paper's table: its rows and columns, which runs fill a cell, and with what."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas as pd

from fedpfl.ground.records import Record, Values
from fedpfl.papers import published
from fedpfl.report.grouping import Group
from fedpfl.report.names import DATASET_TITLES
from fedpfl.report.run import Run
from fedpfl.report.table import Table


class Selection(NamedTuple):
    """Select the accuracy and the evaluation that a cell shows.

    Attributes:
        accuracy: A column of rounds.csv.
        select: Which round, as in `accuracy_table`.
        every: The best is taken of each so many rounds.
        published: Whether it is the paper's own rule; other numbers are then counted by it too.
    """

    accuracy: str = "accuracy"
    select: str = "last"
    every: int = 1
    published: bool = False

    @property
    def by(self) -> str:
        """The column that the best evaluation is the best by."""
        return self.accuracy if self.published else "accuracy"


LAST = Selection()
PLAIN_SETUP: Record = {
    "adapter.name": "none",
    "privacy.name": "none",
    "system.deadline": "none",
    "system.dropout": 0.0,
    "system.stragglers": 0.0,
    "method.variant": "paper",
}
"""Values of all papers' runs: notes name runs that differ, and plain ones go before them."""

Measure = Callable[[Run, pd.Series, Selection], float]
"""Takes a run, its judged row of rounds.csv and the rule; returns a cell's number."""


def measure_accuracy(run: Run, row: pd.Series, rule: Selection) -> float:
    """Return the accuracy that the rule names."""
    return float(row.get(rule.accuracy, math.nan))


def measure_untrained(run: Run, row: pd.Series, rule: Selection) -> float:
    """Return the averaged model's accuracy, where other methods are judged right after training."""
    is_after_training = rule.accuracy.startswith("cohort_")
    # A cohort's accuracies are pooled, so this is too.
    column = "accuracy_pooled" if is_after_training else rule.accuracy
    return float(row.get(column, math.nan))


def measure_fine_tuned(run: Run, row: pd.Series, rule: Selection) -> float:
    """Return the accuracy after fine-tuning."""
    column = rule.accuracy.removeprefix("ft_")
    if column.startswith("cohort_"):
        column = "accuracy_pooled"  # of all clients, as fine-tuning is judged on these
    return float(row.get(f"ft_{column}", math.nan))


def has_config(run: Run, config: Values) -> bool:
    """Return True if a run has these values. An absent key counts as false.

    Args:
        run: Any run.
        config: Values by dotted key; a tuple for one of several.
    """
    for key, value in config.items():
        accepted_values = value if isinstance(value, tuple) else (value,)
        run_value = run.config_value(key)
        # Runs of before a switch existed did as it does when off.
        is_false = run_value is None and False in accepted_values
        if run_value not in accepted_values and not is_false:
            return False
    return True


@dataclass(frozen=True, eq=False)
class TableRow:
    """Declare a row: which runs fill it with what, beside which published number.

    Attributes:
        label: The row's label.
        method: The method of its runs.
        experiment: The experiment of its command; `{}` stands for the column's.
        fits: Whether a run may fill it, beside what `config` says.
        measure: What its cells show.
        config: Values that its runs must have and its command sets, perhaps by data set (empty:
            any other).
        implied_config: Values that its runs must have besides.
        shares: Further such values, of several kinds of runs that a cell mixes, each with its weight.
        beside: Returns the number beside a cell of a column, instead of published.csv's.
        overrides: The command's overrides, if not the method and `config`; perhaps by data set.
        published_name: The method's name in published.csv, by default the label.
        metric: The metric there, by default the table's.
        setting: The setting there, by default the column's.
        kind: How numbers are shown, as in `Column`.
        omission: Why it has no own value; "" if it has.
    """

    label: str
    method: str = ""
    experiment: str = "{}"
    fits: Callable[[Run], bool] = lambda run: True
    measure: Measure = measure_accuracy
    config: Values = field(default_factory=dict)
    implied_config: Values = field(default_factory=dict)
    shares: tuple[tuple[Values, int], ...] = (({}, 1),)
    beside: Callable[[TableColumn], published.Published | None] | None = None
    overrides: Values = field(default_factory=dict)
    published_name: str = ""
    metric: str = ""
    setting: str = ""
    kind: str = "percent"
    omission: str = ""


@dataclass(frozen=True, eq=False)
class TableColumn:
    """Declare a column: which data its runs are on.

    Attributes:
        dataset: Name in the configuration.
        setting: As published.
        config: Values that its runs must have.
        alphas: Of a Dirichlet partition; of several a cell shows the mean.
        experiment: Of the command.
        overrides: Of the command.
        setup: What else is published of its runs, by dotted key.
        faulty: Whether runs have the published MedMNIST normalisation.
        measure: What its cells show, instead of the row's.
        omission: Why it has no own value; "" if it has.
    """

    dataset: str
    setting: str
    config: Values = field(default_factory=dict)
    alphas: tuple[float | None, ...] = (None,)
    experiment: str = ""
    overrides: Mapping[str, str] = field(default_factory=dict)
    setup: Values = field(default_factory=dict)
    faulty: bool = False
    measure: Measure | None = None
    omission: str = ""

    @property
    def heading(self) -> tuple[str, str]:
        """The names of data set and setting."""
        title = DATASET_TITLES.get(self.dataset, self.dataset)
        return f"{title} as published" if self.faulty else title, self.setting


class Part(NamedTuple):
    """Name a part of a cell, which one kind of runs fills.

    Attributes:
        row: The cell's row.
        column: The cell's column.
        alpha: Of the Dirichlet partition, if the column has any.
        config: Values of the row's share.
        weight: Of the part in the cell's mean.
    """

    row: TableRow
    column: TableColumn
    alpha: float | None
    config: Values
    weight: int

    @property
    def overrides(self) -> dict[str, str]:
        """The overrides of its runs."""
        row, column = self.row, self.column
        # Overrides of a row, such as a `paper` group, name its method.
        values = row.overrides or {"method": row.method, **row.config, **self.config}
        overrides = {"experiment": row.experiment.format(column.experiment)}
        for key, value in choose_values(values, column.dataset).items():
            overrides[key] = str(value).lower() if isinstance(value, bool) else str(value)
        # After the row's: a column's data set decides.
        overrides |= column.overrides
        if self.alpha is not None:
            overrides["partition.alpha"] = f"{self.alpha:g}"
        return overrides

    def is_filled_by(self, run: Run) -> bool:
        """Return True if a run may fill it."""
        row, column = self.row, self.column
        if row.omission or column.omission:
            return False
        if (run.method_name, run.dataset_name) != (row.method, column.dataset):
            return False
        if run.dataset.endswith("as published") != column.faulty:
            return False
        if self.alpha not in (None, run.config_value("partition.alpha")):
            return False
        # Other devices take other hours, and not always reach the end.
        if run.config_value("system.profile") not in (None, "uniform"):
            return False
        row_config = choose_values(row.config, column.dataset)
        config = {**column.config, **row_config, **row.implied_config, **self.config}
        return has_config(run, config) and row.fits(run)


def list_parts(row: TableRow, column: TableColumn) -> list[Part]:
    """Return the parts of a cell: one for each alpha of its column and share of its row."""
    return [
        Part(row, column, alpha, config, weight)
        for alpha in column.alphas
        for config, weight in row.shares
    ]


@dataclass(frozen=True, eq=False)
class Layout:
    """Declare a table: its rows and columns.

    Attributes:
        title: The table's title.
        source: Of the published numbers.
        rows: From top to bottom.
        columns: From left to right.
        rule: The paper's own.
        about: Remark on the rule.
        setup: Of all published runs, by dotted key; perhaps by run.
        metric: Of the published numbers.
        note: More to say below the table.
        rounds: Of its runs, where columns do not say.
        seeds: How many its experiments run.
    """

    title: str
    source: str
    rows: tuple[TableRow, ...]
    columns: tuple[TableColumn, ...]
    rule: Selection
    about: str
    setup: Values | Callable[[Run], Values]
    metric: str = ""
    note: str = ""
    rounds: int = 0
    seeds: int = 1

    def published_key(self, row: TableRow, column: TableColumn) -> published.Key:
        """Return the key of a cell's published number."""
        metric = row.metric or self.metric
        method = row.published_name or row.label
        return self.source, metric, method, column.dataset, row.setting or column.setting

    def find_published(self, row: TableRow, column: TableColumn) -> published.Published | None:
        """Return the number beside a cell."""
        if row.beside:
            return row.beside(column)
        return published.lookup(self.published_key(row, column))

    def setup_of(self, run: Run, column: TableColumn) -> Values:
        """Return the published set-up of a run in a column."""
        shared = self.setup(run) if callable(self.setup) else self.setup
        return {**PLAIN_SETUP, **shared, **column.setup}

    def columns_of(self, datasets: Iterable[str]) -> tuple[TableColumn, ...]:
        """Return a column for each of the table's settings on each of other data sets."""
        columns: dict[tuple[str, str], TableColumn] = {}
        for name in datasets:
            for column in self.columns:
                overrides = {**column.overrides, "dataset": name}
                own_column = dataclasses.replace(column, dataset=name, overrides=overrides)
                columns.setdefault((name, column.setting), own_column)
        return tuple(columns.values())


def choose_values(values: Values, dataset: str) -> Record:
    """Return values of a row in a data set's columns."""
    return {
        key: value.get(dataset, value[""]) if isinstance(value, dict) else value
        for key, value in values.items()
    }


def closeness_to_paper(group: Group, setup: Values) -> tuple[Any, ...]:
    """Return a sort key: the larger, the nearer a configuration is to the table's."""
    run = group.runs[0]
    differences = published.setup_differences(run, setup)
    different_keys = [key for key, *_ in differences if key != "rounds"]
    return (
        # In order of weight: q decides more than all other differences together.
        "q" not in different_keys,
        -len(different_keys),
        run.config_value("partition.name") == "published",
        group.reported_runs[0].status == "finished",
        run.rounds_planned,
        max(used.rounds_done for used in group.reported_runs),
        len(group.reported_runs),
    )


class Listing(NamedTuple):
    """Declare a table of existing runs.

    Attributes:
        choose: Returns the groups that it shows.
        make: Returns the table of these.
    """

    choose: Callable[[Sequence[Group]], list[Group]]
    make: Callable[[Sequence[Group]], Table]
