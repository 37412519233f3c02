"""One rule for what users write: labels, categories, groups and clients are texts as they stand."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedpfl.ground.errors import FedpflError, choices_text, error_text

log = logging.getLogger(__name__)

WHOLE_FLOAT = re.compile(r"([+-]?\d+)\.0+")
WHOLE_NUMBER = re.compile(r"\+?(-?)0*(\d+)")
UNSEEN_CHARACTERS = "\u00ad\u200b\u200c\u200d\u2060\ufeff"
LOOK_ALIKES = str.maketrans(
    "\u2010\u2012\u2013\u2014\u2212\u2018\u2019", "-----''", UNSEEN_CHARACTERS
)
"""Dashes and quotes that programs put in the place of those on a keyboard."""
SPLIT_NAMES = {"train", "training", "test", "testing", "val", "valid", "validation", "dev"}
"""Names of parts of a data set, which no client has."""


def to_array(values: Any, origin: str) -> np.ndarray:
    """Convert values to an array, without a copy if they are one.

    Raises:
        FedpflError: Values are missing, or are neither numbers nor texts.
    """
    if isinstance(values, Tensor):
        try:
            return values.detach().cpu().numpy()
        except Exception as error:  # as many kinds as there are kinds of tensors
            raise FedpflError(
                f"{origin} is a tensor that NumPy cannot hold ({error_text(error)[:160]}); give a "
                "dense one of float32 or integers"
            ) from None
    if isinstance(values, np.ma.MaskedArray):  # NumPy would show hidden values
        require_values(np.ma.getmaskarray(values), origin)
    try:
        array = np.asarray(values)
        if array.dtype.kind == "U" and not isinstance(values, np.ndarray):
            array = np.asarray(values, dtype=object)  # numbers among texts are texts already
    except ValueError:
        raise FedpflError(f"{origin} must have samples of one shape") from None
    if array.dtype == object and array.ndim:
        return _convert_objects(array, origin)
    return array


def require_values(
    is_missing: np.ndarray, origin: str, noun: str = "sample", first: int = 0, advice: str = ""
) -> None:
    """Raise FedpflError for the first missing value of an array."""
    if is_missing.any():
        position = int(np.argwhere(is_missing)[0][0]) + first
        raise FedpflError(
            f"{origin} has no value in {noun} {position}; fill it in, or leave the {noun} out{advice}"
        )


def _convert_objects(array: np.ndarray, origin: str) -> np.ndarray:
    """Convert Python's objects to an array of numbers or of texts."""
    import pandas as pd

    require_values(pd.isna(array), origin)
    kinds = {type(item) for item in array.flat}
    are_texts = {issubclass(kind, str) for kind in kinds}
    if are_texts == {True}:
        return array.astype(np.str_)
    converted = array if True in are_texts else np.array(array.tolist())
    if converted.dtype.kind not in "biuf" or converted.ndim > array.ndim:
        kinds_text = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise FedpflError(f"{origin} holds values of {kinds_text}; give numbers or texts")
    return converted


def to_texts(values: Any, origin: str) -> np.ndarray:
    """Convert labels, categories or groups to texts in one spelling.

    Letters are composed (NFC), spaces around a text and repeated ones are left out, and 2.0 is 2.
    The log tells if that changes a text.

    Raises:
        FedpflError: A value is missing, or is neither number nor text.
    """
    import pandas as pd

    require_values(np.asarray(pd.isna(values)), origin, "row", 1)
    distinct, codes = np.unique(to_array(values, origin), return_inverse=True)
    spellings = distinct.astype(np.str_).tolist()
    texts = np.array([clean_text(text) for text in spellings], dtype=np.str_)
    require_values((texts == "")[codes], origin, "row", 1)
    if distinct.dtype.kind == "U" and spellings != texts.tolist():
        log.warning(
            "%s: texts are read with single spaces, composed letters and without .0, such as %r",
            origin,
            next(text for text in spellings if text != clean_text(text)),
        )
    return texts[codes]


