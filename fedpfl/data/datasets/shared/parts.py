"""Parts of own data, one for each site, client or split: the one place that joins them.

Classes, clients and units of all kinds of own data are decided here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedpfl.data.datasets.shared.missing import Missing
from fedpfl.data.datasets.shared.samples import Raw, convert_labels, require_test_part, to_floats
from fedpfl.data.datasets.shared.tables import (
    Columns,
    check_frame,
    encode_features,
    name_features,
    read_numbers,
)
from fedpfl.data.datasets.shared.texts import (
    clean_text,
    number_texts,
    require_alike,
    require_clients,
    require_one_spelling,
    to_texts,
)
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tasks import CLASSIFICATION, MULTILABEL, NEXT_TOKEN, SURVIVAL, Task

FRACTION = re.compile(r"[+-]?\d*\.\d+(e[+-]?\d+)?")


@dataclass(frozen=True, eq=False)
class Part:
    """The samples of one site, client or split, as they were read.

    Attributes:
        origin: Its name in messages, such as its file.
        x: Inputs `[samples, ...]`, or a data frame of features that are not yet encoded.
        y: Labels, `[samples]` or `[samples, labels]`.
        name: Of the client, "" where the part is not one.
        groups: A value for each sample that names its client.
        units: A value for each sample; samples with one value are kept together.
        test_from: The first sample of the test part.
    """

    origin: str
    x: Any
    y: np.ndarray
    name: str = ""
    groups: np.ndarray | None = None
    units: np.ndarray | None = None
    test_from: int | None = None

    @property
    def is_table(self) -> bool:
        """Return True where features are not yet encoded."""
        return not isinstance(self.x, np.ndarray)


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
        missing: What fills absent values of inputs.
    """

    labels: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    by: str | None = None
    together: str | None = None
    size: int = 64
    task: Task = CLASSIFICATION
    missing: Missing = "refuse"

    @property
    def may_lack_values(self) -> bool:
        """Return True where values of inputs may be absent."""
        return self.missing != "refuse"


def label_columns(label: str | Sequence[str] | None) -> tuple[str, ...]:
    """List the columns that `dataset.label` names."""
    return (label,) if isinstance(label, str) else tuple(label or ())


def split_table(frame: Any, origin: str, options: ReadOptions) -> Part:
    """Take labels, clients and units out of a data frame; the other columns are features.

    Raises:
        FedpflError: A column is absent, or labels have no value.
    """
    # ---- Step 1: the columns that the configuration names.
    table = check_frame(frame, origin)
    labels = options.labels
    if options.task is NEXT_TOKEN and labels:
        raise FedpflError("dataset.label has no use with task=next_token; leave it out")
    if not labels and options.task is not NEXT_TOKEN:
        examples = ", ".join(table.columns[:5])
        raise FedpflError(f"dataset.label must name the column of the labels, such as {examples}")
    if len(labels) > 1 and options.task not in (MULTILABEL, SURVIVAL):
        raise FedpflError(
            f"dataset.label names {len(labels)} columns, which task={options.task.name} has no use "
            "for; name one, or set task=multilabel"
        )
    extra_columns = [*filter(None, (options.by, options.together))]
    for name in (*labels, *extra_columns, *options.categories):
        if name not in table.columns:
            columns_text = ", ".join(table.columns[:5])
            raise FedpflError(f"{origin} has no column {name!r}; it has {columns_text}")
    for name in {*options.categories} & {*labels, *extra_columns}:
        raise FedpflError(f"dataset.categories has {name}, which is no feature; leave it out there")

    # ---- Step 2: labels by the task.
    if options.task is CLASSIFICATION:
        y = table[labels[0]].to_numpy()
    elif options.task is NEXT_TOKEN:
        y = np.zeros((len(table), 1), np.int64)  # which those of the texts replace
    else:
        y = np.stack([read_numbers(table[name], origin, is_label=True) for name in labels], 1)
    return Part(
        origin,
        table.drop(columns=[*labels, *extra_columns]),
        y,
        groups=table[options.by].to_numpy() if options.by else None,
        units=table[options.together].to_numpy() if options.together else None,
    )


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
    features: tuple[str, ...] = ()
    tables = [part for part in parts if part.is_table]
    if tables and len(tables) < len(parts):
        raise FedpflError(f"{tables[0].origin} is a table, and not all are; give all one kind")
    if tables:
        columns = find_columns(parts, options)
        features = name_features(columns)
        parts = [encode_part(part, columns, options) for part in parts]
    elif options.labels or options.categories or options.by or options.missing == "indicator":
        name = Path(parts[0].origin).name
        raise FedpflError(
            "dataset.label, by, categories and missing=indicator are for tables, and "
            f"{name} is none"
        )
    parts = [check_part(part, options) for part in parts]
    _require_equal_forms(parts)

    # ---- Step 2: classes and clients by their names.
    x = np.concatenate([part.x for part in parts])
    labels, class_names = _number_labels(parts, options, class_order)
    groups, group_names = _number_clients(parts)
    units = None
    if options.together and all(part.units is not None for part in parts):
        units, _ = number_texts(_join_texts(parts, [part.units for part in parts], "unit"))

    # ---- Step 3: test parts behind all training parts.
    test_from = None
    if parts[0].test_from is not None:
        is_test = np.concatenate(
            [np.arange(len(part.x)) >= (part.test_from or 0) for part in parts]
        )
        order = np.argsort(is_test, kind="stable")
        test_from = int((~is_test).sum())
        x = x[order]
        labels = labels[order]
        groups = None if groups is None else groups[order]
        units = None if units is None else units[order]
    missing = options.missing if options.may_lack_values else ""
    return Raw(x, labels, groups, group_names, test_from, class_names, features, units, missing)


