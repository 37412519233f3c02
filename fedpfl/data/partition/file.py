"""A partition as a file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fedpfl.data import npz
from fedpfl.data.partition.common import Index, Partition
from fedpfl.errors import FedpflError

INT = np.dtype(np.int64)


def save(partition: Any, path: Path | str) -> None:
    """Write a partition as .npz without pickle: flat indices and offsets, for train and test; atomic.

    `partition` is a `Partition`, anything else with `train` and `test`, or a pair `(train, test)`, each one sequence of
    index arrays or tensors per client.
    """
    train, test = (partition.train, partition.test) if hasattr(partition, "train") else partition
    path = Path(path)
    arrays: dict[str, Any] = {"attempts": np.int64(getattr(partition, "attempts", 1))}
    for name, parts in (("train", train), ("test", test)):
        pieces = [np.asarray(part, np.int64) for part in parts]
        arrays[f"{name}_indices"] = np.concatenate([np.empty(0, np.int64), *pieces])
        arrays[f"{name}_offsets"] = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez_compressed(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp gives 0600
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path: Path | str) -> Partition:
    """Read what `save` wrote.

    Raises: FedpflError if the file is absent or is not such a file.
    """
    try:
        if not Path(path).is_file():
            raise FedpflError(f"partition file {path} does not exist; check the path")
        with npz.opened(Path(path)) as arrays:
            train, test = (
                _parts(arrays[f"{name}_indices"](), arrays[f"{name}_offsets"]()) for name in ("train", "test")
            )
            if len(train) != len(test):
                raise ValueError("it has other numbers of training and of test parts")
            return Partition(train, test, int(arrays["attempts"]()))
    except FedpflError:
        raise
    except Exception as error:  # zipfile and numpy raise a dozen kinds
        raise FedpflError(
            f"partition file {path} cannot be read ({type(error).__name__}); delete it to have it made again"
        ) from None


def _parts(indices: np.ndarray, offsets: np.ndarray) -> tuple[Index, ...]:
    steps = np.diff(offsets)
    if (
        indices.ndim != 1
        or offsets[0] != 0
        or offsets[-1] != len(indices)
        or (steps < 0).any()
        or {indices.dtype, offsets.dtype} != {INT}
    ):
        raise ValueError("its offsets do not cut its indices into parts")
    return tuple(np.split(indices, offsets[1:-1]))
