"""Tables of features: columns of numbers as they are, categories one-hot."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedpfl.data.datasets.shared.missing import name_indicator
from fedpfl.data.datasets.shared.samples import to_floats
from fedpfl.data.datasets.shared.texts import clean_text, require_values, to_texts
from fedpfl.ground.errors import FedpflError, error_text, missing_extra
from fedpfl.ground.records import Record

if TYPE_CHECKING:
    import pandas as pd

TABLE_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet", ".xlsx")
NAMELESS_COLUMN = re.compile(r"\s*|Unnamed: \d+|__index_level_\d+__")
"""What pandas and pyarrow call columns without a name."""


class Columns(NamedTuple):
    """Columns that the tables of all sites have in common.

    Attributes:
        names: Of the features, in their order.
        levels: The values of each category.
        empty: Columns of numbers that a feature beside them tells empty cells of.
    """

    names: list[str]
    levels: dict[str, list[str]]
    empty: list[str]


# ---- Reading


def read_table(path: Path, text_columns: Sequence[str]) -> pd.DataFrame:
    """Read a table file.

    Args:
        path: The file, which ends in one of TABLE_SUFFIXES.
        text_columns: Columns of texts, so that 01 is not 1.

    Raises:
        FedpflError: It is no table.
    """
    import pandas as pd

    # An empty cell alone is missing: None or NA may be a class or a country.
    options: Record = {"keep_default_na": False, "na_values": [""]}
    read_file = pd.read_excel
    suffix = path.suffix.lower()
    if suffix != ".xlsx":
        read_file = pd.read_csv
        is_tabbed = path.name.lower().endswith((".tsv", ".tsv.gz"))
        # Without index_col a longer row would name itself.
        options |= {"index_col": False, "sep": "\t" if is_tabbed else ","}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # a row of too many cells
            if suffix == ".parquet":
                return pd.read_parquet(path)
            # pandas renames a column that comes twice.
            header = read_file(path, header=None, nrows=1, dtype=str, **options)
            names = header.iloc[0].fillna("").tolist()
            types = {name: str for name in names if clean_text(name) in text_columns}
            return read_file(path, dtype=types, **options).set_axis(names, axis=1)
    except ImportError:
        extra = "excel" if suffix == ".xlsx" else "parquet"
        raise missing_extra(f"{path} needs a package that is not installed", extra) from None
    except pd.errors.ParserWarning:
        raise FedpflError(f"{path}: a row has more cells than the header has names") from None
    except (ValueError, OSError, KeyError) as error:  # pandas' and pyarrow's errors are ValueErrors
        raise FedpflError(f"{path} cannot be read as a table: {error_text(error)}") from None


def check_frame(frame: pd.DataFrame, origin: str) -> pd.DataFrame:
    """Check a data frame, clean the names of columns, and convert objects that are numbers.

    Raises:
        FedpflError: It has no row, or two columns have one name, or one has no name.
    """
    if frame.empty:
        raise FedpflError(f"{origin} has no row; there must be at least one sample")
    frame = frame.set_axis([clean_text(str(name)) for name in frame.columns], axis=1)
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
    numbers = frame.infer_objects().select_dtypes(["number", "bool"])
    return frame.astype(numbers.dtypes.to_dict())


# ---- Encoding


def encode_features(
    frame: pd.DataFrame, columns: Columns, origin: str, may_lack_values: bool = False
) -> np.ndarray:
    """Return features of a table, float32 `[samples, features]`, one for each value of a category.

    Where values may be absent, an empty number is NaN, and an empty category has none of its values.

    Raises:
        FedpflError: A cell has no value, or is no number.
    """
    features: list[np.ndarray] = []
    for name in columns.names:
        column, levels = frame[name], columns.levels.get(name)
        column_text = f"{origin}: column {name!r}"
        is_empty = column.isna().to_numpy()
        if not may_lack_values:
            require_values(is_empty, column_text, "row", 1, ", or set dataset.missing=mean")
        if levels is None:
            numbers = read_numbers(column.mask(is_empty, 0).infer_objects(), origin)
            features.append(np.where(is_empty, np.nan, numbers))
            if name in columns.empty:
                features.append(is_empty)
            continue
        texts = np.full(len(column), "", dtype=object)
        texts[~is_empty] = to_texts(column[~is_empty], column_text)
        if unknown := {*texts.tolist()} - {*levels, ""}:
            raise FedpflError(f"{column_text} has {min(unknown)!r}, which no other site has")
        features += [texts == level for level in levels]
    return np.stack(features, 1).astype(np.float32)


def name_features(columns: Columns) -> tuple[str, ...]:
    """Name features as `pandas.get_dummies(frame, prefix_sep="=")` does, in their order."""
    features: list[str] = []
    for name in columns.names:
        levels = columns.levels.get(name)
        features += [name] if levels is None else [f"{name}={level}" for level in levels]
        if name in columns.empty:
            features.append(name_indicator(name))
    return tuple(features)


def read_numbers(column: pd.Series, origin: str, is_label: bool = False) -> np.ndarray:
    """Read a column of numbers, float32: of a feature or, with `is_label`, of labels.

    Raises:
        FedpflError: A cell has no value, or is no number that float32 holds.
    """
    import pandas as pd

    origin = f"{origin}: column {column.name!r}"
    require_values(column.isna().to_numpy(), origin, "row", 1)
    if column.dtype.kind not in "biuf":
        # One such cell makes texts of all. Where each could be a number, the first one is quoted.
        index = int(pd.to_numeric(column, errors="coerce").isna().to_numpy().argmax())
        advice = "labels of this task are numbers"
        if not is_label:
            advice = f"correct or empty it, name it in dataset.categories=[{column.name}], or leave it out"
        cell = str(column.iloc[index])
        raise FedpflError(f"{origin} holds {cell[:40]!r} in row {index + 1}, no number; {advice}")
    try:
        return to_floats(column.to_numpy(np.float64))
    except ValueError as error:
        raise FedpflError(f"{origin}: {error}") from None
