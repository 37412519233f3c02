"""Tables of features: columns of numbers as they are, categories one-hot, and the other columns."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedpfl.data.datasets.shared.parts import Part, ReadOptions, texts_by_holder
from fedpfl.data.datasets.shared.samples import to_finite_floats
from fedpfl.data.datasets.shared.texts import (
    NUMBERS,
    require_one_spelling,
    require_values,
    to_texts,
)
from fedpfl.ground.errors import FedpflError, missing_extra
from fedpfl.ground.tasks import CLASSIFICATION, MULTILABEL

if TYPE_CHECKING:
    import pandas as pd

TABLE_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet", ".xlsx")
NAMES_SHOWN = 5
NAMELESS_COLUMN = re.compile(r"\s*|Unnamed: \d+|__index_level_\d+__")
"""What pandas and pyarrow call columns without a name."""
CAUSES = (
    (r"[+-]?\d[\d.]*,\d+", "it may have a decimal comma; write a point"),
    (r"\d{1,4}([-./])\d{1,2}\1\d{1,4}([ T].*)?", "it may be a date; make it a number of days"),
    (r"\d{1,2}:\d{2}(:\d{2})?", "it may be a time; make it a number of minutes"),
    (
        r"(?i)nan?|n/a|none|null|missing|unknown|[?.\-]+",
        "it may stand for a missing value; fill it in",
    ),
    (r"[+-]?[\d.]+\s*[^\d\s]+", "it may have a unit; write the number alone"),
)
"""Likely causes of a cell that is no number, by its form."""


class Columns(NamedTuple):
    """Columns that the tables of all sites have in common.

    Attributes:
        names: Of the features, in their order.
        levels: The values of each category.
    """

    names: list[str]
    levels: dict[str, list[str]]


# ---- Reading


def read_table(path: Path, text_columns: Sequence[str]) -> pd.DataFrame:
    """Read a table file.

    Args:
        path: The file, which ends in one of TABLE_SUFFIXES.
        text_columns: Columns of texts, so that 01 is not 1.

    Raises:
        FedpflError: It is no table, has no row, or two columns have one name.
    """
    import pandas as pd

    # An empty cell alone is missing: None or NA may be a class or a country.
    options = {"keep_default_na": False, "na_values": [""]}
    if ".tsv" in path.suffixes:
        options["sep"] = "\t"
    read = pd.read_excel if path.suffix == ".xlsx" else pd.read_csv
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # a row of too many cells
            if path.suffix == ".parquet":
                table = pd.read_parquet(path)
            else:
                if read is pd.read_csv:
                    options["index_col"] = False  # or a longer row would name itself
                table = read(path, dtype=dict.fromkeys(text_columns, str), **options)
                # pandas renames a column that comes twice.
                header = read(path, header=None, nrows=1, dtype=str, **options)
                table.columns = header.iloc[0].fillna("")
    except ImportError:
        extra = "excel" if path.suffix == ".xlsx" else "parquet"
        raise missing_extra(f"{path} needs a package that is not installed", extra) from None
    except pd.errors.ParserWarning:
        raise FedpflError(f"{path}: a row has more cells than the header has names") from None
    except (ValueError, OSError, KeyError) as error:  # pandas' and pyarrow's errors are ValueErrors
        reason = " ".join(str(error).split())
        raise FedpflError(f"{path} cannot be read as a table: {reason}") from None
    return check_frame(table, str(path))


def check_frame(frame: pd.DataFrame, origin: str) -> pd.DataFrame:
    """Check a data frame, and convert objects that are numbers.

    Raises:
        FedpflError: It has no row, or two columns have one name, or one has no name.
    """
    import pandas as pd

    if frame.empty:
        raise FedpflError(f"{origin} has no row; there must be at least one sample")
    if not frame.columns.is_unique:
        repeated = frame.columns[frame.columns.duplicated()][0]
        raise FedpflError(f"{origin} has column {repeated!r} twice; rename or leave out one")
    for number, name in enumerate(frame.columns, 1):
        # Without a name pandas and R write the numbers of rows, which may tell the labels of a
        # sorted table.
        if NAMELESS_COLUMN.fullmatch(str(name)):
            raise FedpflError(
                f"{origin}: column {number} has no name, as where rows are numbered; name it, "
                "or leave it out (pandas: to_csv(..., index=False))"
            )
    are_numbers = [
        name
        for name, column in frame.items()
        if column.dtype == object and pd.api.types.infer_dtype(column) in NUMBERS
    ]
    return frame.astype({name: frame[name].infer_objects().dtype for name in are_numbers})


# ---- Encoding


def find_columns(parts: Sequence[Part], options: ReadOptions) -> Columns:
    """Find the features of tables, and the values of categories in all of them together.

    Raises:
        FedpflError: Tables differ in their columns, or a column is absent.
    """
    # ---- Step 1: the same columns everywhere.
    columns = list(parts[0].table.columns)
    if not options.labels:
        examples = ", ".join(map(str, columns[:NAMES_SHOWN]))
        raise FedpflError(f"dataset.label must name the column of the labels, such as {examples}")
    if len(options.labels) > 1 and options.task is not MULTILABEL:
        raise FedpflError(
            f"dataset.label names {len(options.labels)} columns, which task={options.task.name} has "
            "no use for; name one, or set task=multilabel"
        )
    for part in parts:
        for key, names in options.named_columns.items():
            for name in names:
                require_column(part, key, name)
        difference = {*map(str, part.table.columns)} ^ {*map(str, columns)}
        if difference:
            raise FedpflError(
                f"{part.origin} differs from {Path(parts[0].origin).name} in columns "
                f"{', '.join(sorted(difference)[:NAMES_SHOWN])}"
            )

    # ---- Step 2: features in the order of the first table.
    others = {*options.labels, options.by, options.together}
    features = [str(name) for name in columns if name not in others]
    if not features:
        raise FedpflError(
            f"{parts[0].origin} has no column besides dataset.label={', '.join(options.labels)}"
        )
    levels = {}
    for name in options.categories:
        texts = [to_texts(part.table[name], f"{part.origin}: column {name!r}") for part in parts]
        require_one_spelling(texts_by_holder(parts, texts), f"{name} =")
        levels[name] = sorted({text for some in texts for text in some.tolist()})
    return Columns(features, levels)


def encode_table(part: Part, columns: Columns, options: ReadOptions) -> Part:
    """Return a part with the features and labels of its table.

    Raises:
        FedpflError: A cell has no value, or is no number.
    """
    # ---- Step 1: numbers as they are, and a feature for each value of a category.
    table = part.table.rename(columns=str)
    features: list[np.ndarray] = []
    for name in columns.names:
        origin = f"{part.origin}: column {name!r}"
        if name in columns.levels:
            texts = to_texts(table[name], origin)
            if unknown := {*texts.tolist()} - {*columns.levels[name]}:
                raise FedpflError(f"{origin} has {min(unknown)!r}, which no other site has")
            features += [texts == level for level in columns.levels[name]]
        else:
            features.append(_read_numbers(table[name], origin))

    # ---- Step 2: labels, by the task.
    if options.task is CLASSIFICATION:
        labels = table[options.labels[0]].to_numpy()
    else:
        numbers = [
            _read_numbers(table[name], f"{part.origin}: column {name!r}") for name in options.labels
        ]
        labels = np.stack(numbers, 1)
    try:
        x = to_finite_floats(np.stack(features, 1).astype(np.float64), name_features(columns))
    except ValueError as error:
        raise FedpflError(f"{part.origin}: {error}") from None
    return replace(part, table=None, x=x, y=labels)


def name_features(columns: Columns) -> tuple[str, ...]:
    """Name features as `pandas.get_dummies(frame, prefix_sep="=")` does, in their order."""
    features: list[str] = []
    for name in columns.names:
        levels = columns.levels.get(name)
        features += [name] if levels is None else [f"{name}={level}" for level in levels]
    return tuple(features)


def require_column(part: Part, key: str, name: str) -> None:
    """Raise FedpflError where a table lacks a column that the configuration names."""
    if name not in part.table.columns:
        column_text = ", ".join(map(str, part.table.columns[:NAMES_SHOWN]))
        raise FedpflError(
            f"{part.origin} has no column {name!r}, which {key} names; it has {column_text}"
        )


def _read_numbers(column: pd.Series, origin: str) -> np.ndarray:
    """Read a column of numbers.

    Raises:
        FedpflError: A cell has no value, or is no number.
    """
    require_values(column.isna().to_numpy(), origin, "row", 1)
    if column.dtype.kind not in "biuf":
        raise FedpflError(f"{origin} holds {_explain_text(column)}")
    return column.to_numpy(np.float64)


def _explain_text(column: pd.Series) -> str:
    """Quote the first cell that is no number, and say the likely cause."""
    import pandas as pd

    # One such cell makes texts of all. Where each could be a number, the first one is quoted.
    is_text = pd.to_numeric(column, errors="coerce").isna().to_numpy()
    index = int(is_text.argmax())
    cell = str(column.iloc[index])
    quoted = f"{cell[:40]!r} in row {index + 1}, no number"
    for form, cause in CAUSES:
        if re.fullmatch(form, cell.strip()):
            return f"{quoted}: {cause}, or leave the column out"
    if column.nunique() > len(column) / 2:
        return f"{quoted}, and nearly each row has another value; leave the column out"
    return f"{quoted}; name it in dataset.categories=[{column.name}], or leave it out"
