"""The lock on a run directory, held while the writing process lives, and the run's status."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from fedpfl.ground.errors import FedpflError
from fedpfl.ground.files import explain_write_errors

try:
    import fcntl
except ImportError:  # reports can be read where runs cannot be run
    fcntl = None  # type: ignore[assignment]


def acquire_lock(folder: Path) -> int:
    """Open and lock a folder's `run.lock`, and return its file descriptor.

    Raises:
        FedpflError: If a process holds it, this one included.
    """
    lock = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        # None, on cluster file systems without locks: better to run unguarded than not at all.
        if _try_lock(lock) is False:
            holder = os.read(lock, 32).decode(errors="replace").strip()
            raise FedpflError(
                f"run directory {folder} is in use by process {holder or 'unknown'}; wait for it,"
                " or choose another with hydra.run.dir=..."
            )
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
    except BaseException:
        os.close(lock)  # a full disk must not keep the directory from this process's next try
        raise
    return lock


def is_current_lock(lock: int, folder: Path) -> bool:
    """Return True if the open file is still the folder's `run.lock`.

    If it is not, another process may hold a newer one.
    """
    try:
        return os.path.samestat(os.fstat(lock), (folder / "run.lock").lstat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def hold_lock(folder: Path) -> Iterator[bool | None]:
    """Hold a run directory's lock, so that no run starts in it.

    Yields:
        True if it is held, False if a living process holds it, and None where no lock can tell:
        without a `run.lock`, or on a file system without locks.
    """
    try:
        # Not created: a reader leaves nothing in a folder.
        lock = os.open(folder / "run.lock", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, AttributeError):  # a system without these flags has no such locks
        yield None
        return
    try:
        yield _try_lock(lock)
    finally:
        os.close(lock)


@contextlib.contextmanager
def open_alone(path: Path) -> Iterator[int]:
    """Open a private file to read and append, one process after another."""
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(lock: int) -> bool | None:
    """Lock an open file. False: a living process holds it. None: no lock can tell."""
    try:
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            return None
        # Unlike a POSIX lock it excludes other openings of the same process, too.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except (OSError, AttributeError):
        return None
    return True


def is_held_by_process(folder: Path) -> bool | None:
    """Return True if a living process holds the run directory, None if unknown."""
    with hold_lock(folder) as is_acquired:
        if is_acquired is None:
            return None
        return not is_acquired


def run_status(written_status: str, is_held: bool | None, is_quiet: bool = True) -> str:
    """Return a run's status: `finished`, `running`, `interrupted`, `failed` or `diverged`.

    Args:
        written_status: The status in summary.json.
        is_held: Whether a living process writes the run, None where that is unknown.
        is_quiet: Whether the files have not changed for long; decides if `is_held` is None.
    """
    if written_status == "finished":
        return written_status
    if is_held:
        return "running"
    if written_status in ("failed", "diverged"):
        return written_status
    # No lock can tell: files that still grow are the only sign of life.
    if is_held is None and not is_quiet:
        return "running"
    return "interrupted"
