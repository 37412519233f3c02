"""Remove runs that came to nothing: `python -m fedpfl.report clean [ROOT ...]`."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from fedpfl.ground.errors import FedpflError, pluralize
from fedpfl.ground.lock import hold_lock
from fedpfl.report.listing import entries_table, list_entries
from fedpfl.report.load import Directory, print_to_stderr
from fedpfl.report.reading import read_summary
from fedpfl.report.render import show_tables

REMOVABLE = ("failed", "diverged", "broken", "interrupted")
DEFAULT_STATUSES = ("failed", "diverged", "broken")
"""The statuses removed without `--status`, but for runs that can be resumed."""
RUN_FILES = frozenset(
    (
        *("config.yaml", "summary.json", "rounds.csv", "clients.csv", "common.csv", "masks.json"),
        *("partition.npz", "partition.png", "state.pt", "privacy.key", "run.sums", "run.log"),
        *("run.lock", "wandb", "tensorboard"),
    )
)


def clean_runs(
    directories: Sequence[Directory], statuses: Sequence[str], yes: bool, roots: Sequence[Path]
) -> int:
    """List the runs of some statuses, ask, and remove them.

    Args:
        directories: the run directories.
        statuses: of REMOVABLE; none for DEFAULT_STATUSES, and of these only runs that no command
            would resume.
        yes: remove without asking.
        roots: the folders that hold the directories and stay.

    Returns:
        The exit status: 1 if the file system refused to remove a run.

    Raises:
        FedpflError: there is no terminal to ask on.
    """
    # ---- Step 1: the runs that may be removed.
    removable = []
    for directory in directories:
        if directory.status in (statuses or DEFAULT_STATUSES):
            reason = _explain_staying(directory, is_named=bool(statuses))
            if reason:
                print_to_stderr(f"left {directory.path}, {directory.status_text}: {reason}")
            else:
                removable.append(directory)
    if not removable:
        print("nothing to remove")
        return 0

    # ---- Step 2: show them and ask.
    show_tables(entries_table(list_entries(removable)))
    count = "1 directory" if len(removable) == 1 else f"{len(removable)} directories"
    if not yes and not _ask_user(f"Remove {count}? [y/N] "):
        print("removed nothing")
        return 0

    # ---- Step 3: remove them.
    failures = [directory for directory in removable if not _remove_directory(directory, roots)]
    print(f"removed {pluralize(len(removable) - len(failures), 'run')} of {len(removable)}")
    return int(bool(failures))


def _explain_staying(directory: Directory, is_named: bool) -> str:
    """Say why a directory must stay, nothing if it may be removed.

    Args:
        directory: the directory.
        is_named: whether its status was named, which removes resumable runs too.
    """
    try:
        summary = read_summary(directory.path)
    except FedpflError:
        summary = {}
    foreign_names = [path.name for path in directory.path.iterdir() if not _is_of_run(path)]
    if "identity" not in summary:
        return "nothing says that fedpfl wrote it: its summary.json holds no identity"
    if summary.get("status") == "finished":
        return f"its summary.json says finished, though it is broken: {directory.reason}"
    # Without a lock, a process on another machine may be writing.
    if directory.is_locked or (directory.is_locked is None and not directory.is_stale):
        return "a run may be writing there"
    if foreign_names:
        return f"it holds {foreign_names[0]}, which no run wrote"
    if not is_named and directory.status != "diverged" and (directory.path / "state.pt").exists():
        return f"its command goes on from its checkpoint; --status {directory.status} removes it"
    return ""


def _is_of_run(path: Path) -> bool:
    """True if a run wrote a file or folder; links may lead to anything."""
    is_temporary = (
        path.name.startswith(".") and path.name.removeprefix(".").split(".tmp")[0] in RUN_FILES
    )
    return not path.is_symlink() and (path.name in RUN_FILES or is_temporary)


def _ask_user(question: str) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise FedpflError(
            "removed nothing: there is no terminal to ask on; add --yes to remove what is listed"
        )
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        return input(question).strip().lower() in ("y", "yes")
    return False


def _remove_directory(directory: Directory, roots: Sequence[Path]) -> bool:
    """Remove a directory and the empty folders above it; return whether it is gone."""
    try:
        with hold_lock(directory.path) as is_lock_taken:
            if is_lock_taken is False:
                raise OSError("a run has begun to write there")
            shutil.rmtree(directory.path)
    except OSError as error:
        print_to_stderr(f"left {directory.path}: {error.strerror or error}")
        return False
    kept_folders = {
        parent for root in roots for parent in (root.resolve(), *root.resolve().parents)
    }
    with contextlib.suppress(OSError):  # a folder that is not empty refuses
        for folder in directory.path.resolve().parents:
            if folder in kept_folders:
                break
            folder.rmdir()
    return True
