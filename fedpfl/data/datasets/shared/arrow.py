"""Read columns of a `datasets.Dataset` as arrays.

Errors name split and row. Rows are counted from 0, as the library counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from fedpfl.data.datasets.shared.hub import Split
from fedpfl.data.datasets.shared.images import refuse_deep_image
from fedpfl.data.datasets.shared.samples import explain_rounding
from fedpfl.data.datasets.shared.source import error_line
from fedpfl.ground.errors import FedpflError

NAMES_SHOWN = 12
GREY_MODES = ("1", "L", "LA")


def column_kind(split: Split, column: str) -> str:
    """Return what a column holds: images, texts, numbers, classes, arrays or another type."""
    import pyarrow as pa

    feature_type = type(split.data.features[column]).__name__
    if feature_type in ("Image", "ClassLabel"):
        return {"Image": "images", "ClassLabel": "classes"}[feature_type]
    arrow_type = split.data.features.arrow_schema.field(column).type
    if pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type):
        return "texts"
    if _is_number(arrow_type):
        return "numbers"
    # Lists of lists, down to what they hold.
    while isinstance(arrow_type, pa.BaseExtensionType) or hasattr(arrow_type, "value_type"):
        is_extension = isinstance(arrow_type, pa.BaseExtensionType)
        arrow_type = arrow_type.storage_type if is_extension else arrow_type.value_type
        if _is_number(arrow_type):
            return "arrays"
    return str(split.data.features.arrow_schema.field(column).type)


def require_column(split: Split, key: str, column: str | None) -> str:
    """Return a column's name. Raises FedpflError where it is not given, or absent."""
    names = split.data.column_names
    column_text = ", ".join(names[:NAMES_SHOWN])
    if column is None:
        raise FedpflError(f"dataset.{key} must name a column; {split.origin} has {column_text}")
    if column not in names:
        raise FedpflError(
            f"{split.origin} has no column {column!r}, which dataset.{key} names; it has "
            f"{column_text}"
        )
    return column


def read_values(split: Split, column: str) -> np.ndarray:
    """Return numbers or texts `[samples]`, of a column of classes their numbers."""
    values = _read_column(split, column)
    _refuse_missing(split, column, values)
    if column_kind(split, column) == "texts":
        return np.array(values.to_pylist(), dtype=np.str_)
    return values.to_numpy()


def read_number_columns(split: Split, columns: Sequence[str]) -> np.ndarray:
    """Return columns of numbers as float32 `[samples, columns]`."""
    features = []
    for column in columns:
        values = read_values(split, column).astype(np.float64)
        _refuse_infinite(split, column, values)
        if problem := explain_rounding(values):
            raise FedpflError(f"{split.origin}: column {column!r} {problem}")
        features.append(values.astype(np.float32))
    return np.stack(features, 1)


def read_text_column(split: Split, columns: Sequence[str]) -> list[str]:
    """Return a text per row, that of several columns one after another."""
    texts = [read_values(split, column).tolist() for column in columns]
    return [" ".join([column[row] for column in texts]) for row in range(len(texts[0]))]


def read_arrays(split: Split, column: str) -> np.ndarray:
    """Return a column of nested lists or arrays of one shape, `[samples, ...]`."""
    parts: list[np.ndarray] = []
    start = 0
    # Chunk by chunk: joined, their offsets may be more than 32 bits hold.
    for chunk in _read_column(split, column).chunks:
        values, fault = _stack_rows(chunk)
        if fault is None and parts and values.shape[1:] != parts[0].shape[1:]:
            fault = (0, "has another shape than those before")
        if fault is not None:
            row, problem = fault
            raise FedpflError(
                f"{split.origin}: column {column!r} {problem} in row {start + row}; mend it, or "
                "leave the row out"
            )
        parts.append(values)
        start += len(chunk)
    x = np.concatenate(parts)
    if x.dtype == bool:
        return x.astype(np.float32)
    if x.dtype.kind == "f":
        _refuse_infinite(split, column, x)
    return x


def read_images(split: Split, column: str, size: int | None) -> list[np.ndarray]:
    """Return uint8 images, `[height, width]` of grey ones and `[height, width, 3]` of others.

    Args:
        split: The split.
        column: The column of images.
        size: Pixels each way to which they are stretched; None: as they are.
    """
    feature = split.data.features[column]
    values = _read_column(split, column)
    _refuse_missing(split, column, values)

    def decode_row(row: int) -> np.ndarray:
        try:
            image = feature.decode_example(values[row].as_py())
            refuse_deep_image(image)
            return _to_pixels(image, size)
        except Exception as error:  # Pillow raises a dozen kinds
            reason = error_line(error)
        raise FedpflError(
            f"{split.origin}: column {column!r} cannot be read as an image in row {row}: {reason};"
            " convert it, or leave the row out"
        )

    # Pillow decodes without Python's lock.
    with ThreadPoolExecutor() as pool:
        return list(pool.map(decode_row, range(len(values))))


def _to_pixels(image: Any, size: int | None) -> np.ndarray:
    """Return an image as grey or RGB pixels."""
    from PIL import Image

    converted = image.convert("L" if image.mode in GREY_MODES else "RGB")
    if size is not None and converted.size != (size, size):
        converted = converted.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(converted)


# ---- Arrow


def _is_number(arrow_type: Any) -> bool:
    import pyarrow as pa

    checks: tuple[Callable[[Any], bool], ...] = (
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_boolean,
    )
    return any(is_kind(arrow_type) for is_kind in checks)


def _read_column(split: Split, column: str) -> Any:
    """Return a column as pyarrow has it, in the data set's order of rows."""
    return split.data.select_columns([column]).with_format("arrow")[:][column]


def _stack_rows(rows: Any) -> tuple[np.ndarray, tuple[int, str] | None]:
    """Return nested lists as an array, or the first row that does not fit."""
    import pyarrow as pa
    import pyarrow.compute as pc

    # ---- Step by step down: all lists of a level must have one length.
    shape = [len(rows)]
    nothing = np.empty(0)
    while True:
        if isinstance(rows, pa.ExtensionArray):
            rows = rows.storage
        items_per_row = int(np.prod(shape[1:]))
        if rows.null_count:
            missing = rows.is_null().to_numpy(zero_copy_only=False)
            return nothing, (int(missing.argmax()) // items_per_row, "has no value")
        if not hasattr(rows.type, "value_type"):
            break
        lengths = pc.list_value_length(rows).to_numpy(zero_copy_only=False)
        differs = lengths != lengths[0]
        if differs.any():
            row = int(differs.argmax()) // items_per_row
            return nothing, (row, "has another length than before")
        if not lengths[0]:
            return nothing, (0, "has an empty list")
        shape.append(int(lengths[0]))
        rows = rows.flatten()

    # ---- The numbers that they hold.
    return rows.to_numpy(zero_copy_only=False).reshape(shape), None


def _refuse_missing(split: Split, column: str, values: Any) -> None:
    if values.null_count:
        missing = values.is_null().to_numpy()
        raise FedpflError(
            f"{split.origin}: column {column!r} has no value in row {int(missing.argmax())}; "
            "fill it in, or leave the row out"
        )


def _refuse_infinite(split: Split, column: str, values: np.ndarray) -> None:
    with np.errstate(over="ignore"):  # what is too large becomes infinite
        is_finite = np.isfinite(values.astype(np.float32)).reshape(len(values), -1).all(1)
    if not is_finite.all():
        raise FedpflError(
            f"{split.origin}: column {column!r} is not finite in row {int(is_finite.argmin())}; "
            "mend it, or leave the row out"
        )
