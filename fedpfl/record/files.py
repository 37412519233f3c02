"""Single files: read and written so that nothing is half done, waited for, or reached through a link."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from fedpfl.errors import FedpflError

# POSIX locks do not exclude a second opening by the same process, and are lost when that one closes its file.
_held: set[Path] = set()


# Reading


def digest(content: bytes) -> str:
    """Return what tells contents apart."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def content(path: Path) -> bytes | None:
    """Return what a file holds, None where there is none. Raises FedpflError where it cannot be read."""
    try:
        # A named pipe must not be waited for.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise irregular(path)
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from None


def regular(path: Path) -> None:
    """Raise FedpflError where there is something that is no regular file: a link, a named pipe, a folder."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise irregular(path)


# Writing


def temporary(path: Path) -> Path:
    """Return under which name a file is written before it is whole."""
    return path.with_name(f".{path.name}.tmp")


@contextlib.contextmanager
def replacing(path: Path, guard: Callable[[], None]) -> Iterator[BinaryIO]:
    """Yield a file that takes its place only when it is whole and on the disk; a kill leaves the old one.

    guard: raises where the place is no longer ours. Raises FedpflError where the file system refuses.
    """
    whole = temporary(path)
    guard()
    try:
        with whole.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        guard()
        whole.replace(path)
        with contextlib.suppress(OSError):  # not every file system lets a directory be synced
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except BaseException as error:
        with contextlib.suppress(OSError, FedpflError):
            guard()
            whole.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise refused(path, error) from None
        raise


def append(file: int, data: bytes) -> None:
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


def remove(folder: Path, *names: str) -> None:
    """Remove files that may be there."""
    for name in names:
        (folder / name).unlink(missing_ok=True)


# The lock


def take_lock(folder: Path) -> int:
    """Open and lock `run.lock`. Raises FedpflError where another process, or this one, holds it."""
    if folder.resolve() in _held:
        raise _busy(folder, str(os.getpid()))
    lock = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = os.read(lock, 32).decode(errors="replace").strip()
        os.close(lock)
        raise _busy(folder, holder or "unknown") from None
    except OSError:
        pass  # some cluster file systems have no locks; better to run unguarded than not at all
    if not holds(lock, folder):  # who held it has just removed it
        os.close(lock)
        raise _busy(folder, "unknown")
    _held.add(folder.resolve())
    with contextlib.suppress(OSError):
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
    return lock


def holds(lock: int, folder: Path) -> bool:
    """Return whether the open file is still the folder's `run.lock`; if not, another process may hold another."""
    try:
        return os.path.samestat(os.fstat(lock), (folder / "run.lock").lstat())
    except FileNotFoundError:
        return False


def release(lock: int, folder: Path) -> None:
    """Let go of `run.lock`. folder: resolved."""
    os.close(lock)
    _held.discard(folder)


# What is wrong, in one line


def refused(path: Path, error: OSError) -> FedpflError:
    """Return why a file cannot be written."""
    reason = error.strerror or type(error).__name__
    return FedpflError(
        f"cannot write {path}: {reason}; make room or set its permissions, or choose another with hydra.run.dir=..."
    )


def unreadable(path: Path, error: Exception) -> FedpflError:
    """Return why a file that may be whole cannot be read."""
    reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
    return FedpflError(
        f"cannot read {path}: {reason or type(error).__name__}; once that is mended, give the same command again"
    )


def damaged(path: Path, how: str = "is damaged") -> FedpflError:
    """Return how a run's file is not what it was."""
    return FedpflError(f"{path} {how}; restart=true removes the run's files and runs it from the beginning")


def irregular(path: Path) -> FedpflError:
    """Return that there is no regular file."""
    return FedpflError(f"{path} is not a regular file; remove it, or choose another directory with hydra.run.dir=...")


def _busy(folder: Path, pid: str) -> FedpflError:
    return FedpflError(
        f"run directory {folder} is in use by process {pid}; wait for it, or choose another with hydra.run.dir=..."
    )
