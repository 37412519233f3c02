"""Read LEAF's files of natural clients (Caldas et al. 2018, arXiv:1812.01097)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

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
Part = tuple[np.ndarray, np.ndarray]  # x and y of a client


def read_clients(source: Source, convert: Callable[[list, list], Part]) -> Raw:
    """Read LEAF's training and test part, or without these all samples; groups are the clients.

    Args:
        source: The data set.
        convert: Makes x and y of a client from the lists in its file.
    """
    name = source.name
    root = find_folder(source, PLACE.format(name), f"{name}/data", name)
    parts = [sorted((root / part).glob("*.json")) for part in ("train", "test")]
    if not all(parts):
        parts = [sorted((root / "all_data").glob("*.json"))]
    if not all(parts):
        raise not_as_published(root, "it has .json files neither in train/ and test/ nor all_data/")
    return read_cached(
        source, [path for paths in parts for path in paths], lambda: _join_files(parts, convert)
    )


def _join_files(parts: list[list[Path]], convert: Callable[[list, list], Part]) -> Raw:
    """Join the samples of all files, part after part, in order of the files."""
    x, y, users, part_ends = [], [], [], []
    for paths in parts:
        for path in paths:
            with explain_read_errors(path, not_as_published):
                content = json.loads(path.read_bytes())
                for user in content["users"]:
                    samples = content["user_data"][user]
                    inputs, labels = convert(samples["x"], samples["y"])
                    x.append(inputs)
                    y.append(labels)
                    users.append(user)
        part_ends.append(sum(map(len, y)))
    # A user may have samples in both parts.
    numbers, names = number_groups(users)
    groups = np.repeat(numbers, [len(labels) for labels in y])
    test_from = part_ends[0] if len(parts) > 1 else None
    return Raw(np.concatenate(x), np.concatenate(y), groups, names, test_from)
