"""Parts of own data, one for each site, client or split: the one place that joins them.

Classes, clients and units of all kinds of own data are decided here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedpfl.data.datasets.shared.samples import Raw, convert_labels, to_finite_floats
from fedpfl.data.datasets.shared.texts import (
    number_texts,
    require_alike,
    require_clients,
    require_one_spelling,
    to_texts,
)
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tasks import CLASSIFICATION, MULTILABEL, Task


@dataclass(frozen=True, eq=False)
class Part:
    """The samples of one site, client or split, as they were read.

    Attributes:
        origin: Its name in messages, such as its file.
        x: Inputs `[samples, ...]`; empty before a table is encoded.
        y: Labels, `[samples]` or `[samples, labels]`.
        table: A data frame with a sample a row, before it is encoded; None of arrays.
        name: Of the client, "" where the part is not one.
        groups: A value for each sample that names its client.
        units: A value for each sample; samples with one value are kept together.
        test_from: The first sample of the test part.
    """

    origin: str
    x: np.ndarray = field(default_factory=lambda: np.empty(0))
    y: np.ndarray = field(default_factory=lambda: np.empty(0))
    table: Any = None
    name: str = ""
    groups: np.ndarray | None = None
    units: np.ndarray | None = None
    test_from: int | None = None


@dataclass(frozen=True)
class ReadOptions:
    """How own data are read.

    Attributes:
        labels: The columns of labels.
        categories: The columns that become one feature per value.
        by: The column that names the client of a sample.
        together: The column with equal values for samples that stay in one split of one client.
        size: Pixels each way of images.
        task: The purpose of the labels.
    """

    labels: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    by: str | None = None
    together: str | None = None
    size: int = 64
    task: Task = CLASSIFICATION

    @property
    def named_columns(self) -> dict[str, tuple[str, ...]]:
        """List the columns that each configuration key names."""
        return {
            "dataset.label": self.labels,
            "dataset.categories": self.categories,
            "dataset.by": (self.by,) if self.by else (),
            "partition.together": (self.together,) if self.together else (),
        }


def label_columns(label: str | Sequence[str] | None) -> tuple[str, ...]:
    """List the columns that `dataset.label` names."""
    return (label,) if isinstance(label, str) else tuple(label or ())


def join_parts(parts: Sequence[Part], options: ReadOptions, class_order: Sequence[str] = ()) -> Raw:
    """Join parts to one data set: training parts in their order, then test parts.

    Args:
        parts: Of one form.
        options: How they are read.
        class_order: Names of classes in the order that a data set declares.

    Raises:
        FedpflError: Parts differ in form, a value is missing, or a text is written in two ways.
    """
    # ---- Step 1: tables become arrays, and all arrays are of one form.
    feature_names: tuple[str, ...] = ()
    if any(part.table is not None for part in parts):
        parts, feature_names = _encode_tables(parts, options)
    else:
        for key, names in options.named_columns.items():
            if names and key != "partition.together":
                raise FedpflError(
                    f"{key} is for tables, and {Path(parts[0].origin).name} is none; leave it out"
                )
    parts = [_check_part(part, options.task) for part in parts]
    _require_equal_forms(parts)

    # ---- Step 2: classes and clients by their names.
    labels, class_names = _number_labels(parts, options, class_order)
    groups, group_names = _number_clients(parts)
    units = None
    if all(part.units is not None for part in parts):
        texts = [to_texts(part.units, f"{part.origin}: {options.together}") for part in parts]
        units, _ = number_texts(np.concatenate(texts))
    raw = Raw(
        np.concatenate([part.x for part in parts]),
        labels,
        groups,
        group_names,
        class_names=class_names,
        feature_names=feature_names,
        units=units,
    )

    # ---- Step 3: test parts behind all training parts.
    if parts[0].test_from is None:
        return raw
    is_test = np.concatenate([np.arange(len(part.x)) >= (part.test_from or 0) for part in parts])
    order = np.argsort(is_test, kind="stable")
    arrays = {"x": raw.x, "y": raw.y, "groups": groups, "units": units}
    sorted_arrays: dict[str, Any] = {
        key: array[order] for key, array in arrays.items() if array is not None
    }
    return raw._replace(**sorted_arrays, test_from=int((~is_test).sum()))


def texts_by_holder(parts: Sequence[Part], texts: Sequence[np.ndarray]) -> dict[str, list[str]]:
    """List the different texts of each part, or of each client in it."""
    import pandas as pd

    held: dict[str, list[str]] = {}
    for part, some in zip(parts, texts, strict=True):
        if part.groups is None:
            held[part.origin] = np.unique(some).tolist()
            continue
        for group, own in pd.Series(some).groupby(to_texts(part.groups, part.origin)):
            held[f"{part.origin}, {group}"] = own.unique().tolist()
    return held


def _encode_tables(
    parts: Sequence[Part], options: ReadOptions
) -> tuple[list[Part], tuple[str, ...]]:
    """Return parts with the features and labels of their tables, and the names of features."""
    from fedpfl.data.datasets.shared.tables import (
        encode_table,
        find_columns,
        name_features,
        require_column,
    )

    if any(part.table is None for part in parts):
        raise FedpflError(f"{parts[0].origin}: tables and arrays; give all clients one of them")
    keys = {"groups": ("dataset.by", options.by), "units": ("partition.together", options.together)}
    for attribute, (key, name) in keys.items():
        if name is None:
            continue
        for part in parts:
            require_column(part, key, name)
        parts = [replace(part, **{attribute: part.table[name].to_numpy()}) for part in parts]
    columns = find_columns(parts, options)
    return [encode_table(part, columns, options) for part in parts], name_features(columns)


def _check_part(part: Part, task: Task) -> Part:
    """Return a part with finite inputs and with labels of its task. Raises FedpflError."""
    x = part.x
    labels = part.y
    if not len(x):
        raise FedpflError(f"{part.origin} has no sample; leave it out")
    if len(labels) != len(x):
        raise FedpflError(f"{part.origin}: x has {len(x)} samples, and y has {len(labels)}")
    if part.test_from is not None and part.test_from not in range(1, len(x)):
        raise FedpflError(
            f"{part.origin}: test_from must be from 1 to {len(x) - 1}, got {part.test_from}"
        )
    try:
        x = to_finite_floats(x) if x.dtype.kind == "f" else x
        if task is not CLASSIFICATION:
            labels = convert_labels(labels, task)
    except ValueError as error:
        raise FedpflError(f"{part.origin}: {error}") from None
    return replace(part, x=x, y=labels)


def _require_equal_forms(parts: Sequence[Part]) -> None:
    """Raise FedpflError where parts differ in form, or only some have a test part."""
    for part in parts[1:]:
        for own, expected in zip(_describe_form(part), _describe_form(parts[0]), strict=True):
            if own != expected:
                raise FedpflError(
                    f"{part.origin}: {own}, and {Path(parts[0].origin).name}: {expected}; give all "
                    "one form"
                )


def _describe_form(part: Part) -> tuple[str, str, str]:
    """Describe the form of a part's inputs, labels and test part."""
    return (
        f"samples are {part.x.dtype} {list(part.x.shape[1:])}",
        f"labels are {list(part.y.shape[1:])} a sample" if part.y.ndim > 1 else "a label a sample",
        "it has no test_from" if part.test_from is None else "it has a test_from",
    )


