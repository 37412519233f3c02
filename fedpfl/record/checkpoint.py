"""state.pt: plain values and tensors in torch's archive, whose checksums are looked at before
anything is loaded.
"""

from __future__ import annotations

import contextlib
import errno
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from fedpfl.ground import files
from fedpfl.record import digests

# For what a good file may be refused, as torch words it.
_PASSING = (
    "memory",
    *map(os.strerror, (errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ENFILE)),
)


def save_checkpoint(payload: Mapping[str, Any], file: BinaryIO) -> None:
    """Write a checkpoint. Raises OSError where the file system refuses."""
    try:
        torch.save(payload, file)
    except RuntimeError as error:
        # Torch hides a full disk, or Ctrl-C while it writes, behind an error of its own.
        hidden = error.__context__
        while hidden is not None:
            if isinstance(hidden, OSError | KeyboardInterrupt):
                raise hidden from None
            hidden = hidden.__context__
        raise


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return a checkpoint, its tensors on the CPU and in the file until they are read.

    Raises FedpflError, which tells a damaged file from one that cannot be read at this moment.
    """
    check_checkpoint(path)
    with _reading(path):
        payload = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not (isinstance(payload, dict) and isinstance(payload.get("round"), int)):
            raise ValueError
    return payload


def check_checkpoint(path: Path) -> None:
    """Raise FedpflError where a checkpoint is not as it was written. Torch itself does not look at
    the checksums.
    """
    with _reading(path):
        digests.check_archive(path)


def checkpoint_digest(path: Path) -> str:
    """Return what tells checkpoints apart: a digest of the checksums of all parts. Raises as
    `check`.
    """
    with _reading(path), zipfile.ZipFile(path) as archive:
        return files.content_digest(
            repr(
                [(entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist()]
            ).encode()
        )


def to_plain_values(value: Any, where: str = "payload") -> Any:
    """Return the value as `load` takes it back. Raises TypeError naming what it would not."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        # torch saves the whole storage behind a view.
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: to_plain_values(inner, f"{where}[{key!r}]") for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(
            to_plain_values(inner, f"{where}[{index}]") for index, inner in enumerate(value)
        )
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint cannot hold {where} of type {type(value).__name__}")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise files.unreadable_error(path, error) from None
    except (
        Exception
    ) as error:  # zipfile and torch raise a dozen kinds for a file that is not what it should be
        if isinstance(error, MemoryError) or any(reason in str(error) for reason in _PASSING):
            raise files.unreadable_error(path, error) from None
        raise files.damaged_error(path) from None
