"""Removes runs that came to nothing: `python -m fedpfl.report clean [ROOT ...]`; see `--help`."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedpfl.errors import FedpflError
from fedpfl.report import layout, state
from fedpfl.report.layout import Field
from fedpfl.report.listing import words_of
from fedpfl.report.load import to_stderr
from fedpfl.report.state import REMOVING

REMOVABLE = ("failed", "diverged", "broken", "interrupted")
USUAL = ("failed", "diverged", "broken")
"""Without `--status`: an interrupted run goes on where it stopped, so it must be named."""

RECENT = "written a moment ago, perhaps by a process that cannot be seen; it may go later"

_REPLACED = ("config.yaml", "rounds.csv", "clients.csv", "summary.json", "state.pt", "partition.npz", "partition.png")
_FILES = frozenset({*_REPLACED, *(f".{name}.tmp" for name in _REPLACED), "run.log", "run.lock"})
_STORE = ".clients."  # the beginning of a mapped file's name, where a kill left one


class Kept(Exception):
    """A directory that stays; the message says why."""


@dataclass(frozen=True)
class Candidate:
    """A directory that may be removed. status: of REMOVABLE, or `removing` where an earlier `clean` was killed."""

    path: Path
    status: str
    words: str
    changed: float
    size: int
    checkpoint: bool

    def cells(self) -> list[str]:
        """What stands in COLUMNS."""
        checkpoint = "checkpoint" if self.checkpoint else ""
        age = layout.duration(time.time() - self.changed)
        return [self.words, checkpoint, layout.size(self.size), age, str(self.path)]


COLUMNS = (Field("status"), Field("holds"), Field("size", True), Field("age", True), Field("path"))


def candidates(roots: Sequence[Path], statuses: Sequence[str] = USUAL) -> tuple[list[Candidate], list[str]]:
    """What may be removed below the roots, and a line for each directory of these statuses that stays.

    Raises FedpflError where a root does not exist, or for a status that is never removed.
    """
    unknown = [word for word in statuses if word not in REMOVABLE]
    if unknown:
        raise FedpflError(f"--status {unknown[0]}: clean removes only runs that are {', '.join(REMOVABLE)}")
    looked = [(path, state.read(path)) for path in state.directories(*roots)]
    chosen: list[tuple[Path, state.State | None]] = [(path, None) for path in _begun(roots)]
    chosen += [(path, seen) for path, seen in looked if seen.status in statuses]
    found: list[Candidate] = []
    stay: list[str] = []
    recent: list[str] = []
    for path, seen in chosen:
        try:
            found.append(_judged(path, seen))
        except Kept as reason:
            (recent if str(reason) == RECENT else stay).append(f"left {path}: {reason}")
    # A sweep killed a moment ago is hundreds of them.
    stay += (
        recent if len(recent) <= 3 else [f"left {len(recent)} directories, the first {recent[0].removeprefix('left ')}"]
    )
    resumable = sum(seen.status == "interrupted" for _, seen in looked)
    if resumable and "interrupted" not in statuses:
        stay.append(f"left {_runs(resumable)}, interrupted: to be resumed, or removed with --status interrupted")
    return found, stay


def remove(candidate: Candidate, roots: Sequence[Path]) -> None:
    """Remove a directory, and the folders between it and its root that are empty then.

    It is renamed first, so that a kill leaves either the whole run or what `clean` recognises. Raises Kept, and leaves
    it, where it is no longer as it was, or the file system refuses.
    """
    try:
        if candidate.status == "removing":
            _judged(candidate.path, None)
            shutil.rmtree(candidate.path)
        else:
            with _locked(candidate):
                # Asking for the lock would let go of our own.
                seen = state.read(candidate.path, held=lambda _: False)
                if (seen.status, seen.changed) != (candidate.status, candidate.changed):
                    raise Kept("it has changed meanwhile")
                _judged(candidate.path, seen)
                hidden = _hidden(candidate.path)
                candidate.path.rename(hidden)
                shutil.rmtree(hidden)
    except FileNotFoundError:
        pass  # another `clean` was quicker
    except OSError as error:
        raise Kept(f"cannot be removed: {error.strerror}") from None
    _prune(candidate.path.parent, roots)


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit code: 1 where something stayed that should have gone.

    Raises FedpflError for a mistake of the user's, and where nobody can be asked.
    """
    options = _parser().parse_args(words)
    found, stay = candidates(options.roots, options.status)
    for line in stay:
        to_stderr(line)
    if not found:
        print("nothing to remove")
        return 0
    print(layout.terminal(COLUMNS, [candidate.cells() for candidate in found], width=layout.screen()))
    what = "1 directory" if len(found) == 1 else f"{len(found)} directories"
    what += f" ({layout.size(sum(candidate.size for candidate in found))})"
    if not options.yes and not _agreed(f"Remove {what}? [y/N] "):
        print("removed nothing")
        return 0
    refused = 0
    for candidate in found:
        try:
            remove(candidate, options.roots)
        except Kept as reason:
            to_stderr(f"left {candidate.path}: {reason}")
            refused += 1
    print(f"removed {what}" if not refused else f"removed {len(found) - refused} of {what}")
    return 1 if refused else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fedpfl.report clean",
        description="Removes runs that came to nothing, after asking. Never a finished one, nor one being written.",
    )
    parser.add_argument(
        "roots", nargs="*", metavar="ROOT", type=Path, default=[Path("outputs")], help="default: outputs"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--status",
        type=words_of,
        default=list(USUAL),
        metavar="A,B",
        help=f"of {', '.join(REMOVABLE)}; default: {','.join(USUAL)}",
    )
    return parser


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def _agreed(question: str) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise FedpflError("removed nothing: there is no terminal to ask on; add --yes to remove what is listed")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        print()
        return False


