"""Tables of features: columns of numbers as they are, others one-hot, and one of labels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpfl.data.datasets.shared.parts import require_one_spelling
from fedpfl.data.datasets.shared.samples import convert_labels, explain_rounding
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tasks import CLASSIFICATION, MULTILABEL, Task

if TYPE_CHECKING:
    import pandas as pd

NAMES_SHOWN = 5
NAMELESS_COLUMN = re.compile(r"\s*|Unnamed: \d+|__index_level_\d+__")
"""What pandas and pyarrow call columns without a name."""
WHOLE_FLOAT = re.compile(r"[+-]?\d+\.0+")


@dataclass(frozen=True)
class Table:
    """A table with a sample a row.

    Attributes:
        origin: What messages call it, such as its file.
        frame: Its columns.
    """

    origin: str
    frame: pd.DataFrame


@dataclass(frozen=True)
class EncodedTables:
    """Tables as numbers.

    Attributes:
        features: What each feature is called: a column, or `column=value` of a category.
        parts: Float32 `[samples, features]` and labels of each table: integers or texts
            `[samples]`, or in the form of another task.
    """

    features: tuple[str, ...]
    parts: list[tuple[np.ndarray, np.ndarray]]


def encode_tables(
    tables: Sequence[Table],
    labels: Sequence[str],
    categories: Sequence[str],
    task: Task = CLASSIFICATION,
) -> EncodedTables:
    """Return features and labels of tables that have the same columns.

    Args:
        tables: In whatever order of their columns; those of the first one rule.
        labels: The columns of the labels: one, or of task=multilabel one per label.
        categories: Columns that become one feature per value, the same ones in all tables.
        task: What the labels are for.

    Raises:
        FedpflError: A column is absent, has no value in a row, or is no number.
    """
    # ---- Step 1: the same columns everywhere, and labels among them.
    columns = list(tables[0].frame.columns)
    if not labels:
        examples = ", ".join(map(str, columns[:NAMES_SHOWN]))
        raise FedpflError(f"dataset.label must name the column of the labels, such as {examples}")
    for table in tables:
        _require_columns(table, labels, categories)
        if set(table.frame.columns) != set(columns):
            raise FedpflError(
                f"{table.origin} differs in its columns from {Path(tables[0].origin).name}: "
                f"{_describe_difference(table.frame.columns, columns)}"
            )
    if len(labels) > 1 and task is not MULTILABEL:
        raise FedpflError(
            f"dataset.label names {len(labels)} columns, which task={task.name} has no use for; "
            "name one, or set task=multilabel"
        )

    # ---- Step 2: features in the order of the first table's columns, levels of all tables
    # together.
    names = [name for name in columns if name not in labels]
    levels: dict[str, list[str]] = {}
    for name in names:
        if name in categories:
            levels_by_table = {table.origin: find_levels([table], name) for table in tables}
            require_one_spelling(levels_by_table, f"{name} =")
            levels[name] = find_levels(tables, name)
    encoded = []

    # ---- Step 3: numbers of each table.
    for table in tables:
        features: list[np.ndarray] = []
        for name in names:
            features += _feature_columns(table, name, levels.get(name))
        if not features:
            raise FedpflError(
                f"{table.origin} has no column besides dataset.label={', '.join(labels)}"
            )
        if task is CLASSIFICATION:
            y = _label_column(table, labels[0])
        else:
            y = _label_numbers(table, labels, task)
        encoded.append((np.stack(features, 1).astype(np.float32), y))
    return EncodedTables(name_features(names, levels), encoded)


def name_features(columns: Sequence[str], levels: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return what features are called, in their order.

    As `pandas.get_dummies(frame, prefix_sep="=")` calls them.

    Args:
        columns: Those that are no labels.
        levels: The values of each category.
    """
    features: list[str] = []
    for name in columns:
        if name in levels:
            features += [f"{name}={level}" for level in levels[name]]
        else:
            features.append(str(name))
    return tuple(features)