def find_columns(parts: Sequence[Part], options: ReadOptions) -> Columns:
    """Find the features of tables, and the values of categories in all of them together.

    Raises:
        FedpflError: Tables differ in their columns.
    """
    names = [*parts[0].x.columns]
    if not names:
        raise FedpflError(f"{parts[0].origin} has no column besides dataset.label")
    for part in parts:
        difference = sorted({*part.x.columns} ^ {*names})
        if difference:
            raise FedpflError(
                f"{part.origin} differs from {Path(parts[0].origin).name} in columns "
                f"{', '.join(difference[:5])}"
            )
    levels = {}
    for name in options.categories:
        texts = _join_texts(parts, [part.x[name] for part in parts], name, may_lack_values=True)
        levels[name] = np.unique(texts).tolist()
    empty: list[str] = []
    if options.missing == "indicator":
        numbers = [name for name in names if name not in levels]
        empty = [name for name in numbers if any(part.x[name].isna().any() for part in parts)]
    return Columns(names, levels, empty)


def encode_part(part: Part, columns: Columns, options: ReadOptions) -> Part:
    """Return a part with features in place of its table. Raises FedpflError for a wrong cell."""
    x = encode_features(part.x, columns, part.origin, options.may_lack_values)
    return replace(part, x=x)


def check_part(part: Part, options: ReadOptions) -> Part:
    """Return a part with finite inputs and with labels of its task. Raises FedpflError."""
    x, task = part.x, options.task
    if not len(x):
        raise FedpflError(f"{part.origin} has no sample; leave it out")
    for name in ("y", "groups", "units"):
        values = getattr(part, name)
        if values is not None and len(values) != len(x):
            raise FedpflError(
                f"{part.origin}: x has {len(x)} samples, and {name} has {len(values)}"
            )
    try:
        require_test_part(part.test_from, len(x))
        labels = part.y if task is CLASSIFICATION else convert_labels(part.y, task)
        x = to_floats(x, options.may_lack_values) if x.dtype.kind == "f" else x
    except ValueError as error:
        raise FedpflError(f"{part.origin}: {error}") from None
    return replace(part, x=x, y=labels)


def _require_equal_forms(parts: Sequence[Part]) -> None:
    """Raise FedpflError where parts differ in form, or only some have a test part."""
    first_form = _describe_form(parts[0])
    for part in parts[1:]:
        form = _describe_form(part)
        if form != first_form:
            name = Path(parts[0].origin).name
            raise FedpflError(f"{part.origin}: {form}, and {name}: {first_form}; give all one form")


def _describe_form(part: Part) -> str:
    """Describe the form of a part's inputs, labels and test part."""
    labels_text = f"labels {list(part.y.shape[1:])}" if part.y.ndim > 1 else "a label"
    test_text = "no test_from" if part.test_from is None else "a test_from"
    return f"samples are {part.x.dtype} {list(part.x.shape[1:])} with {labels_text}, {test_text}"


