"""A table: its cells and columns, and how its numbers are written."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from fedpfl.ground.records import Record, Values
from fedpfl.report.text import clip_text, one_line

_MARK_STYLES = {
    "terminal": {"best": "{}*", "second": "{}+"},
    "markdown": {"best": "**{}**", "second": "<u>{}</u>"},
    "latex": {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}"},
    "html": {"best": "<b>{}</b>", "second": "<u>{}</u>"},
}


@dataclass(frozen=True)
class Column:
    """Describe one column.

    Attributes:
        heading: its title.
        kind: `text`, `long` (text that is never cut, below its row where there is no room), or a
            kind of number as in `format_number`.
        group: a heading above several columns.
        spare: a narrow terminal leaves out the columns of the greatest first, those of 0 never.
        meaning: an explanation below the table, its parts separated by `; `.
    """

    heading: str
    kind: str = "text"
    group: str = ""
    spare: int = 0
    meaning: str = ""

    @property
    def name(self) -> str:
        """Return the heading with its group, such as `before mean`."""
        return f"{self.group} {self.heading}".strip()

    @property
    def numeric(self) -> bool:
        """True if it is aligned to the right and sorted by number."""
        return self.kind not in ("text", "long")


@dataclass
class Cell:
    """Hold text, or a number with its sample standard deviation over seeds.

    Attributes:
        value: the text or the number.
        std: the standard deviation, nan for none.
        kind: the kind of number, where it is not the column's.
        mark: `best` or `second`.
        flag: signs behind the number.
        below: a second line.
        link: the target of a click in the page.
        is_interval: whether `std` is the half-width of a confidence interval.
    """

    value: str | float | None = None
    std: float = math.nan
    kind: str = ""
    mark: str = ""
    flag: str = ""
    below: str = ""
    link: str = ""
    is_interval: bool = False

    def text(self, column: Column, pm: bool = False) -> str:
        """Write the cell for people: `96.89(0.03)`, `+0.12`, `1.31k`, or nothing.

        Args:
            column: the column it stands in.
            pm: whether to write the deviation as `96.89 ± 0.03`.
        """
        kind = self.kind or column.kind
        if self.value is None or isinstance(self.value, str):
            text = self.value or ""
            return one_line(text) if kind == "long" else clip_text(text, 160)
        if not math.isfinite(self.value):
            return "-" if self.below else ""
        text = format_number(kind, self.value)
        # A deviation of 0 is worth telling of a score, not of a count.
        if self.std > 0 or (kind == "percent" and self.std == 0):
            deviation = format_number(kind, self.std, 2)
            if self.is_interval:
                text += f" [±{deviation}]" if pm else f"[{deviation}]"
            else:
                text += f" ± {deviation}" if pm else f"({deviation})"
        return text + self.flag


@dataclass(frozen=True)
class Table:
    """Hold a table that can be rendered in any format.

    Attributes:
        title: its title.
        columns: its columns.
        rows: a cell per column.
        frame: the exact numbers, for CSV.
        caption: a description of the numbers.
        notes: lines for the reader besides the caption.
        by: how many of the first columns divide the rows into blocks.
        below: the meaning of the second lines of cells.
        commands: commands that fill empty cells.
        pm: whether deviations stand behind ± rather than in brackets.
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
        cls,
        records: Sequence[Values],
        columns: Mapping[str, Column],
        *,
        title: str = "",
        frame: pd.DataFrame | None = None,
        **fields: Any,
    ) -> Table:
        """Make a table with a row per record and a column per key.

        A number shows its `<key>_seed_ci95`, or else a score its `<key>_seed_std`.

        Args:
            records: values by key.
            columns: columns by key.
            title: the table's title.
            frame: the exact numbers; by default the records.
            fields: further fields of the table.
        """
        rows = []
        for record in records:
            cells = []
            for key, column in columns.items():
                cell = Cell(record[key])
                half_width = record.get(f"{key}_seed_ci95")
                cell.is_interval = half_width is not None
                if half_width is not None and column.numeric:
                    cell.std = half_width
                elif column.kind in ("percent", "score"):
                    cell.std = record.get(f"{key}_seed_std", math.nan)
                cells.append(cell)
            rows.append(cells)
        if frame is None:
            frame = pd.DataFrame(records, columns=None if records else [*columns])
        return cls(title, tuple(columns.values()), rows, frame, **fields)

    @property
    def record(self) -> Record:
        """Return the table for programs: its texts, and its exact numbers by column."""
        names = ("title", "caption", "notes", "commands")
        texts = {name: getattr(self, name) for name in names}
        return {**texts, "rows": self.frame.to_dict("records")}

    def texts(self, form: str, escape: Callable[[str], str]) -> tuple[list[int], list[list[str]]]:
        """Return the indices of columns that are not empty, and the text of all cells.

        Args:
            form: the format; its styles mark the best cells.
            escape: makes text harmless in that format.
        """
        styles = {"": "{}"} | _MARK_STYLES[form]
        rows = []
        for cells in self.rows:
            texts = []
            for cell, column in zip(cells, self.columns, strict=True):
                texts.append(styles[cell.mark].format(escape(cell.text(column, self.pm))))
            rows.append(texts)
        every_index = range(len(self.columns))
        return [index for index in every_index if not rows or any(row[index] for row in rows)], rows

    def blocks(self) -> Iterator[tuple[str, list[int]]]:
        """Yield the title and the row indices of each block."""
        keys = [", ".join(str(cell.value) for cell in row[: self.by]) for row in self.rows]
        for key, row_indices in itertools.groupby(range(len(keys)), keys.__getitem__):
            yield key or self.title, list(row_indices)
        if not keys:
            yield self.title, []

    def marks(self, form: str) -> str:
        """Explain the marks of the best cells, if there are any."""
        if not any(cell.mark for row in self.rows for cell in row):
            return ""
        signs = "* best, + second" if form == "terminal" else "Bold: best; underlined: second"
        return f"{signs} of {'its block' if self.by else 'its column'}, finished runs first."

    def meanings(self, column_indices: Iterable[int]) -> str:
        """Explain the headings of these columns, each once."""
        meanings = [self.columns[index].meaning for index in column_indices]
        parts = dict.fromkeys(part for meaning in meanings for part in meaning.split("; ") if part)
        if not parts:
            return ""
        text = "; ".join(parts)
        return text[:1].upper() + text[1:] + "."

    def prose(self, form: str, column_indices: Iterable[int] | None = None) -> list[str]:
        """Return the lines below the table: caption, meanings and notes.

        Args:
            form: the format of the table.
            column_indices: the columns that are shown, by default all that hold anything.
        """
        if column_indices is None:
            column_indices = self.texts(form, str)[0]
        parts = (self.caption, self.meanings(column_indices), self.marks(form))
        description = " ".join(filter(None, parts))
        return [line for line in (description, *self.notes) if line]

    def headings(self, column_indices: Sequence[int]) -> list[tuple[str, int]]:
        """Return the group headings of these columns, each with its number of columns."""
        headings = []
        groups = itertools.groupby(column_indices, lambda index: self.columns[index].group or index)
        for group, members in groups:
            headings.append((group if isinstance(group, str) else "", len(list(members))))
        return headings