def label_columns(label: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the columns that `dataset.label` names."""
    if isinstance(label, str):
        return (label,)
    return tuple(label or ())


def _require_columns(table: Table, labels: Sequence[str], categories: Sequence[str]) -> None:
    """Raise FedpflError where a column is absent or has no name.

    Without a name pandas and R write the numbers of rows, which may tell the labels of a sorted
    table.
    """
    for number, name in enumerate(table.frame.columns, 1):
        if NAMELESS_COLUMN.fullmatch(str(name)):
            raise FedpflError(
                f"{table.origin}: column {number} has no name, as where rows are numbered; name it, "
                "or leave it out (pandas: to_csv(..., index=False))"
            )
    for key, names in (("label", labels), ("categories", categories)):
        for name in names:
            if name not in table.frame.columns:
                column_text = ", ".join(map(str, table.frame.columns[:NAMES_SHOWN]))
                raise FedpflError(
                    f"{table.origin} has no column {name!r}, which dataset.{key} names; it has "
                    f"{column_text}"
                )


def _describe_difference(columns: Iterable[str], expected: Iterable[str]) -> str:
    """Say which columns are absent, and which are more."""
    found_columns = list(columns)
    expected_columns = list(expected)
    absent = [str(name) for name in expected_columns if name not in found_columns]
    additional = [str(name) for name in found_columns if name not in expected_columns]
    parts = [
        f"{word} {', '.join(names[:NAMES_SHOWN])}"
        for word, names in (("it lacks", absent), ("it has also", additional))
        if names
    ]
    return " and ".join(parts)


def find_levels(tables: Sequence[Table], name: str) -> list[str]:
    """Return the values that a category takes at any site, sorted."""
    levels = set[str]()
    for table in tables:
        levels |= {_category_text(value) for value in table.frame[name].dropna().unique()}
    return sorted(levels)


def _category_text(value: Any) -> str:
    """Return a category as text: 2 and 2.0 are one, whichever a site's table holds."""
    # pandas makes floats of whole numbers where a cell of the column is empty.
    text = str(value)
    return text.partition(".")[0] if WHOLE_FLOAT.fullmatch(text) else text


def _feature_columns(table: Table, name: str, levels: list[str] | None) -> list[np.ndarray]:
    """Return a column as features: as it is if it holds numbers, one-hot if it is a category."""
    column = table.frame[name]
    _refuse_missing(table.origin, column, name)
    if levels is not None:
        texts = column.map(_category_text).to_numpy()
        return [(texts == level).astype(np.float32) for level in levels]
    if column.dtype.kind not in "biuf":
        raise FedpflError(
            f"{table.origin}: column {name!r} holds {_quote_text(column)}, no number; "
            f"name it in dataset.categories=[{name}], or leave it out"
        )
    values = column.to_numpy(np.float64)
    with np.errstate(over="ignore"):  # what is too large becomes infinite
        infinite = ~np.isfinite(values.astype(np.float32))
    if infinite.any():
        raise FedpflError(
            f"{table.origin}: column {name!r} is not finite in row {_row_number(infinite)}"
        )
    if problem := explain_rounding(values):
        raise FedpflError(f"{table.origin}: column {name!r} {problem}")
    return [values]


def _label_numbers(table: Table, labels: Sequence[str], task: Task) -> np.ndarray:
    """Return labels of a task without classes, from columns of numbers."""
    for name in labels:
        column = table.frame[name]
        _refuse_missing(table.origin, column, name)
        if column.dtype.kind not in "biuf":
            raise FedpflError(
                f"{table.origin}: column {name!r} holds {_quote_text(column)}, and labels of "
                f"task={task.name} are numbers"
            )
    values = table.frame[list(labels)].to_numpy(np.float64)
    try:
        return convert_labels(values, task)
    except ValueError as error:
        raise FedpflError(f"{table.origin}: {', '.join(labels)}: {error}") from None


def _label_column(table: Table, label: str) -> np.ndarray:
    """Return the labels, integers or texts."""
    column = table.frame[label]
    _refuse_missing(table.origin, column, label)
    if column.dtype.kind == "f":
        values = column.to_numpy()
        # Whole numbers from 2^53 on are not all floats, so that two classes might be one.
        is_class = (values == values.round()) & (np.abs(values) < 2**53)
        if not is_class.all():
            row = _row_number(~is_class)
            raise FedpflError(
                f"{table.origin}: label {values[row - 1]} in row {row} is no class; "
                "labels are whole numbers or texts, or floats with task=regression"
            )
        return values.astype(np.int64)
    return column.to_numpy() if column.dtype.kind in "iu" else column.map(str).to_numpy(np.str_)


def _quote_text(column: pd.Series) -> str:
    """Quote the first cell that is no number, with its row."""
    import pandas as pd

    # One such cell makes texts of all. Where each could be a number, the first one is quoted.
    is_text = pd.to_numeric(column, errors="coerce").isna().to_numpy()
    index = int(is_text.argmax())
    return f"{str(column.iloc[index])[:40]!r} in row {index + 1}"


def _refuse_missing(origin: str, column: pd.Series, name: str) -> None:
    missing = column.isna().to_numpy()
    if missing.any():
        raise FedpflError(
            f"{origin}: column {name!r} has no value in row {_row_number(missing)}; "
            "fill it in, or leave the row out"
        )


def _row_number(faulty: np.ndarray) -> int:
    """Return the first faulty row, counted from 1 below the header."""
    return int(np.flatnonzero(faulty)[0]) + 1
