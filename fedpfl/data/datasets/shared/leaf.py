"""Read LEAF's files of natural clients (Caldas et al. 2018, arXiv:1812.01097)."""

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
# All names take the memory of the longest.
MAX_NAME_LENGTH = 200

Part = tuple[np.ndarray, np.ndarray]  # x and y of a client


def read_clients(source: Source, convert: Callable[[list, list], Part]) -> Raw:
    """Read LEAF's training and test part, or without these all samples; groups are the clients.

    Args:
        source: The data set.
        convert: Makes x and y of a client from the lists in its file.
    """
    root = find_folder(
        source,
        PLACE.format(source.name),
        f"{source.name}/data",
        source.name,
    )
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
    """Join the samples of all files, part after part, in order of the files."""
    # ---- Step 1: samples user by user, a user once in each part.
    x = []
    y = []
    users = []
    part_ends = []
    for paths in parts:
        file_of_user: dict[str, Path] = {}
        for file in paths:
            for path, user, (inputs, labels) in _read_users(file, convert):
                if user in file_of_user:
                    other_file = file_of_user[user].name
                    raise not_as_published(path, f"it has user {user}, whom {other_file} has too")
                file_of_user[user] = path
                users.append(user)
                x.append(inputs)
                y.append(labels)
        part_ends.append(sum(map(len, y)))

    # ---- Step 2: users numbered by their names; one may have samples in both parts.
    numbers, names = number_groups(users)
    groups = np.repeat(numbers, [len(labels) for labels in y])
    return Raw(
        x=np.concatenate(x),
        y=np.concatenate(y),
        groups=groups,
        group_names=names,
        test_from=part_ends[0] if len(parts) > 1 else None,
    )


def _read_users(
    path: Path, convert: Callable[[list, list], Part]
) -> Iterator[tuple[Path, str, Part]]:
    """Yield the file, a user, and the converted samples, user after user."""
    with explain_read_errors(path, not_as_published):
        content: Any = json.loads(path.read_bytes())
        users = content["users"]
        counts = content["num_samples"]
        data = content["user_data"]
        if not users:
            raise ValueError("it has no users")
        for user, count in zip(users, counts, strict=True):
            if not isinstance(user, str) or not user.isprintable() or len(user) > MAX_NAME_LENGTH:
                raise ValueError(f"a user's name is {user!r:.{MAX_NAME_LENGTH}}")
            x = data[user]["x"]
            y = data[user]["y"]
            if len(x) != count or len(y) != count:
                raise ValueError(
                    f"user {user} has {len(x)} samples and {len(y)} labels, expected {count} of "
                    "both"
                )
            yield path, user, convert(x, y)