_NUMBER_FORMATS = {
    "percent": "{:.2f}",
    "whole": "{:.0f}",
    "decimal": "{:.2f}",
    "entries": "{:,.0f}",
    "exact": "{:.10g}",
}


def format_number(kind: str, value: float, digits: int = 4) -> str:
    """Write a number for people; nothing for nan.

    Args:
        kind: percent, score (of another unit), difference (of percents), short (so many digits and
            a unit: `22.4k`; so are scores), change (short, with a sign), whole, decimal, entries,
            exact, age (of seconds), p, or number (three digits).
        value: the number.
        digits: of `short`.
    """
    if not math.isfinite(value):
        return ""
    if kind == "difference":
        return f"{round(value, 2) + 0.0:+.2f}"  # no negative zero
    if kind == "change":
        sign = "-" if value < 0 else "+" if value > 0 else ""
        return sign + _format_with_unit(abs(value), 3)
    if kind in ("short", "score"):
        return _format_with_unit(value, digits)
    if kind == "age":
        return _format_age(value)
    if kind == "p":
        return "<0.001" if value < 0.001 else f"{value:.3f}"
    default_format = "{:.3g}" if abs(value) < 1000 else "{:,.0f}"
    return _NUMBER_FORMATS.get(kind, default_format).format(value)


def _format_with_unit(value: float, digits: int) -> str:
    # Rounded first: 999.96 becomes a thousand, which has another unit.
    value = float(f"{value:.{digits}g}")
    power = min(4, max(0, math.floor(math.log10(abs(value) or 1)) // 3))
    if not power:
        return f"{value:g}"
    return f"{value / 1000**power:.{max(3, digits)}g}{'kMGT'[power - 1]}"


def _format_age(value: float) -> str:
    seconds = max(0, int(value))  # clocks of file servers run ahead
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def mark_best(
    cells: Sequence[Cell],
    finished: Sequence[bool],
    kind: str = "percent",
    is_lowest_best: bool = False,
) -> None:
    """Mark the best and the second cell, by the digits that are shown.

    Unfinished runs compete only where there are no finished ones; one number is no best, and after
    two there is no second.

    Args:
        cells: the cells.
        finished: whether the runs of each are.
        kind: `percent` or `score`, as in `format_number`.
        is_lowest_best: which end is the better one.
    """
    digits = ".2f" if kind == "percent" else ".4g"
    pairs = [pair for pair in zip(cells, finished, strict=True) if _is_number(pair[0].value)]
    candidates = [cell for cell, is_finished in pairs if is_finished] or [cell for cell, _ in pairs]
    shown = [float(format(cell.value, digits)) for cell in candidates]
    if len(shown) < 2:
        return
    best, second, *_ = sorted(shown, reverse=not is_lowest_best)
    for cell, value in zip(candidates, shown, strict=True):
        if value == best:
            cell.mark = "best"
        elif value == second:
            cell.mark = "second"


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isnan(value)


def seed_statistics(key: str, values: Sequence[float], interval: bool = False) -> dict[str, float]:
    """Return a record's mean over seeds, and the deviation under `<key>_seed_std`.

    Args:
        key: the record's key.
        values: a value per seed.
        interval: whether to add half a confidence interval under `<key>_seed_ci95`.
    """
    mean, std = mean_and_std(values)
    statistics = {key: mean, f"{key}_seed_std": std}
    if interval:
        statistics[f"{key}_seed_ci95"] = confidence_half_width(std, len(values))
    return statistics


def confidence_half_width(std: float, count: int) -> float:
    """Return half the 95 % confidence interval of a mean, by Student's t.

    It is nan for one value.

    Args:
        std: the sample standard deviation.
        count: of values.
    """
    if count < 2:
        return math.nan
    from scipy import special  # slow to load

    return float(special.stdtrit(count - 1, 0.975)) * std / math.sqrt(count)


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and sample standard deviation over seeds.

    Both are nan where a seed lacks the value; the deviation of one seed is nan.
    """
    count = len(values)
    if not count:
        return math.nan, math.nan
    # fsum: the order of seeds changes no digit.
    mean = math.fsum(values) / count
    if count == 1:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, math.sqrt(variance)
