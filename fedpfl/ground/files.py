"""Single files: read and written so that nothing is half done, waited for, or reached through a
link.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from fedpfl.ground.errors import FedpflError, error_text

# Reading


def content_digest(content: bytes) -> str:
    """Return what tells contents apart."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def read_if_exists(path: Path) -> bytes | None:
    """Return what a file holds, None where there is none. Raises FedpflError where it cannot be
    read.
    """
    try:
        # A named pipe must not be waited for.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise irregular_error(path)
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable_error(path, error) from None


def require_regular_file(path: Path) -> None:
    """Raise FedpflError where there is something that is no regular file: a link, a named pipe, a
    folder.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise irregular_error(path)


# Writing


@contextlib.contextmanager
def explain_write_errors(path: Path, option: str = "hydra.run.dir=...") -> Iterator[None]:
    """Raise FedpflError for an OSError within: why `path` cannot be written. option: by which to
    choose another.
    """
    try:
        yield
    except OSError as error:
        mend = f"make room or set its permissions, or choose another with {option}"
        raise FedpflError(f"cannot write {path}: {error_text(error)}; {mend}") from None


def temporary_path(path: Path) -> Path:
    """Return under which name a file is written before it is whole."""
    return path.with_name(f".{path.name}.tmp")


@contextlib.contextmanager
def atomic_write(
    path: Path, temporary: Path | None = None, guard: Callable[[], None] = lambda: None
) -> Iterator[Path]:
    """Yield the name of a file to write, which takes the place of `path` when all went well, and
    else goes.

    aside: that name; by default one that no other process writes. guard: raises where the place is
    no longer ours.
    """
    temporary = temporary or path.with_name(f".{os.getpid()}-{path.name}")
    guard()
    try:
        yield temporary
        guard()
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError, FedpflError):
            guard()
            temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def atomic_output(path: Path) -> Iterator[Path]:
    """Yield the name of a `whole` file that a command was asked for, whose folder is made.

    Raises FedpflError where the file system refuses.
    """
    with explain_write_errors(path, "--out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as aside:
            yield aside


@contextlib.contextmanager
def durable_write(
    path: Path, guard: Callable[[], None], opener: Callable[[str, int], int] | None = None
) -> Iterator[BinaryIO]:
    """Yield a file of a run that is `whole` and on the disk before it takes its place.

    opener: as of `open`. Raises FedpflError where the file system refuses.
    """
    with explain_write_errors(path):
        with (
            atomic_write(path, temporary_path(path), guard) as aside,
            open(aside, "wb", opener=opener) as file,
        ):
            yield file
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(OSError):  # not every file system lets a directory be synced
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def append_all(file: int, data: bytes) -> None:
    """Write all of it in one go, or nothing: half a line must not stay in front of the next."""
    before = os.fstat(file).st_size
    try:
        written = os.write(file, data)
        while written < len(data):
            written += os.write(file, data[written:])
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file, before)
        raise


def remove_files(folder: Path, *names: str) -> None:
    """Remove files that may be there."""
    for name in names:
        (folder / name).unlink(missing_ok=True)


# What is wrong, in one line


def unreadable_error(path: Path, error: Exception) -> FedpflError:
    """Return why a file that may be whole cannot be read."""
    return FedpflError(
        f"cannot read {path}: {error_text(error)}; once that is mended, give the same command again"
    )


def damaged_error(path: Path, problem: str = "is damaged") -> FedpflError:
    """Return how a run's file is not what it was."""
    return FedpflError(
        f"{path} {problem}; restart=true removes the run's files and runs it from the beginning"
    )


def irregular_error(path: Path) -> FedpflError:
    """Return that there is no regular file."""
    return FedpflError(
        f"{path} is not a regular file; remove it, or choose another directory with hydra.run.dir=..."
    )