def _number_labels(
    parts: Sequence[Part], options: ReadOptions, class_order: Sequence[str]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Join labels; texts become the numbers of their names."""
    if options.task is not CLASSIFICATION:
        labels = np.concatenate([part.y for part in parts])
        return labels, options.labels if options.task is MULTILABEL else ()
    flat = []
    for part in parts:
        is_column = part.y.ndim == 2 and part.y.shape[1] == 1
        flat.append(part.y[:, 0] if is_column else part.y)
        if flat[-1].ndim != 1:
            raise FedpflError(
                f"{part.origin}: y must be integers or texts [samples], got {part.y.dtype} "
                f"{list(part.y.shape)}; 0 and 1 [samples, labels] are for task=multilabel"
            )
        flat[-1] = _to_whole_numbers(flat[-1])
    if all(labels.dtype.kind in "iu" for labels in flat):
        joined = np.concatenate(flat)
        if joined.dtype.kind == "f":  # the common type of int64 and uint64
            joined = np.concatenate([labels.astype(np.uint64) for labels in flat])
        return joined, ()
    texts = [
        to_texts(labels, f"{part.origin}: label") for part, labels in zip(parts, flat, strict=True)
    ]
    all_texts = np.concatenate(texts)
    if class_order:
        names = [name for name in class_order if name in all_texts]
        numbers = {name: number for number, name in enumerate(names)}
        return np.array([numbers[text] for text in all_texts.tolist()]), tuple(names)
    held_texts = texts_by_holder(parts, texts)
    require_one_spelling(held_texts, "label")
    require_alike(held_texts)
    _require_classes(all_texts, parts[0].origin)
    return number_texts(all_texts)


def _to_whole_numbers(labels: np.ndarray) -> np.ndarray:
    """Convert floats that are whole numbers; pandas makes such floats beside an empty cell."""
    # Whole numbers from 2^53 on are not all floats, so that two classes might be one.
    if (
        labels.dtype.kind == "f"
        and (labels == labels.round()).all()
        and (abs(labels) < 2**53).all()
    ):
        return labels.astype(np.int64)
    return labels


def _require_classes(texts: np.ndarray, origin: str) -> None:
    """Raise FedpflError for a label that is a number with a fraction."""
    for text in np.unique(texts).tolist():
        if re.fullmatch(r"[+-]?\d*\.\d+(e[+-]?\d+)?", text):
            raise FedpflError(
                f"{origin}: label {text} is no class; labels are whole numbers or texts, or "
                "floats with task=regression"
            )


def _number_clients(parts: Sequence[Part]) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Number each sample's client, and name the clients; None where nothing tells them apart."""
    if all(part.name for part in parts):
        names = tuple(part.name for part in parts)
        require_clients(names, "the folder" if len(parts) > 1 else parts[0].origin)
        require_one_spelling({part.origin: [part.name] for part in parts}, "client")
        sizes = [len(part.x) for part in parts]
        return np.repeat(np.arange(len(parts)), sizes), names
    if any(part.groups is None for part in parts):
        return None, ()
    texts = [to_texts(part.groups, f"{part.origin}: groups") for part in parts]
    distinct = [np.unique(own).tolist() for own in texts]
    origins = [part.origin for part in parts]
    require_one_spelling(dict(zip(origins, distinct, strict=True)), "client")
    return number_texts(np.concatenate(texts))
