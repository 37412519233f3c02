"""Parts of a data set, such as what each site holds, which must be of one form to be joined."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
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
    """Raise FedpflError where parts differ in form, or write a label in two ways."""
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
    texts_by_part: dict[str, list[str]] = {}
    for part in parts:
        if _label_kind(part) == "texts":
            texts_by_part[part.origin] = np.unique(part.labels).tolist()
    require_one_spelling(texts_by_part, "label")


def join_labels(labels: Sequence[np.ndarray]) -> np.ndarray:
    """Join the labels of parts; whole numbers stay whole, whatever types they have."""
    all_labels = np.concatenate(labels)
    are_whole = all(part.dtype.kind in "iu" for part in labels)
    if not are_whole or all_labels.dtype.kind != "f" or all_labels.ndim > 1:
        return all_labels
    # The common type of int64 and uint64 is a float, to which large numbers that differ are one.
    values = [value for part in labels for value in part.tolist()]
    return np.array(values, dtype=np.int64 if max(values) < 2**63 else object)


def require_one_spelling(texts_by_part: Mapping[str, Iterable[str]], noun: str) -> None:
    """Raise FedpflError where two parts write a text in two ways.

    It would be two classes, or two values of a category. Where one part has both, as letters `a` and
    `A`, they are meant to be two.

    Args:
        texts_by_part: What messages call each part, and its labels or values of a category.
        noun: What messages call a text.
    """
    # ---- Step 1: spaces around a text are never meant.
    parts_by_text: dict[str, list[str]] = {}
    for origin, texts in texts_by_part.items():
        for text in texts:
            if text != text.strip():
                raise FedpflError(
                    f"{origin}: {noun} {text!r} begins or ends with a space; leave it out"
                )
            parts_by_text.setdefault(text, []).append(origin)

    # ---- Step 2: two spellings that no part has side by side.
    spellings_by_text: dict[str, list[str]] = {}
    for text in parts_by_text:
        spellings_by_text.setdefault(text.casefold(), []).append(text)
    for spellings in spellings_by_text.values():
        origins = [origin for text in spellings for origin in parts_by_text[text]]
        if len(spellings) > 1 and len(set(origins)) == len(origins):
            first, second, *_ = spellings
            raise FedpflError(
                f"{parts_by_text[second][0]}: {noun} {second!r} is {first!r} at "
                f"{Path(parts_by_text[first][0]).name}; write it alike"
            )


def _label_kind(part: LabelledPart) -> str:
    return "texts" if part.labels.dtype.kind == "U" else "numbers"


def _count_labels(part: LabelledPart) -> str:
    if part.labels.ndim == 1:
        return "one label"
    return f"labels {list(part.labels.shape[1:])}"
