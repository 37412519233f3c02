"""What a run directory is at this moment: its status, how far it is, when it changed. Read cheaply, broken ones too."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedpfl.errors import FedpflError
from fedpfl.report.load import Run, begun, to_stderr

try:
    import fcntl
except ImportError:  # reports can be read where runs cannot be run
    fcntl = None  # type: ignore[assignment]

STATUSES = ("running", "interrupted", "failed", "diverged", "broken", "finished")
QUIET = 600.0
"""Seconds: where no lock tells, a directory that has not changed for longer is nobody's."""
REMOVING = ".removing-"
"""Begins the name of a directory that `clean` has begun to remove."""

_SIGNS = frozenset({"config.yaml", "rounds.csv", "summary.json", "state.pt", "run.lock"})
_TAIL = 1 << 14


@dataclass(frozen=True, eq=False)
class State:
    """One run directory.

    status: of STATUSES. run: None where configuration or summary cannot be read. changed: when a file of it last was
    written, in seconds since 1970. reached: rounds recorded. last, judged: the last row of rounds.csv, and the last
    after which all clients were evaluated; only the cells in which a number stands. hours: None where unknown.
    reason: why it is broken, failed or diverged. told: the status in summary.json, None where there is none.
    """

    path: Path
    status: str
    changed: float
    run: Run | None = None
    reached: int = 0
    last: Mapping[str, float] = field(default_factory=dict)
    judged: Mapping[str, float] = field(default_factory=dict)
    hours: float | None = None
    reason: str = ""
    told: str | None = None

    @property
    def words(self) -> str:
        """The status, and how far it is: `running 40/400`."""
        if self.status in ("finished", "broken") or self.run is None:
            return self.status
        return f"{self.status} {self.reached}/{self.run.planned}"

    @property
    def quiet(self) -> bool:
        """Whether it has not changed for so long that nobody can be writing it."""
        # A round may take long; three of the last one are given.
        patience = max(QUIET, 3 * (self.last.get("seconds", 0) + self.judged.get("eval_seconds", 0)))
        return time.time() - self.changed > patience


def directories(*roots: Path) -> Iterator[Path]:
    """Every run directory below the roots once, whole or not, ordered by path within a root. Links are not followed.

    Raises FedpflError where a root does not exist.
    """
    seen: set[Path] = set()
    for root in roots:
        if not root.is_dir():
            raise FedpflError(f"no such directory: {root}; give the folder that holds the runs, such as outputs")
        for folder, subfolders, files in os.walk(root, onerror=_unreadable):
            subfolders.sort()
            if _SIGNS.isdisjoint(files):
                # .hydra and wandb hold a config.yaml of their own.
                subfolders[:] = [name for name in subfolders if not name.startswith(".") and name != "wandb"]
                continue
            subfolders.clear()
            path = Path(folder)
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield path


def read(path: Path, held: Callable[[Path], bool | None] | None = None) -> State:
    """Look at one run directory; never raises for what is wrong in it, which makes it `broken`.

    held: answers in place of `lock`.
    """
    # The lock before the summary: a run that ends in between reads as finished, not as interrupted.
    known = (held or lock)(path)
    changed = _changed(path)
    try:
        run = begun(path)
        told = run.summary.get("status")
        if told not in (None, "running", "finished", "failed", "diverged"):
            raise FedpflError(f"{path}: summary.json holds an unknown status, {told!r}")
        last, judged = tail(path / "rounds.csv")
        if told == "finished" and not last:
            raise FedpflError(f"{path}: finished, but rounds.csv holds no round")
        hours = run.summary.get("hours") if told == "finished" else _recorded(path / "rounds.csv") / 3600
    except FedpflError as error:
        reason = str(error).removeprefix(f"{path}: ")
        return State(path, "running" if known else "broken", changed, reason=reason, told=_told(path))
    found = State(path, "", changed, run, int(last.get("round", 0)), last, judged, hours, told=told)
    status = verdict(told, known, found.quiet)
    reason = " ".join(str(run.summary.get("error") or "").split()) if status in ("failed", "diverged") else ""
    return State(**(vars(found) | {"status": status, "reason": reason}))


