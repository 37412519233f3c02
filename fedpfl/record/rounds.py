"""Write and read the tables in a run directory, such as rounds.csv and clients.csv."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable
from typing import Any


def format_row(values: Iterable[Any]) -> str:
    """Write a row: numbers with full precision, texts as they are, None as an empty cell."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow([format_cell(value) for value in values])
    return buffer.getvalue()


def format_cell(value: Any) -> str:
    """Write a number so that it reads back unchanged; None as nothing."""
    value = to_python_number(value)
    if value is None:
        return ""
    # repr is the shortest text that reads back as the same float.
    return repr(value) if isinstance(value, float) else str(value)


def to_python_number(value: Any) -> Any:
    """Return a number of NumPy or PyTorch as Python's; everything else unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def parse_cells(text: str) -> tuple[list[str], list[list[str]]]:
    """Return the columns' names and each row's cells.

    A last line without its end, which a run was caught writing, is left out.

    Raises:
        ValueError: a row has more or fewer cells than there are columns. The message is without the
            file's name.
    """
    complete_lines = text[: text.rfind("\n") + 1]
    try:
        rows = [row for row in csv.reader(io.StringIO(complete_lines, newline="")) if row]
    except csv.Error as error:
        raise ValueError(f"it is no CSV: {error}") from None
    if not rows:
        raise ValueError("it is empty")
    header, *rows = rows
    if len({*header}) < len(header):
        raise ValueError("two columns have one name")
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise ValueError(
                f"row {number} has {len(row)} cells, and there are {len(header)} columns"
            )
    return header, rows


TEXT_COLUMNS = ("name", "kind")
"""Columns that hold no numbers."""


def read_columns(text: str, only: Collection[str] | None = None) -> dict[str, list[float | None]]:
    """Read the numbers of each column: a whole one is an int, an empty cell None.

    TEXT_COLUMNS are left out.

    Args:
        text: the table.
        only: the columns to read, as far as they are there.

    Raises:
        ValueError: as in `parse_cells`, or for a cell that is no number.
    """
    header, rows = parse_cells(text)
    columns: dict[str, list[float | None]] = {}
    for index, name in enumerate(header):
        if name not in TEXT_COLUMNS and (only is None or name in only):
            columns[name] = [_parse_cell(row[index], name) for row in rows]
    return columns


def read_rows(text: str, only: Collection[str] | None = None) -> list[dict[str, float | None]]:
    """Read the rows, each a dict by column. Arguments and errors are those of `read_columns`."""
    columns = read_columns(text, only)
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def read_texts(text: str, column: str) -> list[str]:
    """Read the texts of a column; [] where there is no such column. Raises as `parse_cells`."""
    header, rows = parse_cells(text)
    if column not in header:
        return []
    index = header.index(column)
    return [row[index] for row in rows]


def _parse_cell(text: str, column: str) -> float | None:
    if not text:
        return None
    try:
        return int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:
        raise ValueError(f"{text!r} under {column} is no number") from None
