"""Who writes a run directory: a lock on `run.lock`, held while the process lives, and the status
that follows.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from fedpfl.ground.errors import FedpflError

try:
    import fcntl
except ImportError:  # reports can be read where runs cannot be run
    fcntl = None  # type: ignore[assignment]

# POSIX locks do not exclude a second opening by the same process, and are lost when that one closes
# its file.
_held: set[Path] = set()


def acquire_lock(folder: Path) -> int:
    """Open and lock `run.lock`. Raises FedpflError where another process, or this one, holds it."""
    if folder.resolve() in _held:
        raise _busy(folder, str(os.getpid()))
    lock = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    # Some cluster file systems have no locks; better to run unguarded than not at all.
    if _locked(lock) is False:
        holder = os.read(lock, 32).decode(errors="replace").strip()
        os.close(lock)
        raise _busy(folder, holder or "unknown")
    if not is_current_lock(lock, folder):  # who held it has just removed it
        os.close(lock)
        raise _busy(folder, "unknown")
    _held.add(folder.resolve())
    with contextlib.suppress(OSError):
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
    return lock


def is_current_lock(lock: int, folder: Path) -> bool:
    """Return whether the open file is still the folder's `run.lock`; if not, another process may
    hold another.
    """
    try:
        return os.path.samestat(os.fstat(lock), (folder / "run.lock").lstat())
    except FileNotFoundError:
        return False


def release_lock(lock: int, folder: Path) -> None:
    """Let go of `run.lock`. folder: resolved."""
    os.close(lock)
    _held.discard(folder)


@contextlib.contextmanager
def hold_lock(folder: Path) -> Iterator[bool | None]:
    """Hold the run directory as a run does, so that none starts in it; yields whether that was
    possible.

    False: a living process has it. None: no lock can tell, for want of a `run.lock` or on a file
    system without locks.
    """
    if folder.resolve() in _held:
        yield False
        return
    try:
        lock = os.open(folder / "run.lock", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, AttributeError):  # no such flags: no such locks
        yield None
        return
    try:
        yield _locked(lock)
    finally:
        os.close(lock)


def _locked(lock: int) -> bool | None:
    """Lock an open file; False: a living process has it. None: no lock can tell."""
    try:
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            return None
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except (OSError, AttributeError):
        return None
    return True


def is_held_by_process(folder: Path) -> bool | None:
    """Return whether a living process holds the run directory; None where that cannot be known."""
    with hold_lock(folder) as taken:
        return None if taken is None else not taken


def run_status(written_status: str, is_held: bool | None, is_quiet: bool = True) -> str:
    """Return the status of a run: `finished`, `running`, `interrupted`, `failed` or `diverged`.

    written: what summary.json says. held: whether a living process writes it, None where that
    cannot be known; then `quiet`, whether the files have not changed for long, decides.
    """
    if written_status == "finished":
        return written_status
    if is_held:
        return "running"
    if written_status in ("failed", "diverged"):
        return written_status
    return "running" if is_held is None and not is_quiet else "interrupted"


def _busy(folder: Path, pid: str) -> FedpflError:
    return FedpflError(
        f"run directory {folder} is in use by process {pid}; wait for it, or choose another with hydra.run.dir=..."
    )
