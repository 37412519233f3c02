"""A data set of Hugging Face's `datasets`: a saved folder, or a name on the hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from fedpfl.data.datasets.shared.hub import Split, count_test_rows, open_splits
from fedpfl.data.datasets.shared.images import Side, read_own_images
from fedpfl.data.datasets.shared.parts import Part, ReadOptions, join_parts, label_columns
from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import Source, error_line
from fedpfl.data.datasets.shared.tables import check_frame
from fedpfl.data.datasets.shared.texts import require_values, to_texts
from fedpfl.data.datasets.shared.words import encode_texts
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import AtLeast
from fedpfl.ground.tasks import CLASSIFICATION, Task

VOCABULARY = 20_000
LENGTH = 64


def hf(  # noqa: PLR0913 - its arguments are keys of the configuration
    source: Source,
    *,
    path: Path | None = None,
    input: str | tuple[str, ...] | None = None,
    label: str | None = None,
    split: str | tuple[str, ...] | None = None,
    by: str | None = None,
    subset: str | None = None,
    size: Side | None = None,
    vocabulary: Annotated[int, AtLeast(3)] = VOCABULARY,
    length: Annotated[int, AtLeast(1)] = LENGTH,
    task: Task = CLASSIFICATION,
    together: str | None = None,
) -> Raw:
    """Read columns of a data set as inputs, labels and clients.

    Args:
        source: Whether the hub may be asked.
        path: A folder that `save_to_disk` has written, or a name on the hub.
        input: The column of images, texts or arrays; or columns of numbers, or of texts.
        label: The column of classes, whole numbers or texts.
        split: The splits to join; None: all. The one called test is the test part.
        by: The column that says which client a sample is of.
        subset: Of a name on the hub that has several.
        size: Pixels each way to which images are scaled; None: as they are.
        vocabulary: Ids of texts, as in `ag_news`; words are counted in the training part.
        length: Words of a text.
        task: The purpose of the labels.
        together: The column with equal values for samples that stay together.

    Returns:
        The samples; groups are the values of column `by`. Grey images have one channel if all are
        grey.

    Raises:
        FedpflError: The data set cannot be opened, or a column is absent or does not fit.
    """
    # ---- Step 1: the columns, the same in all splits.
    splits = open_splits(path, split, subset, source.download)
    inputs = list(label_columns(input))
    others = [name for name in (label, by, together) if name is not None]
    if not inputs or not label or len({*inputs, *others}) < len(inputs) + len(others):
        raise FedpflError(
            "dataset.input, dataset.label, dataset.by and partition.together must name different "
            f"columns; {splits[0].origin} has {', '.join(splits[0].data.column_names[:12])}"
        )
    _require_equal_columns(splits, [*inputs, *others])
    kind = _find_common_kind(splits[0], inputs)

    # ---- Step 2: a part for each split: a table of numbers, or arrays.
    columns = [*inputs, *others] if kind == "numbers" else others
    tables = [_read_table(one, columns) for one in splits]
    if kind == "numbers":
        options = ReadOptions((label,), by=by, together=together, task=task)
        parts = [Part(one.origin, table=own) for one, own in zip(splits, tables, strict=True)]
    else:
        if kind == "images":
            x = _read_images(splits, inputs[0], size)
        elif kind == "texts":
            x = _read_texts(splits, inputs, vocabulary, length)
        else:
            x = [_read_arrays(one, inputs[0]) for one in splits]
        options = ReadOptions(task=task)
        parts = []
        for one, own_x, table in zip(splits, x, tables, strict=True):
            arrays = {name: table[name].to_numpy() for name in others}
            groups = arrays[by] if by else None
            units = arrays[together] if together else None
            parts.append(Part(one.origin, own_x, arrays[label], groups=groups, units=units))

    # ---- Step 3: all splits together.
    raw = join_parts(parts, options, getattr(splits[0].data.features[label], "names", ()))
    test_rows = count_test_rows(splits)
    return raw._replace(test_from=len(raw.y) - test_rows) if test_rows else raw


def count_clients(options: Mapping[str, Any]) -> int:
    """Count the clients that column `by` of a configured data set tells apart."""
    by = options["by"]
    splits = _open_configured(options)
    _require_equal_columns(splits, [by])
    texts = [to_texts(_read_table(split, [by])[by], split.origin) for split in splits]
    return len(np.unique(np.concatenate(texts)))


def has_test_part(options: Mapping[str, Any]) -> bool:
    """Tell whether a configured data set has a test split beside a training split."""
    return count_test_rows(_open_configured(options)) > 0


def _open_configured(options: Mapping[str, Any]) -> list[Split]:
    names = options["split"]
    return open_splits(
        options["path"],
        names if names is None or isinstance(names, str) else list(names),
        options["subset"],
        options["download"],
    )


# ---- Columns


def _require_equal_columns(splits: Sequence[Split], columns: Sequence[str]) -> None:
    """Raise FedpflError where a split lacks a column, or has another type of it."""
    for split in splits:
        for column in columns:
            if column not in split.data.features:
                raise FedpflError(
                    f"{split.origin} has no column {column!r}; it has "
                    f"{', '.join(split.data.column_names[:12])}"
                )
            if split.data.features[column] != splits[0].data.features[column]:
                raise FedpflError(
                    f"{split.origin}: column {column!r} is of another type than in split "
                    f"{splits[0].name}; save both alike, or choose with dataset.split"
                )


def _find_common_kind(split: Split, inputs: Sequence[str]) -> str:
    """Tell whether inputs are images, texts, numbers or arrays. Raises FedpflError."""
    import pyarrow as pa

    kinds: dict[str, str] = {}
    for name in inputs:
        arrow_type = split.data.features.arrow_schema.field(name).type
        if type(split.data.features[name]).__name__ in ("Image", "ClassLabel"):
            kinds[name] = type(split.data.features[name]).__name__.lower() + "s"
        elif pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type):
            kinds[name] = "texts"
        elif pa.types.is_nested(arrow_type) or isinstance(arrow_type, pa.BaseExtensionType):
            kinds[name] = "arrays"
        else:
            is_number = pa.types.is_primitive(arrow_type) and not pa.types.is_temporal(arrow_type)
            kinds[name] = "numbers" if is_number else str(arrow_type)
    (kind, *more) = {*kinds.values()}
    is_single = kind in ("images", "arrays") and len(inputs) == 1
    if more or not (is_single or kind in ("texts", "numbers")):
        held = ", ".join(f"{name!r} holds {own}" for name, own in kinds.items())
        raise FedpflError(
            f"{split.origin}: {held}; dataset.input takes one column of images or arrays, or "
            "columns of numbers or of texts"
        )
    return kind


def _read_table(split: Split, columns: Sequence[str]) -> Any:
    """Return columns as a data frame, classes by their names."""
    table = split.data.select_columns(list(columns)).to_pandas()
    for name in columns:
        names = getattr(split.data.features[name], "names", None)
        if names:
            table[name] = [names[code] if code >= 0 else None for code in table[name]]
    return check_frame(table, split.origin)


def _read_images(splits: Sequence[Split], column: str, size: int | None) -> list[np.ndarray]:
    """Return the images of each split."""
    import datasets

    files: list[Any] = []
    origins: list[str] = []
    for split in splits:
        raw = split.data.select_columns([column]).cast_column(column, datasets.Image(decode=False))
        for row, image in enumerate(raw[column], 1):
            origins.append(f"{split.origin}: column {column!r}, row {row}")
            if image is None:
                raise FedpflError(f"{origins[-1]}: it has no value; leave the row out")
            files.append(image["bytes"] or Path(image["path"]))
    return _split_rows(read_own_images(files, origins, size, is_coloured=False), splits)


def _read_texts(
    splits: Sequence[Split], columns: Sequence[str], vocabulary: int, length: int
) -> list[np.ndarray]:
    """Return the numbered words of each split, those of several columns one after another."""
    texts: list[str] = []
    for split in splits:
        table = _read_table(split, columns)
        for name in columns:
            require_values(
                table[name].isna().to_numpy(), f"{split.origin}: column {name!r}", "row", 1
            )
        texts += table[list(columns)].agg(" ".join, axis=1).tolist()
    # Words of the test part alone are unknown, as those of any later text.
    training_texts = len(texts) - count_test_rows(splits)
    words = encode_texts(texts, training_texts, vocabulary, length, splits[0].origin)
    return _split_rows(words, splits)


def _read_arrays(split: Split, column: str) -> np.ndarray:
    """Return a column of nested lists or arrays of one shape, `[samples, ...]`."""
    arrow_type = split.data.features.arrow_schema.field(column).type
    while hasattr(arrow_type, "storage_type") or hasattr(arrow_type, "value_type"):
        arrow_type = getattr(arrow_type, "storage_type", None) or arrow_type.value_type
    numpy_type = np.dtype(arrow_type.to_pandas_dtype())
    if numpy_type.kind not in "biuf":
        raise FedpflError(f"{split.origin}: column {column!r} holds lists of {arrow_type}")
    data = split.data.select_columns([column]).with_format("numpy", dtype=numpy_type)
    try:
        values = np.asarray(data[:][column], numpy_type)
    except (ValueError, TypeError) as error:
        raise FedpflError(
            f"{split.origin}: column {column!r} holds no arrays of numbers of one shape: "
            f"{error_line(error)}; fix or leave out such rows"
        ) from None
    return values.astype(np.float32) if values.dtype.kind == "b" else values


def _split_rows(x: np.ndarray, splits: Sequence[Split]) -> list[np.ndarray]:
    """Return the rows of each split."""
    return np.split(x, np.cumsum([len(split.data) for split in splits])[:-1])
