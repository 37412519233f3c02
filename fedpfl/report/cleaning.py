"""Removes runs that came to nothing: `python -m fedpfl.report clean [ROOT ...]`."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedpfl.ground.errors import FedpflError
from fedpfl.ground.lock import hold_lock
from fedpfl.record import digests
from fedpfl.report.load import Directory, inspect_directories, inspect_directory, print_to_stderr
from fedpfl.report.reading import read_summary
from fedpfl.report.render import render, terminal_width
from fedpfl.report.table import Cell, Column, Table, format_number

REMOVABLE = ("failed", "diverged", "broken", "interrupted")
DEFAULT_STATUSES = ("failed", "diverged", "broken")
"""Without `--status`; a run that its command would go on with must be named besides, see
`resumable_as`.
"""

# In the order in which they are removed: to the end the directory says whose it was, and is held.
_RESULTS = (
    *(
        "state.pt",
        "rounds.csv",
        "clients.csv",
        "common.csv",
        "masks.json",
        "partition.npz",
        "partition.png",
    ),
    *("run.sums", "run.log", "privacy.key"),
)
RUN_FILES = (*_RESULTS, "config.yaml", "summary.json", "run.lock")
_TEMPORARY = frozenset(f".{name}.tmp" for name in RUN_FILES)
_FOLDERS = {
    "wandb": ("run-", "offline-run-", "latest-run", "debug", "settings", "logs"),
    "tensorboard": ("events.out.tfevents.",),
}
"""Folders of loggers, and how the names in them begin."""
COLUMNS = (
    Column("status"),
    Column("holds"),
    Column("size", "size"),
    Column("age", "age"),
    Column("path", "long"),
)

MENDABLE = "its own command goes on from its checkpoint; remove it with --status {},broken"


class NotRemovable(Exception):
    """A directory that stays; the message says why."""


def resumable_as(seen: Directory) -> str:
    """Return the status to name a run by that its command would resume or mend, empty for others.

    It has a checkpoint: an interrupted run, damaged or not, and a failed one, as after a full disk.
    A diverged one would diverge again, and one whose files were being removed is begun anew.
    """
    recorded, state = _recorded(seen.path), seen.path / "state.pt"
    if recorded.get("cleared") or not state.is_file():
        return ""
    status = recorded.get("status")
    if status == "running":
        return "interrupted"
    return "failed" if status == "failed" and _is_sound(state) else ""


def _is_sound(state: Path) -> bool:
    """Return whether a checkpoint is as it was written, or cannot be read at this moment."""
    try:
        digests.check_archive(state)
    except OSError:
        return True
    except Exception:  # zipfile raises a dozen kinds for a file that is not what it should be
        return False
    return True


def removable_paths(seen: Directory) -> list[Path]:
    """Return what a directory that may be removed holds, in the order to remove it. Raises Kept
    where it may not.
    """
    recorded = _recorded(seen.path)
    if not isinstance(recorded.get("identity"), str):
        raise NotRemovable("nothing says that fedpfl wrote it: its summary.json holds no identity")
    if recorded.get("status") == "finished":
        raise NotRemovable(f"its summary.json says finished, though it is broken: {seen.reason}")
    if seen.is_locked or seen.status == "running":
        raise NotRemovable("a run is being written there")
    if not seen.is_stale and (seen.is_locked is None or seen.status in ("interrupted", "broken")):
        raise NotRemovable(
            "written a moment ago, perhaps by a process that cannot be seen; it may go later"
        )
    paths = list(seen.path.iterdir())
    if strange := [path.name for path in paths if not _written_by_a_run(path)]:
        raise NotRemovable(f"it holds {strange[0]}, which no run wrote")
    return sorted(
        paths, key=lambda path: RUN_FILES.index(path.name) if path.name in RUN_FILES else -1
    )


def remove_directory(seen: Directory, roots: Sequence[Path]) -> None:
    """Remove a run directory's files, it, and the folders up to its root that are empty then.

    Raises Kept, and leaves it, where it is no longer as it was, a run holds it, or the file system
    refuses.
    """
    with hold_lock(seen.path) as taken:
        if taken is False:
            raise NotRemovable("a run is being written there")
        # Asking for the lock would let go of our own.
        now = inspect_directory(seen.path, held=lambda _: None if taken is None else False)
        if (now.status, now.modified_at) != (seen.status, seen.modified_at):
            raise NotRemovable("it has changed meanwhile")
        try:
            for path in removable_paths(now):
                shutil.rmtree(path) if path.name in _FOLDERS else path.unlink()
            folder, ends = seen.path.resolve(), {root.resolve() for root in roots}
            folder.rmdir()
        except OSError as error:
            raise NotRemovable(f"cannot be removed: {error.strerror}") from None
    with contextlib.suppress(OSError):  # a folder that is not empty refuses
        while (folder := folder.parent) not in ends and not ends.isdisjoint(folder.parents):
            folder.rmdir()


def _recorded(path: Path) -> dict[str, Any]:
    """Return what a directory's summary.json holds, {} where it is absent or damaged."""
    try:
        return read_summary(path)
    except FedpflError:
        return {}


