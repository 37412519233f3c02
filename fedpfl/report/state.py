"""What a run directory is at this moment: its status, how far it is, when it changed. Broken ones are looked at too."""

from __future__ import annotations

import contextlib
import math
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fedpfl.errors import FedpflError
from fedpfl.report.load import Run, begun

try:
    import fcntl
except ImportError:  # reports can be read where runs cannot be run
    fcntl = None  # type: ignore[assignment]

STATUSES = ("running", "interrupted", "failed", "diverged", "broken", "finished")
QUIET = 600.0
"""Seconds: where no lock tells, a directory that has not changed for longer is nobody's."""


@dataclass(frozen=True, eq=False)
class State:
    """One run directory.

    status: of STATUSES. run: None where it cannot be read. changed: when a file of it last was written, in seconds
    since 1970. reason: why it is broken, failed or diverged. held: whether a living process holds it, None where no
    lock can tell.
    """

    path: Path
    status: str
    changed: float
    run: Run | None = None
    reason: str = ""
    held: bool | None = None

    @property
    def words(self) -> str:
        """The status, and how far it is: `running 40/400`."""
        if self.run is None or (self.status == "finished" and self.run.reached >= self.run.planned):
            return self.status
        return f"{self.status} {self.run.reached}/{self.run.planned}"

    @property
    def last(self) -> pd.Series:
        """The last row of rounds.csv, empty without any."""
        return self.run.rounds.iloc[-1] if self.run and self.run.reached else pd.Series(dtype=float)

    @property
    def judged(self) -> pd.Series:
        """The last row after which all clients were evaluated, empty without any."""
        return self.run.evaluations.iloc[-1] if self.run and len(self.run.evaluations) else pd.Series(dtype=float)

    @property
    def hours(self) -> float:
        """Hours of all its processes, of a run that has not finished those of its recorded rounds; nan if unknown."""
        if self.run is None or self.status == "finished":
            return self.run.fact("hours") if self.run else math.nan
        return float(self.run.rounds.reindex(columns=["seconds", "eval_seconds"]).sum().sum()) / 3600

    @property
    def quiet(self) -> bool:
        """Whether it has not changed for so long that nobody can be writing it."""
        # A round may take long; three of the last one are given.
        seconds = float(self.last.get("seconds", 0)), float(self.judged.get("eval_seconds", 0))
        patience = max(QUIET, 3 * sum(value for value in seconds if not math.isnan(value)))
        return time.time() - self.changed > patience


def read(path: Path, held: Callable[[Path], bool | None] | None = None) -> State:
    """Look at one run directory; never raises for what is wrong in it, which makes it `broken`.

    held: answers in place of `living`.
    """
    # The lock before the summary: a run that ends in between reads as finished, not as interrupted.
    known = (held or living)(path)
    changed = _changed(path)
    try:
        run = begun(path)
        if run.status == "finished" and not run.reached:
            raise FedpflError(f"{path}: finished, but rounds.csv holds no round")
    except FedpflError as error:
        reason = str(error).removeprefix(f"{path}: ")
        return State(path, "running" if known else "broken", changed, None, reason, known)
    found = State(path, "", changed, run, held=known)
    status = verdict(run.status, known, found.quiet)
    reason = " ".join(str(run.summary.get("error") or "").split()) if status in ("failed", "diverged") else ""
    return State(path, status, changed, run, reason, known)


def verdict(told: str, held: bool | None, quiet: bool) -> str:
    """Return the status of a readable run directory.

    told: what summary.json says. held: whether a living process holds the lock, None where that cannot be known; then
    `quiet`, whether the files have not changed for long, decides.
    """
    if told == "finished":
        return told
    if held:
        return "running"
    if told in ("failed", "diverged"):
        return told
    return "running" if held is None and not quiet else "interrupted"


@contextlib.contextmanager
def hold(path: Path) -> Iterator[bool | None]:
    """Hold the run directory as a run does, so that none starts in it; yields whether that was possible.

    False: a living process has it. None: no lock can tell, for want of a `run.lock` or on a file system without locks.
    Not for a process that runs a run there: closing the file lets go of its own lock.
    """
    try:
        lock = os.open(path / "run.lock", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, AttributeError):  # no such flags: no such locks
        yield None
        return
    try:
        taken: bool | None = None
        with contextlib.suppress(OSError, AttributeError):
            if stat.S_ISREG(os.fstat(lock).st_mode):
                try:
                    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    taken = True
                except (BlockingIOError, PermissionError):
                    taken = False
        yield taken
    finally:
        os.close(lock)


def living(path: Path) -> bool | None:
    """Return whether a living process holds the run directory; None where that cannot be known."""
    with hold(path) as taken:
        return None if taken is None else not taken


def _changed(path: Path) -> float:
    """When a file in the directory was last written; a directory that is gone meanwhile changed now."""
    try:
        with os.scandir(path) as entries:
            times = [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
        return max(times, default=path.stat().st_mtime)
    except OSError:
        return time.time()
