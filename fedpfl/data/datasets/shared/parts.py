"""Parts of a data set, such as what each site holds, which must be of one form to be joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedpfl.ground.errors import FedpflError


class LabelledPart(NamedTuple):
    """Hold the samples of one site or client.

    Attributes:
        origin: What messages call it, such as its file.
        short_origin: The same where it is the other of two.
        x: `[samples, ...]`.
        labels: `[samples]`, or `[samples, labels]`.
    """

    origin: str
    short_origin: str
    x: np.ndarray
    labels: np.ndarray


def require_equal_forms(parts: Sequence[LabelledPart]) -> None:
    """Raise FedpflError, by name, for samples or labels of another form than the first part's."""
    reference = parts[0]
    other = reference.short_origin
    for part in parts[1:]:
        if part.x.shape[1:] != reference.x.shape[1:] or part.x.dtype != reference.x.dtype:
            raise FedpflError(
                f"{part.origin}: samples are {part.x.dtype} {list(part.x.shape[1:])}, and those of "
                f"{other} are {reference.x.dtype} {list(reference.x.shape[1:])}"
            )
        if _label_kind(part) != _label_kind(reference):
            raise FedpflError(
                f"{part.origin}: labels are {_label_kind(part)}, and those of {other} are "
                f"{_label_kind(reference)}"
            )
        if part.labels.shape[1:] != reference.labels.shape[1:]:
            raise FedpflError(
                f"{part.origin}: samples have {_count_labels(part)}, and those of {other} have "
                f"{_count_labels(reference)}"
            )


def _label_kind(part: LabelledPart) -> str:
    return "texts" if part.labels.dtype.kind == "U" else "numbers"


def _count_labels(part: LabelledPart) -> str:
    if part.labels.ndim == 1:
        return "one label"
    return f"labels {list(part.labels.shape[1:])}"
