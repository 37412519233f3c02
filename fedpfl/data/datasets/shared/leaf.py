"""LEAF's files of natural clients (Caldas et al. 2018, arXiv:1812.01097)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedpfl.data.datasets.shared.samples import Raw, number_groups
from fedpfl.data.datasets.shared.source import (
    Source,
    explain_read_errors,
    find_folder,
    not_as_published,
    read_cached,
)

PLACE = (
    "LEAF's {0}/data/ with train/ and test/, or all_data/, of .json files (https://leaf.cmu.edu)"
)
MAX_NAME_LENGTH = 200  # letters of a name, as all take the room of the longest

Part = tuple[np.ndarray, np.ndarray]  # x and y of a client


def read_clients(source: Source, convert: Callable[[list, list], Part]) -> Raw:
    """Read LEAF's training part, then its test part; where these are not there, all samples,
    without a test part.

    convert: makes x and y of a client from the lists in its file. Groups are the clients.
    """
    root = find_folder(source, PLACE.format(source.name), f"{source.name}/data", source.name)
    parts = [sorted((root / part).glob("*.json")) for part in ("train", "test")]
    if not all(parts):
        parts = [sorted((root / "all_data").glob("*.json"))]
    if not all(parts):
        raise not_as_published(
            root, "there are .json files neither in train/ and test/ nor in all_data/"
        )

    return read_cached(
        source, {}, [path for paths in parts for path in paths], lambda: _join_files(parts, convert)
    )


def _join_files(parts: list[list[Path]], convert: Callable[[list, list], Part]) -> Raw:
    """The samples of all files, part after part, in order of the files."""
    x, y, users, sizes = [], [], [], []
    for paths in parts:
        known: dict[str, Path] = {}
        for path, user, (images, labels) in (
            client for file in paths for client in _read_users(file, convert)
        ):
            if user in known:
                raise not_as_published(path, f"it has user {user}, whom {known[user].name} has too")
            known[user] = path
            users.append(user)
            x.append(images)
            y.append(labels)
        sizes.append(sum(map(len, y)))
    numbers, names = number_groups(users)
    groups = np.repeat(numbers, [len(labels) for labels in y])
    return Raw(
        np.concatenate(x), np.concatenate(y), groups, names, sizes[0] if len(parts) > 1 else None
    )


def _read_users(
    path: Path, convert: Callable[[list, list], Part]
) -> Iterator[tuple[Path, str, Part]]:
    """The file, its users, and what `convert` makes of their samples."""
    with explain_read_errors(path, not_as_published):
        held: Any = json.loads(path.read_bytes())
        users, counts, data = held["users"], held["num_samples"], held["user_data"]
        if not users:
            raise ValueError("it has no users")
        for user, count in zip(users, counts, strict=True):
            if not isinstance(user, str) or not user.isprintable() or len(user) > MAX_NAME_LENGTH:
                raise ValueError(f"a user's name is {user!r:.{MAX_NAME_LENGTH}}")
            x, y = data[user]["x"], data[user]["y"]
            if len(x) != count or len(y) != count:
                raise ValueError(
                    f"user {user} has {len(x)} samples and {len(y)} labels, expected {count} of both"
                )
            yield path, user, convert(x, y)
