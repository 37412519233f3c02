"""The tables of numbers in a run directory, rounds.csv and clients.csv: how they are written, and
the one reader.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable
from typing import Any


def format_row(cells: Iterable[Any]) -> str:
    """Write a row: numbers with full precision, None as an empty cell."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow([format_cell(value) for value in cells])
    return buffer.getvalue()


def format_cell(value: Any) -> str:
    """Write a number, Python's, NumPy's or PyTorch's, so that it reads back as it is; None as
    nothing.
    """
    value = to_python_number(value)
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)


def to_python_number(value: Any) -> Any:
    """Return a number of NumPy or PyTorch as Python's; everything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def parse_cells(text: str) -> tuple[list[str], list[list[str]]]:
    """Return the columns' names and each row's cells; the line that a run was caught writing is
    left out.

    Raises ValueError, without the file's name, where a row has more or fewer cells than there are
    columns.
    """
    whole = text[: text.rfind("\n") + 1]
    try:
        header, *rows = [row for row in csv.reader(io.StringIO(whole, newline="")) if row] or [[]]
    except csv.Error as error:
        raise ValueError(f"it is no CSV: {error}") from None
    if not header:
        raise ValueError("it is empty")
    if len({*header}) < len(header):
        raise ValueError("two columns have one name")
    for at, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise ValueError(f"row {at} has {len(row)} cells, and there are {len(header)} columns")
    return header, rows


def read_columns(text: str, only: Collection[str] | None = None) -> dict[str, list[float | None]]:
    """Read the numbers of each column: a whole one is an int, an empty cell None.

    only: the columns to look at, as far as they are there. Raises ValueError, as `cells`, and for
    what is no number.
    """
    header, rows = parse_cells(text)
    return {
        name: [_number(row[at], name) if row[at] else None for row in rows]
        for at, name in enumerate(header)
        if only is None or name in only
    }


def read_rows(text: str, only: Collection[str] | None = None) -> list[dict[str, float | None]]:
    """Read the rows, each a dict by column. Arguments and errors as of `columns`."""
    table = read_columns(text, only)
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]


def _number(text: str, name: str) -> float:
    try:
        return int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:
        raise ValueError(f"{text!r} under {name} is no number") from None