def clean_runs(
    roots: Sequence[Path],
    statuses: Sequence[str],
    where: Sequence[str],
    yes: bool,
    trials: bool = False,
) -> int:
    """List the runs of these statuses, ask unless `yes`, and remove them; returns 1 where one
    stayed after all.

    statuses: none for the usual ones, and of these only runs that no command would go on with. Says
    which may not go,
    and why. where: filters, such as `method=fedobp`. trials: as in `read_directories`. Raises
    FedpflError where a root does not exist, no run is let through, nobody can be asked, or for a
    status that is never removed.
    """
    chosen = _removable(roots, statuses, where, trials)
    if not chosen:
        print("nothing to remove")
        return 0
    rows = []
    for seen, size in chosen:
        holds, age = (
            "checkpoint" if (seen.path / "state.pt").exists() else "",
            time.time() - seen.modified_at,
        )
        rows.append(
            [Cell(seen.status_text), Cell(holds), Cell(size), Cell(age), Cell(str(seen.path))]
        )
    print(render(Table("", COLUMNS, rows), width=terminal_width()))
    what = "1 directory" if len(chosen) == 1 else f"{len(chosen)} directories"
    what += f" ({format_number('size', sum(size for _, size in chosen))})"
    if not yes and not _agreed(f"Remove {what}? [y/N] "):
        print("removed nothing")
        return 0
    refused = 0
    for seen, _ in chosen:
        try:
            remove_directory(seen, roots)
        except NotRemovable as reason:
            _left(seen, reason)
            refused += 1
    print(f"removed {what}" if not refused else f"removed {len(chosen) - refused} of {what}")
    return 1 if refused else 0


def _removable(
    roots: Sequence[Path], statuses: Sequence[str], where: Sequence[str], trials: bool
) -> list[tuple[Directory, int]]:
    """The directories that may go, each with its size in bytes."""
    if unknown := [word for word in statuses if word not in REMOVABLE]:
        raise FedpflError(
            f"--status {unknown[0]}: clean removes only runs that are {', '.join(REMOVABLE)}"
        )
    looked, chosen = inspect_directories(*roots, where=where, trials=trials), []
    resumable = Counter({"interrupted": sum(seen.status == "interrupted" for seen in looked)})
    for seen in looked:
        if seen.status not in (statuses or DEFAULT_STATUSES):
            continue
        needed = "" if seen.status == "interrupted" else resumable_as(seen)
        if needed and needed not in statuses:
            if seen.status == "broken":
                print_to_stderr(f"left {seen.path}, {seen.status_text}: {MENDABLE.format(needed)}")
            else:
                resumable[needed] += 1
            continue
        try:
            chosen.append((seen, sum(map(_size, removable_paths(seen)))))
        except (NotRemovable, OSError) as reason:
            _left(seen, reason)
    for status, count in (+resumable).items():
        if status not in statuses:
            runs = "1 run" if count == 1 else f"{count} runs"
            print_to_stderr(
                f"left {runs}, {status}: to be resumed, or removed with --status {status}"
            )
    return chosen


def _left(seen: Directory, reason: Exception) -> None:
    print_to_stderr(f"left {seen.path}, {seen.status_text}: {reason}")


def _agreed(question: str) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise FedpflError(
            "removed nothing: there is no terminal to ask on; add --yes to remove what is listed"
        )
    try:
        return input(question).strip().lower() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        print()
        return False


def _written_by_a_run(path: Path) -> bool:
    """Whether it is a file of a run's, or a logger's folder with nothing else in it; a link is
    neither.
    """
    if path.is_symlink():
        return False
    if path.is_file():
        return (
            path.name in _TEMPORARY or path.name in RUN_FILES or path.name.startswith(".clients.")
        )
    return path.name in _FOLDERS and all(
        one.name.startswith(_FOLDERS[path.name]) for one in path.iterdir()
    )


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; links are not followed."""
    return sum(one.lstat().st_size for one in (path, *path.rglob("*")) if not one.is_dir())