def _judged(path: Path, seen: state.State | None) -> Candidate:
    """The directory, if it may go. seen: what it is; None for one that `clean` had begun to remove. Raises Kept."""
    if path.is_symlink():
        raise Kept("it is a symbolic link")
    strangers = _strangers(path)
    if strangers:
        more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
        raise Kept(f"it holds {strangers[0]}{more}, which no run wrote")
    if seen is None:
        return Candidate(path, "removing", "half removed", path.stat().st_mtime, _size(path), False)
    if seen.told == "finished":
        raise Kept(f"its summary.json says finished, though it is broken: {seen.reason}")
    if seen.status == "broken" and not ((path / "run.lock").exists() or seen.told in ("running", "failed", "diverged")):
        raise Kept("nothing says that a run wrote it: it has no run.lock, and no summary.json with a run's status")
    # Who wrote `failed` has ended. Of others the lock may not tell, where the file system has none.
    if seen.status in ("interrupted", "broken") and not seen.quiet:
        raise Kept(RECENT)
    return Candidate(path, seen.status, seen.words, seen.changed, _size(path), (path / "state.pt").exists())


def _strangers(path: Path) -> list[str]:
    """Names in a run directory that are no file of a run; a link is none."""
    try:
        with os.scandir(path) as entries:
            return sorted(
                entry.name
                for entry in entries
                if not (
                    entry.name in _FILES or entry.name.startswith(_STORE)
                    if entry.is_file(follow_symlinks=False)
                    else entry.name == "wandb" and entry.is_dir(follow_symlinks=False)
                )
            )
    except OSError as error:
        raise Kept(f"cannot be looked at: {error.strerror}") from None


def _begun(roots: Sequence[Path]) -> Iterator[Path]:
    """Directories that an earlier `clean` had begun to remove."""
    seen: set[Path] = set()
    for root in roots:
        for folder, subfolders, _ in os.walk(root):
            for name in sorted(subfolders):
                path = Path(folder, name)
                if name.startswith(REMOVING) and path.resolve() not in seen:
                    seen.add(path.resolve())
                    yield path
            subfolders[:] = [name for name in subfolders if not name.startswith(".") and name != "wandb"]


def _hidden(path: Path) -> Path:
    """A name that no report reads and `clean` recognises."""
    for number in range(1, 1000):
        hidden = path.with_name(f"{REMOVING}{path.name}" + (f"-{number}" if number > 1 else ""))
        if not hidden.exists():
            return hidden
    raise Kept(f"too many {REMOVING}* beside it")


@contextlib.contextmanager
def _locked(candidate: Candidate) -> Iterator[None]:
    """Hold the run directory as a run does, so that none starts in it. Raises Kept where one has."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    path = candidate.path / "run.lock"
    known = path.exists()
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        if not known:
            os.utime(path, (candidate.changed, candidate.changed))  # its age stays what it was
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise Kept("a run is being written there") from None
        except OSError:
            pass  # a file system without locks; the age was looked at
        yield
    finally:
        os.close(lock)


def _size(path: Path) -> int:
    """Bytes of all files, links not followed."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _prune(path: Path, roots: Sequence[Path]) -> None:
    """Remove a folder and its ancestors as far as they are empty, strictly below their root."""
    ends = {root.resolve() for root in roots}
    path = path.resolve()
    with contextlib.suppress(OSError):
        while path not in ends and any(end in path.parents for end in ends):
            path.rmdir()  # refuses what is not empty
            path = path.parent
