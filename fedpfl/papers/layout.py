"""What a paper's table is: its lines and columns, and which runs fill a cell with what, beside
which number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas as pd

from fedpfl.papers import published
from fedpfl.report.grouping import Group
from fedpfl.report.names import DATASETS
from fedpfl.report.run import Run
from fedpfl.report.table import Table


class Selection(NamedTuple):
    """Which accuracy of which evaluation a cell shows: a column of rounds.csv, and the round as in
    `accuracy_table`.

    published: it is the paper's own, by which other numbers are counted too.
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
PLAIN = {"adapter.name": "none", "privacy.name": "none", "system.deadline": "none"} | dict.fromkeys(
    ("system.dropout", "system.stragglers"), 0.0
)
"""What no paper's runs have: notes tell of runs that do, and others go before them."""
Measure = Callable[[Run, pd.Series, Selection], float]
"""What a cell shows of a run and its judged row."""


def accuracy(run: Run, row: pd.Series, rule: Selection) -> float:
    """Return the accuracy that the rule names."""
    return float(row.get(rule.accuracy, math.nan))


def untrained(run: Run, row: pd.Series, rule: Selection) -> float:
    """Return the averaged model's accuracy, where others are judged right after training."""
    return float(
        row.get("accuracy" if rule.accuracy.startswith("cohort_") else rule.accuracy, math.nan)
    )


def tuned(run: Run, row: pd.Series, rule: Selection) -> float:
    """Return the accuracy after fine-tuning."""
    if rule.accuracy.startswith("cohort_"):  # fine-tuning is judged on all clients
        return float(row.get("ft_accuracy", math.nan))
    return float(
        row.get(
            rule.accuracy if rule.accuracy.startswith("ft_") else f"ft_{rule.accuracy}", math.nan
        )
    )


def has(run: Run, wanted: Mapping[str, Any]) -> bool:
    """Return whether a run has these values of its configuration, one of several; what it does not
    have is false.
    """
    found = (
        (run.get(key), value if isinstance(value, tuple) else (value,))
        for key, value in wanted.items()
    )
    return all(own in values or (own is None and False in values) for own, values in found)


@dataclass(frozen=True, eq=False)
class Line:
    """One row of a table: which runs fill it, with what, beside which published number, and by
    which command.

    experiment: `{}` stands for the place's. where: values that its runs must have and its command
    says, perhaps by data set (empty: others); usual: that they must have besides. words: the
    command's, if not method and `where`.
    known_as, metric, setting: under which the number is published, by default the label, the
    table's and the place's.
    untold: why it has no own value.
    """

    label: str
    method: str = ""
    experiment: str = "{}"
    fits: Callable[[Run], bool] = lambda run: True
    measure: Measure = accuracy
    where: Mapping[str, Any] = field(default_factory=dict)
    usual: Mapping[str, Any] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    known_as: str = ""
    metric: str = ""
    setting: str = ""
    kind: str = "percent"
    untold: str = ""


@dataclass(frozen=True, eq=False)
class Place:
    """One column of a table: what its runs are on.

    setting: as published. where: values that its runs must have. alphas: of a Dirichlet partition;
    of several a cell
    shows the mean. experiment, words: of the command. setup: what else is published of them.
    faulty: with the published
    MedMNIST normalisation. measure: instead of the line's. untold: why there is no own value.
    """

    dataset: str
    setting: str
    where: Mapping[str, Any] = field(default_factory=dict)
    alphas: tuple[float | None, ...] = (None,)
    experiment: str = ""
    words: Mapping[str, str] = field(default_factory=dict)
    setup: Mapping[str, Any] = field(default_factory=dict)
    faulty: bool = False
    measure: Measure | None = None
    untold: str = ""

    @property
    def heading(self) -> tuple[str, str]:
        """The names of data set and setting."""
        return DATASETS.get(self.dataset, self.dataset) + (
            " as published" if self.faulty else ""
        ), self.setting


