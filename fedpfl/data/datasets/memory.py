"""Samples that a program holds in memory: `fedpfl.run(data=...)`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from fedpfl.data.datasets.shared.parts import (
    LabelledPart,
    join_labels,
    require_equal_forms,
    require_one_spelling,
)
from fedpfl.data.datasets.shared.samples import Raw, number_groups, to_finite_floats
from fedpfl.data.datasets.shared.source import Source
from fedpfl.data.datasets.shared.tables import Table, encode_tables, label_columns
from fedpfl.data.datasets.shared.values import NUMBERS, to_array
from fedpfl.data.fingerprint import fingerprint
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tasks import CLASSIFICATION, MULTILABEL, Task

if TYPE_CHECKING:
    import pandas as pd

FORMS = (
    "(x, y), (x, y, groups), a torch Dataset, a pandas DataFrame, or a dict of these with an entry "
    "per client"
)


@dataclass(frozen=True, eq=False)
class Part:
    """Samples of one client, or all of them.

    Attributes:
        origin: What messages call it, such as `data['hospital_07']`.
        x: Inputs `[samples, ...]`; None of a table.
        y: Labels `[samples]`; None of a table.
        groups: Any value per sample that says whose it is, if there are clients in the part.
        frame: A table with a sample a row.
    """

    origin: str
    x: np.ndarray | None = None
    y: np.ndarray | None = None
    groups: np.ndarray | None = None
    frame: pd.DataFrame | None = None

    @property
    def samples(self) -> int:
        """Return the number of samples."""
        return len(self.frame) if self.frame is not None else len(self.x)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class HeldData:
    """Samples for as long as a program holds them.

    Attributes:
        parts: All samples, or those of each client.
        names: The clients' names; empty where the samples are one part.
        digest: Of all values.
    """

    parts: tuple[Part, ...]
    names: tuple[str, ...]
    digest: str

    def count_groups(self, by: str | None) -> int:
        """Return how many clients the samples are from; 0 where that is not known.

        Args:
            by: The column of a table that says whose a sample is.
        """
        if self.names:
            return len(self.names)
        (part,) = self.parts
        if part.groups is not None:
            return len(number_groups(part.groups)[1])
        if part.frame is not None and by in part.frame:
            return int(part.frame[by].nunique())
        return 0


_data_by_digest: WeakValueDictionary[str, HeldData] = WeakValueDictionary()
"""What programs hold, by digest, for the reader."""


def hold_data(data: Any) -> HeldData:
    """Make samples readable as `dataset=memory` while the answer lives.

    Args:
        data: One of FORMS.

    Raises:
        FedpflError: It has another form.
    """
    if isinstance(data, HeldData):
        return data
    names: tuple[str, ...] = ()
    if isinstance(data, Mapping):
        if not data:
            raise FedpflError("data is an empty dict; give an entry per client")
        names = tuple(map(str, data))
        parts = tuple(_read_part(value, f"data[{key!r}]") for key, value in data.items())
        for part in parts:
            if part.groups is not None:
                raise FedpflError(f"{part.origin} has groups, and is one client; leave them out")
    else:
        parts = (_read_part(data, "data"),)
    digest = fingerprint(names, [_fingerprinted(part) for part in parts])
    held_data = HeldData(parts, names, digest)
    # Equal samples are held once, by whoever gave them first.
    return _data_by_digest.setdefault(digest, held_data)


def memory(
    source: Source,
    *,
    digest: str | None = None,
    label: str | tuple[str, ...] | None = None,
    categories: tuple[str, ...] = (),
    by: str | None = None,
    task: Task = CLASSIFICATION,
) -> Raw:
    """Return the samples that a program holds.

    Args:
        source: Not used.
        digest: Of the samples.
        label: The column of a table that holds the labels; of task=multilabel one per label.
        categories: Columns of a table that are no numbers: each becomes one feature per value.
        by: The column of a table that says which client a sample is of.
        task: What the labels are for.

    Raises:
        FedpflError: No program holds them, or they are not of one form.
    """
    # ---- Step 1: what the program still holds.
    held_data = _data_by_digest.get(digest or "")
    if held_data is None:
        raise FedpflError(
            "dataset=memory is for samples that a program holds, and it does not hold those of "
            "this run; give them: fedpfl.run(data=...), fedpfl.load(DIR, data=...)"
        )

    # ---- Step 2: data frames, whose columns are encoded.
    parts = held_data.parts
    if all(part.frame is not None for part in parts):
        return _join_tables(held_data, label_columns(label), categories, by, task)
    for key, value in (("label", label), ("categories", categories), ("by", by)):
        if value:
            raise FedpflError(f"dataset.{key} is for data frames, and data is none; leave it out")

    # ---- Step 3: arrays, which must be of one form.
    if any(part.frame is not None for part in parts):
        raise FedpflError("data has data frames and arrays; give all clients one of them")
    require_equal_forms(
        [
            LabelledPart(part.origin, part.origin, part.x, part.y)
            for part in parts
            if part.x is not None and part.y is not None
        ]
    )
    labels, class_names = _number_labels(parts)
    groups, group_names = _number_clients(held_data)
    x = np.concatenate([part.x for part in parts if part.x is not None])
    return Raw(x, labels, groups, group_names, class_names=class_names)


# ---- What a user gives


def _read_part(value: Any, origin: str) -> Part:
    """Return the samples of one client, or of all. Raises FedpflError for what is none."""
    # ---- Step 1: a data frame, known by what it can do: pandas need not be installed.
    if hasattr(value, "columns") and hasattr(value, "iloc"):
        return Part(origin, frame=_check_frame(value, origin))

    # ---- Step 2: anything else comes to arrays, with an entry per sample.
    if isinstance(value, torch.utils.data.Dataset):
        value = _read_dataset(value, origin)
    if not isinstance(value, tuple | list) or len(value) not in (2, 3):
        raise FedpflError(f"{origin} must be {FORMS}, got {type(value).__name__}")
    names = ("x", "y", "groups")
    x, y, *groups = (
        to_array(array, f"{origin}: {name}") for name, array in zip(names, value, strict=False)
    )
    for name, array in (("x", x), ("y", y), *(("groups", array) for array in groups)):
        if not array.ndim:
            raise FedpflError(f"{origin}: {name} must be an array with an entry per sample")
        if len(array) != len(x):
            raise FedpflError(f"{origin}: x has {len(x)} samples, and {name} has {len(array)}")
    if not len(x):
        raise FedpflError(f"{origin} has no sample; there must be at least one")

    # ---- Step 3: floats must be finite, and each sample is somebody's.
    try:
        if x.dtype.kind == "f":
            x = to_finite_floats(x)
        for array in groups:
            number_groups(array)
    except ValueError as error:
        raise FedpflError(f"{origin}: {error}") from None
    return Part(origin, x, y, groups[0] if groups else None)


def _read_dataset(dataset: Any, origin: str) -> tuple[Any, Any]:
    """Return inputs and labels of a torch Dataset, all of whose items are read."""
    try:
        items = [dataset[index] for index in range(len(dataset))]
        if items and isinstance(items[0], Mapping):  # its keys would be the pair
            raise TypeError(f"item 0 is a {type(items[0]).__name__}")
        inputs = [np.asarray(sample) for sample, _ in items]
        labels = [label for _, label in items]
        return np.stack(inputs), np.asarray(labels)
    except FedpflError:
        raise
    except Exception as error:  # whatever a user's code raises
        raise FedpflError(
            f"{origin} cannot be read as a torch Dataset of pairs (input, label) of one shape: "
            f"{type(error).__name__}: {error}".splitlines()[0]
        ) from None


def _check_frame(frame: pd.DataFrame, origin: str) -> pd.DataFrame:
    """Return a data frame with columns of numbers or texts. Raises FedpflError for another."""
    import pandas as pd

    if not len(frame):
        raise FedpflError(f"{origin} has no row; there must be at least one sample")
    if not frame.columns.is_unique:
        repeated = frame.columns[frame.columns.duplicated()][0]
        raise FedpflError(f"{origin} has column {repeated!r} twice; rename or leave out one")
    # Numbers may be Python's objects.
    dtypes = {}
    for name, column in frame.items():
        if column.dtype != object:
            continue
        if not all(isinstance(value, Hashable) for value in column):
            raise FedpflError(
                f"{origin}: column {name!r} holds more than one value in a row; make a column of "
                "each, or leave it out"
            )
        if pd.api.types.infer_dtype(column) in NUMBERS:
            dtypes[name] = column.infer_objects().dtype
    return frame.astype(dtypes)


def _fingerprinted(part: Part) -> list[Any]:
    """Return what the digest is made of."""
    if part.frame is not None:
        import pandas as pd

        # Without the index, which no client's samples depend on.
        rows = pd.util.hash_pandas_object(part.frame, index=False).to_numpy()
        hashes = torch.from_numpy(rows.view(np.int64).copy())
        return [
            list(map(str, part.frame.columns)),
            list(map(str, part.frame.dtypes)),
            hashes,
        ]
    return [_fingerprinted_array(array) for array in (part.x, part.y, part.groups)]


def _fingerprinted_array(array: np.ndarray | None) -> Any:
    if array is None:
        return None
    # As bytes, since torch has no texts, and no whole numbers of some sizes.
    as_bytes = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return [
        str(array.dtype),
        list(array.shape),
        torch.from_numpy(as_bytes.copy()),
    ]


# ---- What becomes of it


def _number_labels(parts: Sequence[Part]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return all labels, texts by their number among the sorted names, and these names."""
    labels = join_labels([part.y for part in parts if part.y is not None])
    if labels.dtype.kind != "U":
        return labels, ()
    return number_groups(labels)


