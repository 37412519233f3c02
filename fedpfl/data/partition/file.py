"""A partition from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedpfl.data import npz
from fedpfl.data.partition.common import SPLITS, Fraction, Indices, Partition, split_clients
from fedpfl.ground.errors import FedpflError, error_text

SPLIT_NAMES = {
    *SPLITS,
    "val",
    "valid",
    "training",
    "testing",
}  # a client's splits, or clients of such names
ClientIndices = list[Indices] | dict[str, list[Indices]]
"""Indices per client, of all its samples or by split."""


def file(
    y: np.ndarray, clients: int, seed: int, *, path: Path | str, test_fraction: Fraction = 0.25
) -> Partition:
    """Deal samples as a file says, by their places in the data set: a run's partition.npz, or JSON.

    JSON holds a list or an object with an entry per client: an object of its `train`, `test` and,
    if there are any, `val` (or `validation`) samples, or a list of all its samples, which
    `test_fraction` and the seed split. FL-bench's partition has such a list under `data_indices`.

    Raises: FedpflError if the file is absent or is no such file.
    """
    owned = _read_file(Path(path).expanduser())
    if isinstance(owned, list):
        return split_clients(owned, test_fraction, np.random.default_rng(seed))
    train, test, held = (tuple(owned.get(name, ())) for name in SPLITS)
    return Partition(train, test, validation=held if any(map(len, held)) else ())


def _read_file(path: Path) -> ClientIndices:
    """What a file says, in whichever form."""
    if not path.is_file():
        raise FedpflError(f"partition.path: there is no file {path}; check the path")
    if path.suffix not in (".npz", ".json"):
        raise FedpflError(
            f"partition.path must end in .npz or .json, got {path}; a pickle could run code, so it is not read: "
            "docs/data.md has the line that writes one as JSON"
        )
    try:
        return _read_npz(path) if path.suffix == ".npz" else _read_json(path)
    except Exception as error:  # zipfile, numpy and json raise a dozen kinds
        why = error_text(error, with_class=True)
        raise FedpflError(
            f"partition.path: {path} cannot be read as a partition ({why}); see docs/data.md"
        ) from None


def _read_npz(path: Path) -> dict[str, list[Indices]]:
    """Flat indices and offsets of each split, as runs write them."""
    with npz.open_archive(path) as arrays:
        names = [name for name in SPLITS if name != "validation" or f"{name}_indices" in arrays]
        owned = {
            name: _split_at_offsets(arrays[f"{name}_indices"], arrays[f"{name}_offsets"])
            for name in names
        }
    if len({len(parts) for parts in owned.values()}) > 1:
        raise ValueError("its splits have other numbers of clients")
    return owned


def _split_at_offsets(indices: np.ndarray, offsets: np.ndarray) -> list[Indices]:
    if (
        indices.ndim != 1
        or offsets.ndim != 1
        or {indices.dtype, offsets.dtype} != {np.dtype(np.int64)}
        or offsets[0] != 0
        or offsets[-1] != len(indices)
        or (np.diff(offsets) < 0).any()
    ):
        raise ValueError("its offsets do not cut its indices into parts")
    return np.split(indices, offsets[1:-1])


def _read_json(path: Path) -> ClientIndices:
    """One entry per client, by number if they are numbered, else as they come."""
    held = json.loads(path.read_bytes())
    held = held.get("data_indices", held) if isinstance(held, dict) else held
    if isinstance(held, dict):
        if SPLIT_NAMES & {key.lower() for key in held}:
            raise ValueError(
                "train, test and val are of a client, but stand where clients do; give a list of clients"
            )
        numbers = all(key.isdecimal() for key in held)
        held = [held[key] for key in (sorted(held, key=int) if numbers else held)]
    if not isinstance(held, list) or not held:
        raise ValueError("it has no entry per client")
    if all(isinstance(entry, list) for entry in held):
        return [_check_indices(entry, client) for client, entry in enumerate(held)]
    owned: dict[str, list[Indices]] = {name: [] for name in SPLITS}
    for client, entry in enumerate(held):
        named = entry if isinstance(entry, dict) else {}
        splits = {"validation" if name == "val" else name: values for name, values in named.items()}
        if not {"train", "test"} <= splits.keys() <= {*SPLITS}:
            raise ValueError(
                f"client {client} has neither a list of samples nor train, test and val"
            )
        for name in SPLITS:
            owned[name].append(_check_indices(splits.get(name, []), client))
    return owned


def _check_indices(values: Any, client: int) -> Indices:
    array = np.asarray(values)
    if not isinstance(values, list) or array.ndim != 1 or (values and array.dtype.kind != "i"):
        raise ValueError(f"the samples of client {client} are no list of whole numbers")
    return array.astype(np.int64)
