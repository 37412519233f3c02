"""Read a partition from a file."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedpfl.data import npz
from fedpfl.data.datasets.shared.texts import SPLIT_NAMES
from fedpfl.data.partition.common import SPLITS, Indices, Partition, split_clients
from fedpfl.data.pickles import PlainUnpickler
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.ranges import ProportionBelowOne


def file(
    y: np.ndarray,
    clients: int,
    seed: int,
    *,
    path: Path | str,
    test_fraction: ProportionBelowOne = 0.25,
) -> Partition:
    """Deal samples by a file of their indices: a run's partition.npz, JSON or FL-bench's pickle.

    JSON holds a list or an object with an entry per client: an object of its `train`, `test` and,
    if there are any, `val` (or `validation`) samples, or a list of all its samples, which
    `test_fraction` and the seed split. FL-bench's partition has such a list under `data_indices`.

    Raises:
        FedpflError: If the file is absent or is no such file.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FedpflError(f"partition.path: there is no file {path}; check the path")
    if path.suffix not in READERS:
        raise FedpflError(f"partition.path must end in {', '.join(READERS)}, got {path}")
    try:
        holdings, names = READERS[path.suffix](path)
    except Exception as error:  # zipfile, numpy and json raise a dozen kinds
        reason = error_text(error, with_class=True)
        raise FedpflError(
            f"partition.path: {path} cannot be read as a partition ({reason}); see docs/data.md"
        ) from None
    if isinstance(holdings, list):
        partition = split_clients(holdings, test_fraction, np.random.default_rng(seed))
        return replace(partition, client_names=names)
    validation = tuple(holdings.get("validation", ()))
    return Partition(
        tuple(holdings["train"]),
        tuple(holdings["test"]),
        validation=validation if any(map(len, validation)) else (),
        client_names=names,
    )


def _read_npz(path: Path) -> tuple[dict[str, list[Indices]], tuple[str, ...]]:
    """Read the joined indices and the offsets of each split, as runs write them."""
    with npz.open_archive(path) as arrays:
        names = tuple(map(str, arrays["client_names"])) if "client_names" in arrays else ()
        splits = {}
        for name in SPLITS:
            if f"{name}_indices" in arrays:
                indices = arrays[f"{name}_indices"]
                offsets = arrays[f"{name}_offsets"]
                if offsets[0] != 0 or offsets[-1] != len(indices) or (np.diff(offsets) < 0).any():
                    raise ValueError("its offsets do not cut its indices into parts")
                splits[name] = np.split(indices, offsets[1:-1])
    return splits, names


def _read_entries(entries: Any) -> tuple[Any, tuple[str, ...]]:
    """Read one entry per client, sorted by number or else named by its key."""
    # ---- Step 1: an entry per client, in a list or under their numbers or names.
    names: tuple[str, ...] = ()
    if isinstance(entries, dict):
        entries = entries.get("data_indices", entries)
    if isinstance(entries, dict):
        # A file with the layers the wrong way round would make clients of splits.
        if SPLIT_NAMES & {key.lower() for key in entries}:
            raise ValueError("train, test and val are of a client; give a list of clients")
        if all(key.isdecimal() for key in entries):
            entries = dict(sorted(entries.items(), key=lambda item: int(item[0])))
        else:
            names = tuple(entries)
        entries = [*entries.values()]
    if not isinstance(entries, list) or not entries:
        raise ValueError("it has no entry per client")

    # ---- Step 2: lists of all samples, which are split here, or splits as the file has them.
    if all(isinstance(entry, list | np.ndarray) for entry in entries):
        return [_check_indices(entry, client) for client, entry in enumerate(entries)], names
    splits: dict[str, list[Indices]] = {name: [] for name in SPLITS}
    for client, entry in enumerate(entries):
        is_split = isinstance(entry, dict) and {"train", "test"} <= entry.keys()
        if not is_split or not entry.keys() <= {*SPLITS, "val"}:
            raise ValueError(
                f"client {client} has neither a list of samples nor train, test and val"
            )
        entry.setdefault("validation", entry.pop("val", []))
        for name in SPLITS:
            splits[name].append(_check_indices(entry[name], client))
    return splits, names


READERS: dict[str, Callable[[Path], tuple[Any, tuple[str, ...]]]] = {
    ".npz": _read_npz,
    ".json": lambda path: _read_entries(json.loads(path.read_bytes())),
    ".pkl": lambda path: _read_entries(PlainUnpickler(io.BytesIO(path.read_bytes())).load()),
}
"""By the ending of a file's name."""


def _check_indices(values: Any, client: int) -> Indices:
    """Return a list of whole numbers as an array, or raise ValueError."""
    array = np.asarray(values)
    if (
        not isinstance(values, list | np.ndarray)
        or array.ndim != 1
        or (array.size and array.dtype.kind != "i")
    ):
        raise ValueError(f"the samples of client {client} are no list of whole numbers")
    return array.astype(np.int64)
