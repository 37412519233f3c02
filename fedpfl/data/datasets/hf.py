"""A data set of Hugging Face's `datasets`: a saved folder, or a name on the hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from fedpfl.data.datasets.shared.hub import Split, count_test_rows, open_splits
from fedpfl.data.datasets.shared.images import Side, read_own_images
from fedpfl.data.datasets.shared.missing import Missing
from fedpfl.data.datasets.shared.parts import (
    ReadOptions,
    join_parts,
    label_columns,
    split_table,
)
from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import Source, error_line
from fedpfl.data.datasets.shared.texts import require_values, to_texts
from fedpfl.data.datasets.shared.tokens import encode_tokens
from fedpfl.data.datasets.shared.words import encode_texts
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import AtLeast, Count
from fedpfl.ground.records import Record, Values
from fedpfl.ground.tasks import CLASSIFICATION, NEXT_TOKEN, Task

VOCABULARY = 20_000
LENGTH = 64
NUMBER_TYPE = re.compile("u?int|float|bool")


def hf(  # noqa: PLR0913 - its arguments are keys of the configuration
    source: Source,
    *,
    path: Path | None = None,
    input: str | tuple[str, ...] | None = None,
    label: str | tuple[str, ...] | None = None,
    split: str | tuple[str, ...] | None = None,
    by: str | None = None,
    subset: str | None = None,
    size: Side | None = None,
    vocabulary: Annotated[int, AtLeast(3)] = VOCABULARY,
    length: Count = LENGTH,
    categories: tuple[str, ...] | None = None,
    missing: Missing = "refuse",
    tokenizer: Path | None = None,
    task: Task = CLASSIFICATION,
    together: str | None = None,
) -> Raw:
    """Read columns of a data set as inputs, labels and clients.

    Args:
        source: Whether the hub may be asked.
        path: A folder that `save_to_disk` has written, or a name on the hub.
        input: The column of images, texts or arrays; or columns of numbers, or of texts.
        label: The column of classes, whole numbers or texts; or those that the task has.
        split: The splits to join; None: all. The one called test is the test part.
        by: The column that says which client a sample is of.
        subset: Of a name on the hub that has several.
        size: Pixels each way to which images are scaled; None: as they are.
        vocabulary: Ids of texts, as in `ag_news`; words are counted in the training part.
        length: Words of a text, or tokens.
        categories: The columns of inputs that become one feature per value.
        missing: What fills empty cells of columns of numbers, as in `sites`.
        tokenizer: A tokenizer.json of texts, or a folder with one; None: words are numbered.
        task: The purpose of the labels.
        together: The column with equal values for samples that stay together.

    Raises:
        FedpflError: The data set cannot be opened, or a column is absent or does not fit.
    """
    splits = open_splits(path, split, subset, source.download)
    inputs = label_columns(input)
    categories = categories or ()
    labels = label_columns(label)
    facts = [*labels, *filter(None, (by, together))]
    kind = _check_columns(splits, inputs, categories, facts)
    _require_tokens(task, tokenizer, kind)
    options = ReadOptions(labels, categories, by, together, task=task, missing=missing)
    columns = facts or [*inputs]
    if kind == "numbers":
        columns += inputs
    parts = [split_table(_read_table(one, columns), one.origin, options) for one in splits]
    token_facts: Record = {}
    if kind != "numbers":
        if kind == "images":
            x = _read_images(splits, inputs[0], size)
        elif kind == "texts" and tokenizer:
            tokens = encode_tokens(_list_texts(splits, inputs), tokenizer, length)
            token_facts = {"pad": tokens.pad, "vocabulary": tokens.vocabulary}
            x = _split_rows(tokens.ids, splits)
            if task is NEXT_TOKEN:
                token_facts["y"] = tokens.next_ids
        elif kind == "texts":
            x = _read_inputs(splits, inputs, vocabulary, length)
        else:
            x = [_read_arrays(one, inputs[0]) for one in splits]
        parts = [replace(part, x=array) for part, array in zip(parts, x, strict=True)]
        options = ReadOptions(categories=categories, together=together, task=task)
    class_names = getattr(splits[0].data.features[labels[0]], "names", ()) if labels else ()
    raw = join_parts(parts, options, class_names)._replace(**token_facts)
    test_rows = count_test_rows(splits)
    return raw._replace(test_from=len(raw.y) - test_rows) if test_rows else raw


def count_clients(options: Values) -> int:
    """Count the clients that column `by` of a configured data set tells apart."""
    by = options["by"]
    texts = [to_texts(_read_table(one, [by])[by], one.origin) for one in _open_configured(options)]
    return len(np.unique(np.concatenate(texts)))


def has_test_part(options: Values) -> bool:
    """Look for a test split of a configured data set beside a training split."""
    return count_test_rows(_open_configured(options)) > 0


def _open_configured(options: Values) -> list[Split]:
    return open_splits(options["path"], options["split"], options["subset"], options["download"])


# ---- Columns


def _require_tokens(task: Task, tokenizer: Path | None, kind: str) -> None:
    """Raise FedpflError where tokens are asked for, and there are no texts or no tokenizer."""
    if bool(tokenizer or task is NEXT_TOKEN) and not (kind == "texts" and tokenizer):
        raise FedpflError(
            "task=next_token needs dataset.tokenizer, which is for texts; name a tokenizer.json, "
            f"and a column of texts as dataset.input, which now holds {kind}"
        )


def _check_columns(
    splits: Sequence[Split], inputs: Sequence[str], categories: Sequence[str], facts: Sequence[str]
) -> str:
    """Return the kind of the inputs: images, texts, numbers or arrays. Raises FedpflError.

    Args:
        splits: Of the data set.
        inputs: The columns of inputs.
        categories: Those that become one feature per value, beside numbers.
        facts: The columns of labels, clients and units.
    """
    # ---- Step 1: different columns that all splits have alike.
    origin = splits[0].origin
    columns = [*inputs, *facts]
    if not inputs or len({*columns}) < len(columns):
        raise FedpflError(
            "dataset.input, dataset.label, dataset.by and partition.together must name different "
            f"columns; {origin} has {', '.join(splits[0].data.column_names[:12])}"
        )
    for split in splits:
        for column in columns:
            _require_column(split, column)
            if split.data.features[column] != splits[0].data.features[column]:
                raise FedpflError(
                    f"{split.origin}: column {column!r} is of another type than in {origin}; save "
                    "both alike, or choose with dataset.split"
                )

    # ---- Step 2: one kind of inputs; several are numbers or texts.
    for name in {*categories} - {*inputs}:
        raise FedpflError(
            f"dataset.categories has {name}, which dataset.input has not; add it there"
        )
    features = splits[0].data.features
    kinds = {
        name: "numbers" if name in categories else _find_kind(features[name]) for name in inputs
    }
    kind = kinds[inputs[0]]
    is_single = kind in ("images", "arrays") and len(inputs) == 1
    if len({*kinds.values()}) > 1 or not (is_single or kind in ("texts", "numbers")):
        kinds_text = ", ".join(f"{name!r} holds {one}" for name, one in kinds.items())
        raise FedpflError(
            f"{origin}: {kinds_text}; dataset.input takes one column of images or arrays, or "
            "columns of numbers or of texts"
        )
    return kind


def _require_column(split: Split, column: str) -> None:
    if column not in split.data.features:
        names = ", ".join(split.data.column_names[:12])
        raise FedpflError(f"{split.origin} has no column {column!r}; it has {names}")


def _find_kind(feature: Any) -> str:
    """Name the kind of a column's values."""
    name = type(feature).__name__
    if name != "Value":
        return "images" if name == "Image" else "arrays"
    if feature.dtype in ("string", "large_string"):
        return "texts"
    return "numbers" if NUMBER_TYPE.match(feature.dtype) else feature.dtype


