"""Remove runs that came to nothing: `python -m fedpfl.report clean [ROOT ...]`."""

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
"""What is removed without `--status`. A resumable run is removed only by its `resumable_status`."""

# In the order in which they are removed: to the end the directory says whose it was, and is held.
_RESULT_FILES = (
    "state.pt",
    "rounds.csv",
    "clients.csv",
    "common.csv",
    "masks.json",
    "partition.npz",
    "partition.png",
    "run.sums",
    "run.log",
    "privacy.key",
)
RUN_FILES = (*_RESULT_FILES, "config.yaml", "summary.json", "run.lock")
_TEMPORARY_FILES = frozenset(f".{name}.tmp" for name in RUN_FILES)
_LOGGER_FOLDERS = {
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

RESUMABLE_HINT = "its own command goes on from its checkpoint; remove it with --status {},broken"


class NotRemovable(Exception):
    """A directory must stay; the message says why."""


def resumable_status(directory: Directory) -> str:
    """Return the status by which `--status` removes a resumable run; empty for others.

    A resumable run has a checkpoint: an interrupted run, damaged or not, and a failed one, as after
    a full disk. A diverged one would diverge again, and one whose files were being removed is begun
    anew.
    """
    summary = _summary_or_empty(directory.path)
    checkpoint = directory.path / "state.pt"
    # "cleared": its files were being removed when something stopped it.
    if summary.get("cleared") or not checkpoint.is_file():
        return ""
    status = summary.get("status")
    if status == "running":
        return "interrupted"
    return "failed" if status == "failed" and _is_intact(checkpoint) else ""


def _is_intact(checkpoint: Path) -> bool:
    """Return whether a checkpoint is intact, or unreadable at this moment."""
    try:
        digests.check_archive(checkpoint)
    except OSError:
        # A disk that is away for a moment must not cost a checkpoint.
        return True
    except Exception:  # zipfile raises a dozen kinds for a file that is not what it should be
        return False
    return True


def removable_paths(directory: Directory) -> list[Path]:
    """Return the content of a removable directory, in the order to remove it.

    Raises:
        NotRemovable: the directory must stay.
    """
    summary = _summary_or_empty(directory.path)
    if not isinstance(summary.get("identity"), str):
        raise NotRemovable("nothing says that fedpfl wrote it: its summary.json holds no identity")
    if summary.get("status") == "finished":
        raise NotRemovable(
            f"its summary.json says finished, though it is broken: {directory.reason}"
        )
    if directory.is_locked or directory.status == "running":
        raise NotRemovable("a run is being written there")
    # Where no lock tells, a recent change may be that of a process on another machine.
    may_have_writer = directory.is_locked is None or directory.status in ("interrupted", "broken")
    if not directory.is_stale and may_have_writer:
        raise NotRemovable(
            "written a moment ago, perhaps by a process that cannot be seen; it may go later"
        )
    paths = list(directory.path.iterdir())
    foreign_names = [path.name for path in paths if not _is_written_by_run(path)]
    if foreign_names:
        raise NotRemovable(f"it holds {foreign_names[0]}, which no run wrote")

    def removal_order(path: Path) -> int:
        return RUN_FILES.index(path.name) if path.name in RUN_FILES else -1

    return sorted(paths, key=removal_order)


def remove_directory(directory: Directory, roots: Sequence[Path]) -> None:
    """Remove a run directory, and the folders up to its root that are empty then.

    Raises:
        NotRemovable: it is no longer as it was, a run holds it, or the file system refuses.
    """
    # ---- Step 1: hold the run's lock, and look again at what was listed.
    with hold_lock(directory.path) as is_lock_taken:
        if is_lock_taken is False:
            raise NotRemovable("a run is being written there")
        # Asking for the lock would let go of our own.
        is_locked = None if is_lock_taken is None else False
        current = inspect_directory(directory.path, probe_lock=lambda _: is_locked)
        before = directory.status, directory.modified_at
        if (current.status, current.modified_at) != before:
            raise NotRemovable("it has changed meanwhile")

        # ---- Step 2: remove the files in an order that keeps the directory recognisable.
        try:
            for path in removable_paths(current):
                if path.name in _LOGGER_FOLDERS:
                    shutil.rmtree(path)
                else:
                    path.unlink()
            folder = directory.path.resolve()
            root_paths = {root.resolve() for root in roots}
            folder.rmdir()
        except OSError as error:
            raise NotRemovable(f"cannot be removed: {error.strerror}") from None

    # ---- Step 3: folders above that are empty now, up to the root.
    with contextlib.suppress(OSError):  # a folder that is not empty refuses
        folder = folder.parent
        while folder not in root_paths and not root_paths.isdisjoint(folder.parents):
            folder.rmdir()
            folder = folder.parent


def clean_runs(
    roots: Sequence[Path],
    statuses: Sequence[str],
    where: Sequence[str],
    yes: bool,
    trials: bool = False,
) -> int:
    """List the runs of some statuses, ask, and remove them.

    Says which may not be removed, and why.

    Args:
        roots: folders of runs.
        statuses: none for DEFAULT_STATUSES, and of these only runs that no command would resume.
        where: filters, such as `method=fedobp`.
        yes: remove without asking.
        trials: as in `read_directories`.

    Returns:
        The exit status: 1 where a run stayed after all.

    Raises:
        FedpflError: a root does not exist, no run passes the filters, nobody can be asked, or a
            status is never removed.
    """
    # ---- Step 1: what may be removed?
    removable = _find_removable(roots, statuses, where, trials)
    if not removable:
        print("nothing to remove")
        return 0

    # ---- Step 2: show it and ask.
    rows = []
    for directory, size in removable:
        content = "checkpoint" if (directory.path / "state.pt").exists() else ""
        age = time.time() - directory.modified_at
        texts = (directory.status_text, content, size, age, str(directory.path))
        rows.append([Cell(text) for text in texts])
    print(render(Table("", COLUMNS, rows), width=terminal_width()))
    count = "1 directory" if len(removable) == 1 else f"{len(removable)} directories"
    total_size = format_number("size", sum(size for _, size in removable))
    description = f"{count} ({total_size})"
    if not yes and not _confirm(f"Remove {description}? [y/N] "):
        print("removed nothing")
        return 0

    # ---- Step 3: remove it.
    refused = 0
    for directory, _ in removable:
        try:
            remove_directory(directory, roots)
        except NotRemovable as reason:
            _report_left(directory, reason)
            refused += 1
    if not refused:
        print(f"removed {description}")
        return 0
    print(f"removed {len(removable) - refused} of {description}")
    return 1


def _find_removable(
    roots: Sequence[Path], statuses: Sequence[str], where: Sequence[str], trials: bool
) -> list[tuple[Directory, int]]:
    """Return the directories that may be removed, each with its size in bytes."""
    unknown = [status for status in statuses if status not in REMOVABLE]
    if unknown:
        raise FedpflError(
            f"--status {unknown[0]}: clean removes only runs that are {', '.join(REMOVABLE)}"
        )
    directories = inspect_directories(roots, where, trials)

    # ---- Step: the size of each, and who must stay.
    removable = []
    interrupted = [directory for directory in directories if directory.status == "interrupted"]
    resumable_counts = Counter({"interrupted": len(interrupted)})
    for directory in directories:
        if directory.status not in (statuses or DEFAULT_STATUSES):
            continue
        required_status = ""
        if directory.status != "interrupted":
            required_status = resumable_status(directory)
        if required_status and required_status not in statuses:
            if directory.status == "broken":
                _report_left(directory, RESUMABLE_HINT.format(required_status))
            else:
                resumable_counts[required_status] += 1
            continue
        try:
            size = sum(map(_size_in_bytes, removable_paths(directory)))
        except (NotRemovable, OSError) as reason:
            _report_left(directory, reason)
            continue
        removable.append((directory, size))

    # ---- Step: say which runs stay as they can be resumed.
    # The unary plus drops statuses that no run has.
    for status, count in (+resumable_counts).items():
        if status not in statuses:
            counted_runs = "1 run" if count == 1 else f"{count} runs"
            print_to_stderr(
                f"left {counted_runs}, {status}: to be resumed, or removed with --status {status}"
            )
    return removable


def _summary_or_empty(path: Path) -> dict[str, Any]:
    """Return the content of a directory's summary.json, {} where it is absent or damaged."""
    try:
        return read_summary(path)
    except FedpflError:
        return {}


def _report_left(directory: Directory, reason: Exception | str) -> None:
    print_to_stderr(f"left {directory.path}, {directory.status_text}: {reason}")


def _confirm(question: str) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise FedpflError(
            "removed nothing: there is no terminal to ask on; add --yes to remove what is listed"
        )
    try:
        return input(question).strip().lower() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        print()
        return False


def _is_written_by_run(path: Path) -> bool:
    """Return whether a run wrote it: a file, or a logger's folder.

    The folder holds nothing else; a link is neither.
    """
    # What a link leads to may be anybody's.
    if path.is_symlink():
        return False
    name = path.name
    if path.is_file():
        return name in _TEMPORARY_FILES or name in RUN_FILES or name.startswith(".clients.")
    if name not in _LOGGER_FOLDERS:
        return False
    return all(entry.name.startswith(_LOGGER_FOLDERS[name]) for entry in path.iterdir())


def _size_in_bytes(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder."""
    entries = (path, *path.rglob("*"))
    # lstat: the size of a link, not of what it leads to.
    return sum(entry.lstat().st_size for entry in entries if not entry.is_dir())