def verdict(told: str | None, held: bool | None, quiet: bool) -> str:
    """The status of a readable run directory.

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


def lock(path: Path) -> bool | None:
    """Whether a living process holds the run directory; None where that cannot be known.

    Unknown it is without a `run.lock`, and on file systems and machines that do not tell. The question takes no lock
    itself, so no run that starts at this moment is turned away. Not for a process that holds a run directory: closing
    the file would let go of its own lock.
    """
    layout = _flock_layout()
    if layout is None:
        return None
    try:
        file = os.open(path / "run.lock", os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        form, place, values = layout
        answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(form, *values))
        return struct.unpack(form, answer)[place] != fcntl.F_UNLCK
    except OSError:
        return None
    finally:
        os.close(file)


def tail(path: Path, block: int = _TAIL) -> tuple[dict[str, float], dict[str, float]]:
    """The last row of a rounds.csv and the last with an accuracy, read from its end; empty where there is none.

    Cells without a number are left out, and so is a last line that is only half written. block: bytes read at first.
    Raises FedpflError where the file is no such table; a missing one holds no rows.
    """
    try:
        with path.open("rb") as file:
            head = file.readline()
            start, end = file.tell(), file.seek(0, os.SEEK_END)
            names = next(csv.reader([head.decode()]), []) if head.endswith(b"\n") else []
            if not names:
                raise FedpflError(f"{path.parent}: {path.name} cannot be read: it has no columns")
            for needed in ("round", "accuracy"):
                if needed not in names:
                    raise FedpflError(f"{path.parent}: {path.name} lacks the column {needed}")
            while True:
                begin = max(start, end - block)
                file.seek(begin)
                lines = file.read(end - begin).split(b"\n")[:-1]  # behind the last line break: nothing, or half a line
                # The first line is whole only at the start.
                last, judged = _last_rows(names, lines if begin == start else lines[1:])
                if judged or begin == start:
                    return last, judged
                block *= 4
    except FileNotFoundError:
        return {}, {}
    except (OSError, ValueError) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise FedpflError(f"{path.parent}: {path.name} cannot be read: {text}") from None


def _last_rows(names: list[str], lines: list[bytes]) -> tuple[dict[str, float], dict[str, float]]:
    last: dict[str, float] = {}
    for line in reversed(lines):
        cells = line.decode().strip("\r").split(",")
        if len(cells) != len(names):
            continue
        row = {name: number for name, cell in zip(names, cells, strict=True) if (number := _number(cell)) is not None}
        if "round" not in row:
            continue
        last = last or row
        if "accuracy" in row:
            return last, row
    return last, {}


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _recorded(path: Path) -> float:
    """Seconds of all recorded rounds and evaluations."""
    total = 0.0
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace", newline="") as file:
        rows = csv.reader(file)
        names = next(rows, [])
        places = [names.index(name) for name in ("seconds", "eval_seconds") if name in names]
        for cells in rows:
            if len(cells) == len(names):
                total += sum(_number(cells[place]) or 0.0 for place in places)
    return total


def _told(path: Path) -> str | None:
    """The status in a summary.json, whatever else is wrong with the directory."""
    try:
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return str(summary["status"]) if isinstance(summary, dict) and "status" in summary else None


def _changed(path: Path) -> float:
    """When a file in the directory was last written; a directory that is gone meanwhile changed now."""
    try:
        with os.scandir(path) as entries:
            times = [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
        return max(times, default=path.stat().st_mtime)
    except OSError:
        return time.time()


def _flock_layout() -> tuple[str, int, tuple[int, ...]] | None:
    """How this system lays out `struct flock`: its format, where the type stands, and a question for a write lock."""
    if fcntl is None or sys.maxsize < 2**32:
        return None
    if sys.platform.startswith("linux"):
        return "hhqqi0q", 0, (fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    if sys.platform == "darwin":
        return "qqihh", 3, (0, 0, 0, fcntl.F_WRLCK, os.SEEK_SET)
    return None


def _unreadable(error: OSError) -> None:
    to_stderr(f"skipped {error.filename}: {error.strerror}")