@dataclass(frozen=True, eq=False)
class Layout:
    """A table: its lines and columns.

    source: of the published numbers. rule, about: the paper's own, and what is known of it. setup:
    what the published
    runs share, perhaps by run. note: more to say below it. swept: its experiments run exactly what
    the table shows.
    """

    title: str
    source: str
    lines: tuple[Line, ...]
    places: tuple[Place, ...]
    rule: Selection
    about: str
    setup: Mapping[str, Any] | Callable[[Run], Mapping[str, Any]]
    metric: str = ""
    note: str = ""
    swept: bool = False

    def key(self, i: int, j: int) -> published.Key:
        """Return what cell's published number goes by."""
        line, place = self.lines[i], self.places[j]
        metric, setting = line.metric or self.metric, line.setting or place.setting
        return self.source, metric, line.known_as or line.label, place.dataset, setting

    def where(self, i: int, j: int) -> dict[str, Any]:
        """Return what a line's runs must have in a column, and its command says."""
        own, dataset = self.lines[i].where, self.places[j].dataset
        return {key: v.get(dataset, v[""]) if isinstance(v, dict) else v for key, v in own.items()}

    def words(self, i: int, j: int, alpha: float | None) -> dict[str, str]:
        """Return the overrides that run what a cell shows at an alpha."""
        line, place = self.lines[i], self.places[j]
        told = line.words or {"method": line.method} | {
            key: spelt(value) for key, value in self.where(i, j).items()
        }
        more = {} if alpha is None else {"partition.alpha": f"{alpha:g}"}
        return {
            "experiment": line.experiment.format(place.experiment),
            **told,
            **place.words,
            **more,
        }

    def setup_of(self, run: Run, j: int) -> Mapping[str, Any]:
        """Return the published set-up of a run in a column."""
        shared = self.setup(run) if callable(self.setup) else self.setup
        return {**PLAIN, **shared, **self.places[j].setup}

    def fits(self, run: Run, i: int, j: int, alpha: float | None) -> bool:
        """Return whether a run may fill a cell, or its part at an alpha."""
        line, place = self.lines[i], self.places[j]
        if (
            line.untold
            or place.untold
            or (run.method_name, run.dataset_name) != (line.method, place.dataset)
        ):
            return False
        if run.dataset.endswith("as published") != place.faulty or alpha not in (
            None,
            run.get("partition.alpha"),
        ):
            return False
        if run.get("system.profile") not in (
            None,
            "uniform",
        ):  # takes other hours, and is not always reached
            return False
        return has(run, {**place.where, **self.where(i, j), **line.usual}) and line.fits(run)

    def on(self, datasets: Sequence[str]) -> Layout:
        """Return the table with columns for these data sets: the paper's own, or else each of its
        settings.
        """
        places = []
        for name in datasets:
            own = [place for place in self.places if place.dataset == name]
            other = {
                place.setting: dataclasses.replace(place, dataset=name)
                for place in reversed(self.places)
            }
            places += own or [
                dataclasses.replace(
                    place, words={"dataset": name, **place.words} | {"dataset": name}
                )
                for place in reversed(other.values())
            ]
        return dataclasses.replace(self, places=tuple(places))


def spelt(value: Any) -> str:
    """Return a value as the command line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def titled(known_as: str, metric: str) -> dict[str, Any]:
    """Return what lines share whose numbers are no accuracies, several to a method."""
    return {"known_as": known_as, "metric": metric, "kind": "decimal"}


def rank(group: Group, setup: Mapping[str, Any]) -> tuple[Any, ...]:
    """Larger is nearer to what the table means."""
    run = group.runs[0]
    apart = [key for key, *_ in published.setup_differences(run, setup) if key != "rounds"]
    return (
        "q" not in apart,
        run.get("method.variant") != "as_published",
        -len(apart),
        run.get("partition.name") == "published",
        group.used[0].status == "finished",
        run.planned,
        max(used.reached for used in group.used),
        len(group.used),
    )


class Listing(NamedTuple):
    """A table of the runs that there are. choose: which of them. make: the table of those."""

    choose: Callable[[Sequence[Group]], list[Group]]
    make: Callable[[Sequence[Group], Selection], Table]
