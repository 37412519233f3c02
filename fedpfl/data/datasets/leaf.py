"""LEAF's natural clients (Caldas et al. 2018, arXiv:1812.01097): FEMNIST's writers, Shakespeare's roles."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedpfl.data.datasets.samples import Raw
from fedpfl.data.datasets.source import Source, folder, kept, reading, shown, wrong
from fedpfl.ground import memory

PLACE = "LEAF's {0}/data/ with train/ and test/, or all_data/, of .json files (https://leaf.cmu.edu)"
SIDE, KINDS = 28, 62
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"  # in LEAF's order
LENGTH = 80
NEAR = 0.02  # of a pixel's 255 values; what four decimals leave
LONGEST = 200  # letters of a name, as all take the room of the longest

Samples = tuple[np.ndarray, np.ndarray]  # x and y of a client


def femnist(source: Source) -> Raw:
    """Digits, capitals, small letters, uint8 `[1, 28, 28]`; groups are the writers.

    LEAF's training part, then its test part; where these are not there, all samples, without a test part.
    """
    return _clients(source, _images)


def shakespeare(source: Source) -> Raw:
    """Places in LETTERS of 80 letters, int32 `[80]`, and of the next one; groups are the roles. Parts as of `femnist`.

    A letter that is not in LETTERS is an error: LEAF's own code takes it for the last one where it is the label.
    """
    return _clients(source, _texts)


def _clients(source: Source, convert: Callable[[list, list], Samples]) -> Raw:
    root = folder(source, f"{source.name}/data", source.name)
    parts = [sorted((root / part).glob("*.json")) for part in ("train", "test")]
    if not all(parts):
        parts = [sorted((root / "all_data").glob("*.json"))]
    if not all(parts):
        raise wrong(root, "there are .json files neither in train/ and test/ nor in all_data/")

    def make() -> Raw:
        x, y, users, sizes = [], [], [], []
        for paths in parts:
            known: dict[str, Path] = {}
            for path in paths:
                for user, (images, labels) in _read(path, convert):
                    if user in known:
                        raise wrong(path, f"it has user {user}, whom {known[user].name} has too")
                    known[user] = path
                    users.append(user)
                    x.append(images)
                    y.append(labels)
            sizes.append(sum(map(len, y)))
        names = sorted(set(users))
        numbers = {name: number for number, name in enumerate(names)}
        groups = np.repeat([numbers[user] for user in users], [len(labels) for labels in y])
        return Raw(np.concatenate(x), np.concatenate(y), groups, tuple(names), sizes[0] if len(parts) > 1 else None)

    return kept(source, {}, [path for paths in parts for path in paths], make)


def _read(path: Path, convert: Callable[[list, list], Samples]) -> Iterator[tuple[str, Samples]]:
    """The users of a file, and what `convert` makes of their samples."""
    with reading(path, wrong):
        memory.check(10 * path.stat().st_size, path.name)  # as Python's numbers
        held: Any = json.loads(path.read_bytes())
        users, counts, data = held["users"], held["num_samples"], held["user_data"]
        if not users:
            raise ValueError("it has no users")
        for user, count in zip(users, counts, strict=True):
            if not isinstance(user, str) or not user.isprintable() or len(user) > LONGEST:
                raise ValueError(f"a user's name is {shown(repr(user))}")
            x, y = data[user]["x"], data[user]["y"]
            if len(x) != count or len(y) != count:
                raise ValueError(f"user {user} has {len(x)} samples and {len(y)} labels, expected {count} of both")
            yield user, convert(x, y)


def _images(x: list, y: list) -> Samples:
    """Pixels from 0 to 1, `[samples, 784]`, and classes."""
    values = 255 * np.array(x, np.float64).reshape(len(x), SIDE * SIDE)
    labels = np.array(y)
    if not ((values >= 0) & (values <= 255)).all():  # nor if one is no number
        raise ValueError("pixels are not from 0 to 1")
    pixels = values.round()
    if (abs(values - pixels) > NEAR).any():
        raise ValueError("pixels are not multiples of 1/255")
    if labels.dtype.kind != "i" or labels.ndim != 1 or not ((labels >= 0) & (labels < KINDS)).all():
        raise ValueError(f"classes are not whole numbers from 0 to {KINDS - 1}")
    return pixels.astype(np.uint8).reshape(-1, 1, SIDE, SIDE), labels


def _texts(x: list, y: list) -> Samples:
    return _places(x, LENGTH), _places(y, 1)[:, 0].astype(np.int64)


def _places(texts: list[str], length: int) -> np.ndarray:
    """Places of texts' letters in the alphabet, int32 `[texts, length]`."""
    for text in texts:
        if len(text) != length:
            raise ValueError(f"a text has {len(text)} letters, expected {length}")
    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
    places = np.full(128, -1, np.int32)
    places[[ord(letter) for letter in LETTERS]] = np.arange(len(LETTERS))
    found = places[np.minimum(codes, 127)]  # the last of ASCII is no letter
    if (found < 0).any():
        raise ValueError(f"{chr(codes[found < 0][0])!r} is none of LEAF's {len(LETTERS)} letters")
    return found.reshape(len(texts), length)
