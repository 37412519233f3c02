"""state.pt: plain values and tensors in torch's archive.

Its checksums are checked before anything is loaded.
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
from fedpfl.ground.records import Record, Values
from fedpfl.record import digests

# Why an intact file may be unreadable at this moment, in torch's words.
_TEMPORARY_REASONS = (
    "memory",
    *map(os.strerror, (errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ENFILE)),
)


def save_checkpoint(payload: Values, file: BinaryIO) -> None:
    """Write a checkpoint. Raises OSError where the file system refuses."""
    try:
        torch.save(payload, file)
    except RuntimeError as error:
        # Torch hides a full disk, or Ctrl-C while it writes, behind another error.
        cause = error.__context__
        while cause is not None:
            if isinstance(cause, OSError | KeyboardInterrupt):
                raise cause from None
            cause = cause.__context__
        raise


def load_checkpoint(path: Path) -> Record:
    """Return a checkpoint; its tensors stay in the file until they are read.

    Raises:
        FedpflError: the file is damaged, or cannot be read at this moment.
    """
    check_checkpoint(path)
    with _explain_read_errors(path):
        payload = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not (isinstance(payload, dict) and isinstance(payload.get("round"), int)):
            raise ValueError
    return payload


def check_checkpoint(path: Path) -> None:
    """Raise FedpflError where a checkpoint is damaged. Torch does not check the checksums."""
    with _explain_read_errors(path):
        digests.check_archive(path)


def checkpoint_digest(path: Path) -> str:
    """Return a digest of the checksums of all parts. Raises as `check_checkpoint`."""
    with _explain_read_errors(path), zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        parts = [(entry.filename, entry.file_size, entry.CRC) for entry in entries]
        return files.content_digest(repr(parts).encode())


def to_plain_values(value: Any) -> Any:
    """Return a value as `load_checkpoint` accepts it. Raises TypeError for other types."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        # torch saves the whole storage behind a view.
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: to_plain_values(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(to_plain_values, value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}: {value!r}")


@contextlib.contextmanager
def _explain_read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise files.unreadable_error(path, error) from None
    # zipfile and torch raise a dozen kinds of errors for damaged files
    except Exception as error:
        is_temporary = any(reason in str(error) for reason in _TEMPORARY_REASONS)
        if is_temporary or isinstance(error, MemoryError):
            raise files.unreadable_error(path, error) from None
        raise files.damaged_error(path) from None
