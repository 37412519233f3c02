"""A table: what it holds, and how its numbers are written."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from fedpfl.report.text import clip_text, one_line

_STYLES = {
    "terminal": {"best": "{}*", "second": "{}+"},
    "markdown": {"best": "**{}**", "second": "<u>{}</u>"},
    "latex": {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}"},
    "html": {"best": "<b>{}</b>", "second": "<u>{}</u>"},
}


@dataclass(frozen=True)
class Column:
    """One column.

    kind: `text`, `long` (text that is never cut, below its row where there is no room), or as
    `number` writes it.
    group: a heading above several columns. spare: a narrow terminal leaves out the columns of the
    greatest first, those
    of 0 never. meaning: what a table with it says of its headings, parts with `; ` between them.
    """

    heading: str
    kind: str = "text"
    group: str = ""
    spare: int = 0
    meaning: str = ""

    @property
    def name(self) -> str:
        """What it is called outside its group: `before mean`."""
        return f"{self.group} {self.heading}".strip()

    @property
    def numeric(self) -> bool:
        """Whether it stands to the right and sorts by number."""
        return self.kind not in ("text", "long")


@dataclass
class Cell:
    """One cell: text, or a number with its sample standard deviation over seeds.

    kind: where it is not the column's. mark: `best` or `second`. flag: signs behind it. below: a
    second line. link:
    where a click in the page leads. state: a status that the page colours. order: what text is
    sorted by in the page.
    """

    value: str | float | None = None
    std: float = math.nan
    kind: str = ""
    mark: str = ""
    flag: str = ""
    below: str = ""
    link: str = ""
    state: str = ""
    order: float = math.nan

    def text(self, column: Column, pm: bool = False) -> str:
        """Return the cell as people read it: `96.89(0.03)`, with `pm` `96.89 ± 0.03`, `+0.12`,
        `1.31k`, or nothing.
        """
        kind = self.kind or column.kind
        if self.value is None or isinstance(self.value, str):
            return (
                one_line(self.value or "") if kind == "long" else clip_text(self.value or "", 160)
            )
        if not math.isfinite(self.value):
            return "-" if self.below else ""
        spread = format_number(kind, self.std, 2) if kind == "percent" or self.std > 0 else ""
        return (
            format_number(kind, self.value)
            + (" ± {}" if pm else "({})").format(spread) * bool(spread)
            + self.flag
        )


@dataclass(frozen=True)
class Table:
    """A table. rows: a cell per column. frame: the exact numbers, which are what CSV holds.

    by: how many of the first columns divide the rows into blocks. notes: what a reader must know
    besides caption, one
    line each. below: what second lines of cells are. commands: what fills empty cells. pm: whether
    deviations stand behind ± rather than in brackets.
    """

    title: str
    columns: tuple[Column, ...]
    rows: list[list[Cell]]
    frame: pd.DataFrame = field(default_factory=pd.DataFrame)
    caption: str = ""
    notes: tuple[str, ...] = ()
    by: int = 0
    below: str = ""
    commands: tuple[str, ...] = ()
    pm: bool = False

    @classmethod
    def of(
        cls, records: Sequence[Mapping[str, Any]], columns: Mapping[str, Column], **others: Any
    ) -> Table:
        """Make a table with a row per record and a column per key; a percentage shows its
        `<key>_seed_std`.
        """
        rows = [
            [
                Cell(
                    record[key],
                    record.get(f"{key}_seed_std", math.nan)
                    if column.kind == "percent"
                    else math.nan,
                )
                for key, column in columns.items()
            ]
            for record in records
        ]
        frame = others.pop("frame", None)
        if frame is None:
            frame = pd.DataFrame(records, columns=None if records else [*columns])
        return cls(others.pop("title", ""), tuple(columns.values()), rows, frame, **others)

    def texts(self, form: str, escape: Callable[[str], str]) -> tuple[list[int], list[list[str]]]:
        """Return the places of the columns in which anything stands, and every cell styled for a
        form of output.
        """
        styles = {"": "{}"} | _STYLES[form]
        rows = [
            [
                styles[cell.mark].format(escape(cell.text(column, self.pm)))
                for cell, column in zip(row, self.columns, strict=True)
            ]
            for row in self.rows
        ]
        return [
            at for at in range(len(self.columns)) if not rows or any(row[at] for row in rows)
        ], rows

    def blocks(self) -> Iterator[tuple[str, list[int]]]:
        """Yield title and places of the rows of each block."""
        keys = [", ".join(str(cell.value) for cell in row[: self.by]) for row in self.rows]
        for key, places in itertools.groupby(range(len(keys)), keys.__getitem__):
            yield key or self.title, list(places)
        if not keys:
            yield self.title, []

    def marks(self, form: str) -> str:
        """Return what marks mean, where there are any."""
        marked = any(cell.mark for row in self.rows for cell in row)
        words = "* best, + second" if form == "terminal" else "Bold: best; underlined: second"
        return (
            f"{words} of {'its block' if self.by else 'its column'}, finished runs first."
            if marked
            else ""
        )

    def meanings(self, places: Iterable[int]) -> str:
        """Return what the headings of these columns mean, each once."""
        told = dict.fromkeys(
            part for at in places for part in self.columns[at].meaning.split("; ") if part
        )
        first, *others = told or [""]
        return "; ".join((first[:1].upper() + first[1:], *others)) + "." if told else ""

    def prose(self, form: str, places: Iterable[int] | None = None) -> list[str]:
        """Return what stands below the table: caption, what headings and marks mean, and notes.

        places: of the columns that are shown, by default all that hold anything.
        """
        about = self.meanings(self.texts(form, str)[0] if places is None else places)
        first = " ".join(filter(None, (self.caption, about, self.marks(form))))
        return [line for line in (first, *self.notes) if line]

    def headings(self, places: Sequence[int]) -> list[tuple[str, int]]:
        """Return the groups of these columns, each with the number of columns that it spans."""
        groups = itertools.groupby(places, lambda at: self.columns[at].group or at)
        return [
            (group if isinstance(group, str) else "", len(list(members)))
            for group, members in groups
        ]


def format_number(kind: str, value: float, digits: int = 4) -> str:
    """Return a number as people read it; nothing for nan.

    kind: percent, difference (of percents), short (so many digits and a unit: `22.4k`), change
    (short, with a sign), whole, decimal, entries, exact, size (of bytes), age (of seconds), p, or
    number (three digits).
    """
    if not math.isfinite(value):
        return ""
    if kind == "difference":
        return f"{round(value, 2) + 0.0:+.2f}"  # no negative zero
    if kind == "change":
        return ("-" if value < 0 else "+" if value > 0 else "") + format_number(
            "short", abs(value), 3
        )
    if kind in ("short", "size"):
        value, digits = float(f"{value:.{digits}g}"), max(3, digits)  # 999.96 rounds to a thousand
        power = min(4, max(0, math.floor(math.log10(abs(value) or 1)) // 3))
        shown = f"{value / 1000**power:.{digits}g}" if power else f"{value:g}"
        unit = ("", "k", "M", "G", "T")[power]
        return shown + (unit if kind == "short" else f" {unit}B")
    if kind == "age":
        seconds = max(0, int(value))  # clocks of file servers run ahead
        for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
            if seconds >= size:
                return f"{seconds // size} {unit}"
        return f"{seconds} s"
    if kind == "p":
        return "<0.001" if value < 0.001 else f"{value:.3f}"
    forms = {
        "percent": "{:.2f}",
        "whole": "{:.0f}",
        "decimal": "{:.2f}",
        "entries": "{:,.0f}",
        "exact": "{:.10g}",
    }
    return forms.get(kind, "{:.3g}" if abs(value) < 1000 else "{:,.0f}").format(value)


def mark_best(cells: Sequence[Cell], finished: Sequence[bool]) -> None:
    """Mark the best and the second of cells, as far as the digits shown tell them apart.

    Unfinished runs compete only where there are no finished ones; one number is no best, and after
    two there is no second.
    """
    known = [
        (round(cell.value, 2), whole, cell)
        for cell, whole in zip(cells, finished, strict=True)
        if isinstance(cell.value, float) and not math.isnan(cell.value)
    ]
    known = [one for one in known if one[1]] or known
    values = sorted((value for value, *_ in known), reverse=True)
    for value, _, cell in known if len(known) > 1 else ():
        if value == values[0]:
            cell.mark = "best"
        elif value == values[1]:
            cell.mark = "second"


def seed_statistics(key: str, values: Sequence[float]) -> dict[str, float]:
    """Return what a record holds of a number over seeds: its mean, and the deviation under
    `<key>_seed_std`.
    """
    return dict(zip((key, f"{key}_seed_std"), mean_and_std(values), strict=True))


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and sample standard deviation; nan where a seed lacks the value, and the
    deviation of one seed.
    """
    count = len(values)
    mean = math.fsum(values) / count if count else math.nan
    spread = (
        math.fsum((value - mean) ** 2 for value in values) / (count - 1) if count > 1 else math.nan
    )
    return mean, math.sqrt(spread)