def _number_labels(
    parts: Sequence[Part], options: ReadOptions, class_order: Sequence[str]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Join labels; texts become the numbers of their names."""
    # ---- Step 1: whole numbers, and labels of other tasks, are numbers already.
    if options.task is not CLASSIFICATION:
        labels = np.concatenate([part.y for part in parts])
        return labels, options.labels if options.task is MULTILABEL else ()
    labels_by_part = [_to_whole_numbers(part) for part in parts]
    if all(labels.dtype.kind in "iu" for labels in labels_by_part):
        return np.concatenate([labels.astype(np.int64) for labels in labels_by_part]), ()

    # ---- Step 2: texts in one spelling, in the order that is declared or found.
    if class_order:
        # Declared names may differ in case alone, as letters do.
        texts: list[str] = []
        for part in parts:
            texts += to_texts(part.y, f"{part.origin}: label").tolist()
        found_names = {*texts}
        ordered_names = dict.fromkeys(map(clean_text, class_order))
        names = [name for name in ordered_names if name in found_names]
        numbers = {name: number for number, name in enumerate(names)}
        return np.array([numbers[text] for text in texts]), tuple(names)
    labels, class_names = number_texts(_join_texts(parts, labels_by_part, "label"))
    for name in class_names:
        if FRACTION.fullmatch(name):
            raise FedpflError(
                f"{parts[0].origin}: label {name} is no class; labels are whole numbers or texts, "
                "or floats with task=regression"
            )
    return labels, class_names


def _to_whole_numbers(part: Part) -> np.ndarray:
    """Return labels `[samples]`, floats that are whole numbers as integers."""
    labels = part.y[:, 0] if part.y.shape[1:] == (1,) else part.y
    if labels.ndim != 1:
        raise FedpflError(
            f"{part.origin}: y must be integers or texts [samples], got {labels.dtype} "
            f"{list(labels.shape)}; 0 and 1 [samples, labels] are for task=multilabel"
        )
    # pandas makes such floats beside an empty cell.
    if labels.dtype.kind == "f" and (labels == labels.round()).all():
        return labels.astype(np.int64)
    return labels


def _number_clients(parts: Sequence[Part]) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Number each sample's client, and name the clients; None where nothing tells them apart."""
    names = [part.name for part in parts]
    if any(names):
        for part in parts:
            if part.groups is not None:
                raise FedpflError(f"{part.origin} has groups, and is one client; leave them out")
        require_clients(names, "the folder" if len(parts) > 1 else parts[0].origin)
        require_one_spelling({part.origin: [part.name] for part in parts}, "client")
        return np.repeat(np.arange(len(parts)), [len(part.x) for part in parts]), tuple(names)
    if any(part.groups is None for part in parts):
        return None, ()
    texts = _join_texts(parts, [part.groups for part in parts], "client")
    groups, group_names = number_texts(texts)
    require_clients(group_names, parts[0].origin)
    return groups, group_names


def _join_texts(
    parts: Sequence[Part], values: Sequence[Any], noun: str, may_lack_values: bool = False
) -> np.ndarray:
    """Join the values of all parts as texts in one spelling.

    Args:
        parts: The parts.
        values: Those of each part, `[samples]`.
        noun: The name of a value in messages.
        may_lack_values: Whether a value may be missing, which is left out.

    Raises:
        FedpflError: A value is missing, or two parts, or clients in them, write one in two ways.
    """
    import pandas as pd

    texts_by_part: list[np.ndarray] = []
    texts_by_holder: dict[str, list[str]] = {}
    for part, part_values in zip(parts, values, strict=True):
        groups = part.groups
        if may_lack_values:
            is_there = part_values.notna().to_numpy()
            part_values = part_values[is_there]
            groups = None if groups is None else groups[is_there]
        texts = to_texts(part_values, f"{part.origin}: {noun}")
        texts_by_part.append(texts)
        holders = np.full(len(texts), part.origin)
        if groups is not None and noun != "client":
            holders = np.char.add(f"{part.origin}, ", to_texts(groups, part.origin))
        pairs = pd.DataFrame({"holder": holders, "text": texts}).drop_duplicates()
        for holder, rows in pairs.groupby("holder")["text"]:
            texts_by_holder[str(holder)] = rows.tolist()
    require_one_spelling(texts_by_holder, noun)
    if noun == "label":
        require_alike(texts_by_holder)
    return np.concatenate(texts_by_part)
