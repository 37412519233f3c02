"""Samples that a program holds in memory: `fedpfl.run(data=...)`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from fedpfl.data.datasets.shared.images import show_pixels
from fedpfl.data.datasets.shared.missing import Missing
from fedpfl.data.datasets.shared.parts import (
    Part,
    ReadOptions,
    join_parts,
    label_columns,
    split_table,
)
from fedpfl.data.datasets.shared.samples import Raw, to_floats
from fedpfl.data.datasets.shared.source import Source
from fedpfl.data.datasets.shared.tables import check_frame
from fedpfl.data.datasets.shared.texts import clean_text, to_array, to_texts
from fedpfl.data.fingerprint import fingerprint
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.tasks import CLASSIFICATION, Task

FORMS = (
    "(x, y), (x, y, groups), a torch Dataset, a pandas DataFrame, or a dict of these with an entry "
    "per client"
)
ITEMS_ASKED_TWICE = 100
"""So many items of a torch Dataset are read twice, to find random transforms."""


@dataclass(frozen=True, eq=False)
class HeldData:
    """Samples for as long as a program holds them.

    Attributes:
        parts: All samples, or those of each client.
        digest: Of all values.
    """

    parts: tuple[Part, ...]
    digest: str

    def count_groups(self, by: str | None) -> int:
        """Count the clients that the samples are from; 0 where that is not known.

        Args:
            by: The column of a table that names the client of a sample.
        """
        part = self.parts[0]
        if part.name:
            return len(self.parts)
        groups = part.groups
        if part.is_table and by in part.x:
            groups = part.x[by]
        return 0 if groups is None else len(np.unique(to_texts(groups, "data: groups")))


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
    if isinstance(data, Mapping):
        parts = []
        for key, value in data.items():
            part = _read_part(value, f"data[{key!r}]")
            parts.append(replace(part, name=clean_text(str(key))))
    else:
        parts = [_read_part(data, "data")]
    if not parts:
        raise FedpflError("data is an empty dict; give an entry per client")
    names = tuple(part.name for part in parts if part.name)
    digest = fingerprint(names, [_list_fingerprinted(part) for part in parts])
    # Equal samples are held once, by the program that gave them first.
    return _data_by_digest.setdefault(digest, HeldData(tuple(parts), digest))


def memory(  # noqa: PLR0913 - its arguments are keys of the configuration
    source: Source,
    *,
    digest: str | None = None,
    label: str | tuple[str, ...] | None = None,
    categories: tuple[str, ...] = (),
    by: str | None = None,
    missing: Missing = "refuse",
    task: Task = CLASSIFICATION,
    together: str | None = None,
) -> Raw:
    """Return the samples that a program holds.

    Args:
        source: Not used.
        digest: Of the samples.
        label: The column of a table that holds the labels; of task=multilabel one per label.
        categories: Columns of a table that are no numbers: each becomes one feature per value.
        by: The column of a table that says which client a sample is of.
        missing: What fills empty cells; indicator: the mean, beside a feature that tells.
        task: The purpose of the labels.
        together: The column of a table with equal values for samples that stay together.

    Raises:
        FedpflError: No program holds them, or they are not of one form.
    """
    held_data = _data_by_digest.get(digest or "")
    if held_data is None:
        raise FedpflError(
            "dataset=memory is for samples that a program holds, and it does not hold those of "
            "this run; give them: fedpfl.run(data=...), fedpfl.load(DIR, data=...)"
        )
    labels = label_columns(label)
    options = ReadOptions(labels, categories, by, together, task=task, missing=missing)
    return join_parts([_split_part(part, options) for part in held_data.parts], options)


def _split_part(part: Part, options: ReadOptions) -> Part:
    """Split the labels, clients and units from a part that is a table."""
    if not part.is_table:
        return part
    return replace(split_table(part.x, part.origin, options), name=part.name)


# ---- The forms of data


def _read_part(value: Any, origin: str) -> Part:
    """Return the samples of one client, or of all. Raises FedpflError for another form."""
    # ---- Step 1: a data frame, recognised by its methods.
    if hasattr(value, "columns") and hasattr(value, "iloc"):
        for name, column in value.items():
            if column.dtype == object and not all(isinstance(cell, Hashable) for cell in column):
                raise FedpflError(
                    f"{origin}: column {name!r} holds more than one value in a row; make a column "
                    "of each, or leave it out"
                )
        return Part(origin, check_frame(value, origin), np.empty(0))

    # ---- Step 2: anything else comes to arrays, with an entry per sample.
    if isinstance(value, torch.utils.data.Dataset):
        value = _read_dataset(value, origin)
    if not isinstance(value, tuple | list) or len(value) not in (2, 3):
        raise FedpflError(f"{origin} must be {FORMS}, got {type(value).__name__}")
    arrays = [
        np.atleast_1d(to_array(values, f"{origin}: {name}"))
        for name, values in zip(("x", "y", "groups"), value, strict=False)
    ]
    x, labels, *groups = arrays
    try:
        x = (
            to_floats(x, True) if x.dtype.kind == "f" else x
        )  # so that equal samples have one digest
    except ValueError as error:
        raise FedpflError(f"{origin}: {error}") from None
    return Part(origin, x, labels, groups=groups[0] if groups else None)


def _read_dataset(dataset: Any, origin: str) -> tuple[Any, Any]:
    """Return inputs and labels of a torch Dataset. Each item is read once."""
    try:
        items = [dataset[index] for index in range(len(dataset))]
        if items and isinstance(items[0], Mapping):  # its keys would be the pair
            raise TypeError("item 0 is a dict")
        inputs = [show_pixels(sample) for sample, _ in items]
        labels = [label for _, label in items]
        asked_twice = range(0, len(items), max(1, len(items) // ITEMS_ASKED_TWICE))
        is_fixed = True
        for index in asked_twice:
            sample, label = dataset[index]
            is_fixed &= np.array_equal(inputs[index], show_pixels(sample))
            is_fixed &= np.array_equal(labels[index], label)
        x, y = np.stack(inputs), np.asarray(labels)
    except Exception as error:  # a user's code may raise anything
        raise FedpflError(
            f"{origin} cannot be read as a torch Dataset of pairs (input, label) of one shape: "
            f"{error_text(error, with_class=True)}"
        ) from None
    if not is_fixed:
        raise FedpflError(
            f"{origin}: an item that is read twice differs, as its transform is random; give the "
            "Dataset without it, and set augment=..."
        )
    return x, y


def _list_fingerprinted(part: Part) -> list[Any]:
    """List the values that the digest is made of."""
    if part.is_table:
        import pandas as pd

        # Without the index, which no client's samples depend on.
        rows = pd.util.hash_pandas_object(part.x, index=False).to_numpy()
        hashes = torch.from_numpy(rows.view(np.int64).copy())
        return [[*map(str, part.x.columns)], [*map(str, part.x.dtypes)], hashes]
    return [_list_array(array) for array in (part.x, part.y, part.groups)]


def _list_array(array: np.ndarray | None) -> Any:
    if array is None:
        return None
    # As bytes, since torch has no texts, and no whole numbers of some sizes.
    as_bytes = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return [str(array.dtype), list(array.shape), torch.from_numpy(as_bytes.copy())]
