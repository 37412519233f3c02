"""A data set of Hugging Face's `datasets`: a saved folder, or a name on the hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from fedpfl.data.datasets.shared import arrow
from fedpfl.data.datasets.shared.hub import Split, count_test_rows, open_splits
from fedpfl.data.datasets.shared.images import Side
from fedpfl.data.datasets.shared.parts import join_labels, require_one_spelling
from fedpfl.data.datasets.shared.samples import Raw, number_groups
from fedpfl.data.datasets.shared.source import Source
from fedpfl.data.datasets.shared.words import encode_words, number_words, split_words
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import AtLeast
from fedpfl.ground.tasks import CLASSIFICATION, Task

VOCABULARY = 20_000
LENGTH = 64
INPUT_KINDS = ("images", "texts", "numbers", "arrays")


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
        task: Classification.

    Returns:
        The samples; groups are the values of column `by`. Grey images have one channel if all are
        grey.

    Raises:
        FedpflError: The data set cannot be opened, or a column is absent or does not fit.
    """
    if task.name != CLASSIFICATION.name:  # labels are numbered anew, which targets must not be
        raise FedpflError(f"dataset=hf reads classes, not what task={task.name} asks for; use npz")

    # ---- Step 1: the columns.
    splits = open_splits(path, split, subset, source.download)
    inputs = _list_inputs(splits[0], input)
    label = arrow.require_column(splits[0], "label", label)
    if label in inputs:
        raise FedpflError(f"dataset.input and dataset.label both name {label!r}; leave out one")
    _require_equal_columns(splits, "input", inputs)
    _require_equal_columns(splits, "label", [label])

    # ---- Step 2: inputs, by what their columns hold.
    kind = _input_kind(splits[0], inputs)
    _refuse_other_options(kind, size, vocabulary, length)
    if kind == "images":
        x = _stack_images(splits, inputs[0], size)
    elif kind == "texts":
        x = _number_texts(splits, inputs, vocabulary, length)
    elif kind == "numbers":
        x = np.concatenate([arrow.read_number_columns(part, inputs) for part in splits])
    else:
        x = _join_arrays(splits, inputs[0])

    # ---- Step 3: labels, clients and where the test part begins.
    y, class_names = _number_labels(splits, label)
    feature_names = tuple(inputs) if kind == "numbers" else ()
    raw = Raw(x, y, class_names=class_names, feature_names=feature_names)
    if by is not None:
        groups, group_names = number_groups(_read_client_column(splits, by))
        raw = raw._replace(groups=groups, group_names=group_names)
    if test_rows := count_test_rows(splits):
        raw = raw._replace(test_from=len(y) - test_rows)
    return raw


def count_clients(options: Mapping[str, Any]) -> int:
    """Return how many clients column `by` of a configured data set tells apart."""
    clients = _read_client_column(_open_configured(options), options["by"])
    return len(np.unique(clients))


def has_test_part(options: Mapping[str, Any]) -> bool:
    """Tell whether a configured data set has a test split beside others."""
    return count_test_rows(_open_configured(options)) > 0


def _open_configured(options: Mapping[str, Any]) -> list[Split]:
    names = options["split"]
    return open_splits(
        options["path"],
        names if names is None or isinstance(names, str) else list(names),
        options["subset"],
        options["download"],
    )


# ---- columns


def _list_inputs(split: Split, inputs: str | Sequence[str] | None) -> list[str]:
    """Return the columns of inputs. Raises FedpflError where there is none, or one twice."""
    if inputs is None or isinstance(inputs, str):
        return [arrow.require_column(split, "input", inputs)]
    if not inputs or len(set(inputs)) < len(inputs):
        raise FedpflError(f"dataset.input must be columns, each once, got {list(inputs)}")
    return list(inputs)


def _require_equal_columns(splits: Sequence[Split], key: str, columns: Sequence[str]) -> None:
    """Raise FedpflError where a split lacks a column, or has another type of it."""
    for split in splits:
        for column in columns:
            arrow.require_column(split, key, column)
            if split.data.features[column] != splits[0].data.features[column]:
                raise FedpflError(
                    f"{split.origin}: column {column!r} is of another type than in split "
                    f"{splits[0].name}; save both alike, or choose with dataset.split"
                )


def _input_kind(split: Split, inputs: Sequence[str]) -> str:
    """Return what all input columns hold. Raises FedpflError where they differ, or do not fit."""
    kinds = {name: arrow.column_kind(split, name) for name in inputs}
    for name, kind in kinds.items():
        if kind not in INPUT_KINDS:
            raise FedpflError(
                f"{split.origin}: column {name!r} holds {kind}, and an input is images, texts, "
                "numbers or arrays of numbers; choose another, or convert it"
            )
        if kind != kinds[inputs[0]]:
            raise FedpflError(
                f"{split.origin}: column {inputs[0]!r} holds {kinds[inputs[0]]}, and {name!r} "
                f"holds {kind}; dataset.input must name columns of one kind"
            )
    kind = kinds[inputs[0]]
    if len(inputs) > 1 and kind in ("images", "arrays"):
        raise FedpflError(
            f"{split.origin}: {inputs[0]!r} and {inputs[1]!r} hold {kind}; dataset.input takes "
            "one column of them"
        )
    return kind