def clean_text(text: str) -> str:
    """Compose letters, and strip outer spaces, repeated spaces and a number's .0."""
    text = " ".join(unicodedata.normalize("NFC", text).split())
    match = WHOLE_FLOAT.fullmatch(text)
    return match[1] if match else text


def sort_texts(texts: Iterable[str]) -> list[str]:
    """Sort different texts: by number if all are whole numbers, else by alphabet."""
    distinct = sorted({*texts})
    if all(text.lstrip("+-").isdecimal() for text in distinct):
        distinct.sort(key=int)
    return distinct


def number_texts(texts: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Number texts 0, 1, ... in the order of `sort_texts`, and return the numbers and the names."""
    distinct, codes = np.unique(texts, return_inverse=True)
    names = sort_texts(distinct.tolist())
    number_by_text = {name: number for number, name in enumerate(names)}
    numbers = np.array([number_by_text[text] for text in distinct.tolist()], np.int64)
    return numbers[codes], tuple(names)


def require_one_spelling(texts_by_part: Mapping[str, Iterable[str]], noun: str) -> None:
    """Raise FedpflError for two texts that differ in case, look-alikes or leading zeros alone.

    10 and 010 in one part are two codes; 1 at one site and 01 at a second are one.

    Args:
        texts_by_part: The texts of each site, client or split, by its name in messages.
        noun: The name of a text in messages.
    """
    origins_by_text: dict[str, list[str]] = {}
    for origin, texts in texts_by_part.items():
        for text in dict.fromkeys(texts):
            origins_by_text.setdefault(text, []).append(origin)
    text_by_key: dict[str, str] = {}
    for text, origins in origins_by_text.items():
        key = unicodedata.normalize("NFKC", text).casefold().translate(LOOK_ALIKES)
        number = WHOLE_NUMBER.fullmatch(key)
        earlier = text_by_key.setdefault("".join(number.groups()) if number else key, text)
        earlier_origins = origins_by_text[earlier]
        are_codes = number and not {*origins}.isdisjoint(earlier_origins)
        if earlier != text and not are_codes:
            raise FedpflError(
                f"{origins[0]}: {noun} {text!r} is {earlier!r} at {Path(earlier_origins[0]).name}; "
                "write it alike, or rename one"
            )


def require_alike(texts_by_part: Mapping[str, Iterable[str]]) -> None:
    """Raise FedpflError where labels are numbers in one part, and texts in a second."""
    kinds: dict[bool, str] = {}
    for origin, texts in texts_by_part.items():
        are_numbers = {text.lstrip("+-").isdecimal() for text in texts}
        if len(are_numbers) == 1:
            kinds.setdefault(are_numbers.pop(), origin)
    if len(kinds) == 2:
        raise FedpflError(
            f"{kinds[False]}: labels are texts, and those of {Path(kinds[True]).name} are numbers; "
            "write them alike"
        )


def require_clients(names: Sequence[str], origin: str) -> None:
    """Refuse clients that are parts of a data set: train and test, or train_set and test_set."""
    words = {re.sub(r"[ _-]?(set|data|split)$", "", name.lower()) for name in names}
    if words and words <= SPLIT_NAMES:
        raise FedpflError(
            f"{origin} has {' and '.join(names)}, which are parts of a data set and no sites or "
            "clients; give the samples of all clients with test_from, or one entry per client"
        )


def find_class(names: Sequence[str], classes: int, value: int | str, key: str) -> int:
    """Find the class that a user names: by its name, or by its number if classes have none.

    Where names are no numbers, a number is a place among them.

    Args:
        names: Of the classes, () where they are numbers alone.
        classes: Number of classes.
        value: The class.
        key: The configuration key, for messages.

    Raises:
        FedpflError: There is no such class.
    """
    text = clean_text(str(value))
    if text in names:
        return names.index(text)
    are_texts = not any(name.isdecimal() for name in names)
    if are_texts and text.isdecimal() and int(text) < classes:
        return int(text)
    if names:
        raise FedpflError(f"{key} must be {choices_text(names, text)}")
    raise FedpflError(f"{key} must be below {classes}, the number of classes, got {value}")