def _read_table(split: Split, columns: list[str]) -> Any:
    """Return columns as a data frame, classes by their names."""
    for name in columns:
        _require_column(split, name)
    table = split.data.select_columns(columns).to_pandas()
    for name in columns:
        names = getattr(split.data.features[name], "names", None)
        if names:
            table[name] = [names[code] if code >= 0 else None for code in table[name]]
    return table


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


def _read_inputs(
    splits: Sequence[Split], columns: Sequence[str], vocabulary: int, length: int
) -> list[np.ndarray]:
    """Return the numbered words of each split."""
    texts = _list_texts(splits, columns)
    # Words of the test part alone are unknown, as those of any later text.
    training_texts = len(texts) - count_test_rows(splits)
    ids = encode_texts(texts, training_texts, vocabulary, length, splits[0].origin)
    return _split_rows(ids, splits)


def _list_texts(splits: Sequence[Split], columns: Sequence[str]) -> list[str]:
    """List the texts of all splits, those of several columns one after another."""
    texts: list[str] = []
    for split in splits:
        table = _read_table(split, [*columns])
        require_values(table.isna().any(axis=1).to_numpy(), f"{split.origin}: a text", "row", 1)
        texts += table.agg(" ".join, axis=1).tolist()
    return texts


def _read_arrays(split: Split, column: str) -> np.ndarray:
    """Return a column of nested lists or arrays of one shape, `[samples, ...]`."""
    feature = split.data.features[column]
    while hasattr(feature, "feature"):
        feature = feature.feature
    try:
        dtype = np.dtype(feature.dtype)
        data = split.data.select_columns([column]).with_format("numpy", dtype=dtype)
        values = np.asarray(data[:][column], dtype)
    except (ValueError, TypeError) as error:
        raise FedpflError(
            f"{split.origin}: column {column!r} holds no arrays of numbers of one shape: "
            f"{error_line(error)}; fix or leave out such rows"
        ) from None
    return values.astype(np.float32) if values.dtype.kind == "b" else values


def _split_rows(x: np.ndarray, splits: Sequence[Split]) -> list[np.ndarray]:
    """Return the rows of each split."""
    return np.split(x, np.cumsum([len(split.data) for split in splits])[:-1])