def _refuse_other_options(kind: str, size: int | None, vocabulary: int, length: int) -> None:
    """Raise FedpflError for an option that inputs of this kind have no use for."""
    options = (
        ("size", "images", size is not None),
        ("vocabulary", "texts", vocabulary != VOCABULARY),
        ("length", "texts", length != LENGTH),
    )
    for key, its_kind, is_set in options:
        if is_set and kind != its_kind:
            raise FedpflError(
                f"dataset.{key} is for {its_kind}, and dataset.input names {kind}; leave it out"
            )


# ---- inputs


def _stack_images(splits: Sequence[Split], column: str, size: int | None) -> np.ndarray:
    """Return images as uint8 `[samples, channels, height, width]`."""
    images: list[np.ndarray] = []
    for split in splits:
        images_of_split = arrow.read_images(split, column, size)
        images += images_of_split
        height, width = images[0].shape[:2]
        for row, image in enumerate(images_of_split):
            if image.shape[:2] != (height, width):
                raise FedpflError(
                    f"{split.origin}: column {column!r} has an image of {image.shape[1]} x "
                    f"{image.shape[0]} pixels in row {row}, and the first one is {width} x "
                    f"{height}; set dataset.size=... to scale all"
                )
    # A single colour image makes all of three channels, as a network takes one number of them.
    channels = max(3 if image.ndim == 3 else 1 for image in images)
    pixels = np.empty((len(images), channels, height, width), np.uint8)
    for target, image in zip(pixels, images, strict=True):
        target[:] = image.transpose(2, 0, 1) if image.ndim == 3 else image
    return pixels


def _number_texts(
    splits: Sequence[Split], columns: Sequence[str], vocabulary: int, length: int
) -> np.ndarray:
    """Return texts as ids of words that are frequent in the training part."""
    texts = []
    for split in splits:
        texts += [split_words(text) for text in arrow.read_text_column(split, columns)]
    # Words of the test part alone are unknown, as those of any later text.
    training_texts = texts[: len(texts) - count_test_rows(splits)]
    return encode_words(texts, number_words(training_texts, vocabulary), length)


def _join_arrays(splits: Sequence[Split], column: str) -> np.ndarray:
    """Return a column of arrays of all splits."""
    parts = [arrow.read_arrays(split, column) for split in splits]
    for split, part in zip(splits, parts, strict=True):
        if part.shape[1:] != parts[0].shape[1:]:
            raise FedpflError(
                f"{split.origin}: column {column!r} has arrays {list(part.shape[1:])}, and split "
                f"{splits[0].name} has {list(parts[0].shape[1:])}; save them in one shape"
            )
    return np.concatenate(parts)


# ---- labels and clients


def _number_labels(splits: Sequence[Split], column: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return labels from 0 on, and names unless these are the same numbers."""
    labels = _join_classes(splits, "label", column)
    # Only labels that occur, in their order.
    values, codes = np.unique(labels, return_inverse=True)
    names = [str(value) for value in values.tolist()]
    if arrow.column_kind(splits[0], column) == "classes":
        all_names = splits[0].data.features[column].names
        names = [all_names[value] for value in values]
    # Numbers alone are no names: they would make another fingerprint of the same samples.
    is_numbered = names == [str(number) for number in range(len(names))]
    return codes.astype(np.int64), () if is_numbered else tuple(names)


def _read_client_column(splits: Sequence[Split], column: str) -> np.ndarray:
    """Return whose each sample is: names or numbers."""
    _require_equal_columns(splits, "by", [column])
    clients = _join_classes(splits, "by", column)
    if arrow.column_kind(splits[0], column) == "classes":
        return np.array(splits[0].data.features[column].names, dtype=np.str_)[clients]
    return clients


def _join_classes(splits: Sequence[Split], key: str, column: str) -> np.ndarray:
    """Return a column of classes, whole numbers or texts of all splits."""
    kind = arrow.column_kind(splits[0], column)
    if kind not in ("classes", "numbers", "texts"):
        raise FedpflError(
            f"{splits[0].origin}: column {column!r} holds {kind}, and dataset.{key} names a column "
            "of classes, whole numbers or texts; choose another, or convert it"
        )
    classes = [_read_classes(split, column, kind) for split in splits]
    if kind == "texts":
        texts_by_split = {
            split.origin: np.unique(values).tolist()
            for split, values in zip(splits, classes, strict=True)
        }
        require_one_spelling(texts_by_split, f"dataset.{key}")
    return join_labels(classes)


def _read_classes(split: Split, column: str, kind: str) -> np.ndarray:
    """Return classes of a split. Raises FedpflError for a row that has none."""
    values = arrow.read_values(split, column)
    if values.dtype.kind == "f":
        is_whole = np.isfinite(values) & (values == values.round())
        if not is_whole.all():
            row = int(is_whole.argmin())
            raise FedpflError(
                f"{split.origin}: column {column!r} is {values[row]} in row {row}, which is no "
                "whole number; convert the column, or leave the row out"
            )
        return values.astype(np.int64)
    if kind == "classes" and (values < 0).any():
        row = int((values < 0).argmax())
        raise FedpflError(
            f"{split.origin}: column {column!r} has no class in row {row} (-1); choose other "
            "splits with dataset.split=[...], or leave the row out"
        )
    return values