def _number_clients(held_data: HeldData) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Return each sample's client, and the clients' names; None where nobody says."""
    if held_data.names:
        sizes = [part.samples for part in held_data.parts]
        return np.repeat(np.arange(len(sizes)), sizes), held_data.names
    (part,) = held_data.parts
    if part.groups is None:
        return None, ()
    if part.groups.ndim != 1:
        raise FedpflError(f"data: groups must be [samples], got {list(part.groups.shape)}")
    return number_groups(part.groups)


def _join_tables(
    held_data: HeldData,
    label: tuple[str, ...],
    categories: tuple[str, ...],
    by: str | None,
    task: Task,
) -> Raw:
    """Join data frames, by their own clients or by a column's values."""
    # ---- Step 1: whose each row is
    frames = [part.frame for part in held_data.parts if part.frame is not None]
    groups, group_names = _number_clients(held_data)
    if by is not None:
        if held_data.names:
            raise FedpflError("dataset.by is for one data frame, and data has one per client")
        if by not in frames[0]:
            raise FedpflError(f"dataset.by={by} is no column of data")
        missing = frames[0][by].isna().to_numpy()
        if missing.any():
            row = int(np.flatnonzero(missing)[0]) + 1
            raise FedpflError(f"data: column {by!r} has no value in row {row}; fill it in")
        groups, group_names = number_groups(frames[0][by].map(str).to_numpy(np.str_))
        frames = [frames[0].drop(columns=by)]

    # ---- Step 2: features as numbers, alike for all clients
    tables = [
        Table(part.origin, frame) for part, frame in zip(held_data.parts, frames, strict=True)
    ]
    encoded = encode_tables(tables, label, categories, task)

    # ---- Step 3: labels as numbers
    labels = [Part(table.origin, y=y) for table, (_, y) in zip(tables, encoded.parts, strict=True)]
    texts_by_part = {
        part.origin: np.unique(part.y).tolist()
        for part in labels
        if part.y is not None and part.y.dtype.kind == "U"
    }
    require_one_spelling(texts_by_part, "label")
    numbers, class_names = _number_labels(labels)
    if task is MULTILABEL:
        class_names = label
    return Raw(
        x=np.concatenate([features for features, _ in encoded.parts]),
        y=numbers,
        groups=groups,
        group_names=group_names,
        class_names=class_names,
        feature_names=encoded.features,
    )
