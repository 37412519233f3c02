"""Find run directories and read them: a `Run` of each readable one, a `Directory` of each."""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedpfl.ground.errors import FedpflError, pluralize
from fedpfl.ground.identity import identity
from fedpfl.ground.lock import is_held_by_process
from fedpfl.report import labels, reading
from fedpfl.report.filters import apply_filters
from fedpfl.report.run import STALE_SECONDS, Run
from fedpfl.report.text import clip_text, one_line

_RUN_FILES = frozenset({"config.yaml", "rounds.csv", "summary.json", "state.pt", "run.lock"})
"""A folder with one of these is a run directory."""
_NO_ROUND = "no round recorded yet"


@dataclass(frozen=True, eq=False)
class Directory:
    """One run directory, readable or broken.

    Attributes:
        path: the directory.
        status: one of STATUSES.
        modified_at: as in `Run`.
        run: the run, None where it cannot be read.
        reason: why it is broken, failed or diverged.
        is_locked: as in `Run`.
    """

    path: Path
    status: str
    modified_at: float
    run: Run | None = None
    reason: str = ""
    is_locked: bool | None = None

    @property
    def status_text(self) -> str:
        """Return the status and the progress: `running 40/400`."""
        return self.run.status_text if self.run else self.status

    @property
    def is_stale(self) -> bool:
        """True if it is too old to be still written."""
        if self.run:
            return self.run.is_stale
        return time.time() - self.modified_at > STALE_SECONDS


def print_to_stderr(line: str) -> None:
    """Print one line for the user where it does not mix with tables."""
    print(one_line(line), file=sys.stderr)


def no_runs_error(roots: Iterable[Path]) -> FedpflError:
    """Return the error of a command that found no runs."""
    folders = ", ".join(map(str, roots))
    return FedpflError(
        f"no runs found below {folders}; run `python -m fedpfl.train` first or name another folder"
    )


def runs(
    *roots: str | Path,
    where: Sequence[str] = (),
    trials: bool = False,
) -> list[Run]:
    """Read all readable runs below the roots, ordered by path.

    Arguments and errors are those of `read_directories`.
    """
    return readable_runs(read_directories([*map(Path, roots)], where, trials))


def readable_runs(directories: Iterable[Directory]) -> list[Run]:
    """Return the runs of directories that hold a round, ordered by path.

    Of runs of one configuration, seed and data it is the one with most rounds.
    """
    # ---- Step 1: those that can be read.
    readable = []
    for directory in directories:
        try:
            readable.append(_require_rounds(directory))
        except FedpflError as error:
            print_to_stderr(f"skipped {error}")
    readable.sort(key=lambda run: str(run.path))

    # ---- Step 2: no copies. Of runs with equal rounds the one that is no trial.
    best_first = sorted(
        readable,
        key=lambda run: (run.status == "finished", run.rounds_done, not run.search_name),
        reverse=True,
    )
    best_runs: dict[tuple[str, int, str], Run] = {}
    for run in best_first:
        better = best_runs.setdefault((run.identity, run.seed, run.fingerprint), run)
        if better is not run:
            print_to_stderr(f"skipped {run.path}: same configuration and seed as {better.path}")
    return [run for run in readable if run in best_runs.values()]


def read_directories(
    roots: Sequence[Path],
    where: Sequence[str] = (),
    trials: bool = False,
) -> list[Directory]:
    """Inspect the run directories below the roots, but for trials of searches.

    A trial chose among values and is no result, so it joins no table unless asked for. Unreadable
    directories pass the filters, so that the user hears of them.

    Args:
        roots: folders of runs.
        where: filters, such as `method=fedobp`.
        trials: whether to include trials.

    Raises:
        FedpflError: a root does not exist, or holds trials alone, or no run passes the filters.
    """
    # ---- Step 1: without trials.
    directories = [inspect_directory(path) for path in find_run_directories(roots)]
    results = []
    for directory in directories:
        is_trial = directory.run is not None and directory.run.search_name != ""
        if trials or not is_trial:
            results.append(directory)
    trial_count = len(directories) - len(results)
    if trial_count:
        hidden = f"{pluralize(trial_count, 'trial')} of searches"
        if not results:
            folders = ", ".join(map(str, roots))
            raise FedpflError(f"{folders}: there are no runs but {hidden}; --trials shows them")
        print_to_stderr(f"left out {hidden}; --trials shows them")

    # ---- Step 2: those that pass the filters.
    candidates = [directory.run for directory in results if directory.run]
    titles = [{"method": run.method_title, "dataset": run.dataset} for run in candidates]
    passes = apply_filters([run.config for run in candidates], where, titles)
    chosen_runs = {None, *itertools.compress(candidates, passes)}
    return [directory for directory in results if directory.run in chosen_runs]


def experiment_folder(path: Path) -> Path:
    """Return the folder of a run's `<method>/<key>/seed<k>`, else the one that holds the run."""
    path = path.resolve()
    is_usual_place = re.fullmatch(r"seed\d+", path.name) and len(path.parents) > 2
    return path.parents[2] if is_usual_place else path.parent


def find_run_directories(roots: Sequence[Path]) -> Iterator[Path]:
    """Yield every run directory below the roots once, ordered by path.

    Links are not followed.

    Raises:
        FedpflError: a root does not exist.
    """

    def warn_unreadable(error: OSError) -> None:
        print_to_stderr(f"skipped {error.filename}: {error.strerror}")

    visited: set[Path] = set()
    for root in roots:
        if not root.is_dir():
            raise FedpflError(
                f"no such directory: {root}; give the folder that holds the runs, such as outputs"
            )
        # A run directory has no runs inside, so the walk does not go on below it.
        for folder, subfolders, files in os.walk(root, onerror=warn_unreadable):
            # In place, as os.walk goes on by this list.
            subfolders.sort()
            if _RUN_FILES.isdisjoint(files):
                # .hydra and wandb hold a config.yaml of their own.
                subfolders[:] = [
                    name for name in subfolders if not name.startswith(".") and name != "wandb"
                ]
                continue
            subfolders.clear()
            path = Path(folder)
            if path.resolve() not in visited:
                visited.add(path.resolve())
                yield path


def inspect_directory(path: Path) -> Directory:
    """Inspect one run directory; anything wrong in it makes it `broken`."""
    # The lock before the summary: a run that ends in between reads as finished.
    is_locked = is_held_by_process(path)
    modified_at = _last_modification(path)
    try:
        run = read_started_run(path)
        if run.status == "finished" and not run.rounds_done:
            raise FedpflError(f"{path}: finished, but {_NO_ROUND}")
    except FedpflError as error:
        status = "running" if is_locked else "broken"
        reason = str(error).removeprefix(f"{path}: ")
        return Directory(path, status, modified_at, None, reason, is_locked)
    reason = ""
    if run.status in ("failed", "diverged"):
        reason = " ".join(str(run.summary.get("error") or "").split())
    return Directory(path, run.status, run.modified_at, run, reason, run.is_locked)


def read_run(path: Path) -> Run:
    """Read one run directory. Raises FedpflError if it is broken or holds no round yet."""
    return _require_rounds(inspect_directory(path))


def read_started_run(path: Path) -> Run:
    """Read configuration and summary of a run that need not have a round yet.

    Raises:
        FedpflError: the directory is broken.
    """
    is_locked = is_held_by_process(path)
    modified_at = _last_modification(path)
    summary = reading.read_summary(path)
    config = reading.read_config(path, summary)
    for key in ("dataset", "partition", "method"):
        if not isinstance(config.get(key), dict) or "name" not in config[key]:
            raise FedpflError(f"{path}: config.yaml lacks {key}.name")
    status = summary.get("status") or "running"
    if status not in ("finished", "running", "failed", "diverged"):
        raise FedpflError(
            f"{path}: summary.json holds an unknown status, {clip_text(repr(str(status)))}"
        )
    try:
        q = config["method"].get("q")
        expected_cohort = config.get("clients", 1) * config.get("participation", 1.0)
        partition = labels.partition_label(config["partition"])
        run = Run(
            path=path,
            config=config,
            summary=summary,
            is_locked=is_locked,
            modified_at=modified_at,
            seed=int(config["seed"]),
            method=labels.method_label(config["method"], own_title=str(summary.get("title") or "")),
            method_name=str(config["method"]["name"]),
            dataset=labels.dataset_label(config["dataset"]),
            dataset_name=str(config["dataset"]["name"]),
            partition=", ".join(filter(None, (partition, labels.conditions_label(config)))),
            q=float(q) if isinstance(q, int | float) else None,
            cohort=max(1, int(summary.get("cohort") or expected_cohort + 1e-9)),
            identity=identity(config),
            fingerprint=str(summary.get("read") or ""),
        )
        # Looked at here, so that values of a wrong kind are found now.
        _ = run.rounds_planned, run.rounds_done
    except reading.VALUE_ERRORS as error:
        reason = reading.describe_error(error)
        raise FedpflError(
            f"{path}: config.yaml or summary.json holds no usable value: {reason}"
        ) from None
    return run


def _require_rounds(directory: Directory) -> Run:
    if directory.run is None or not directory.run.rounds_done:
        reason = directory.reason or _NO_ROUND
        raise FedpflError(f"{directory.path}: {directory.status_text}: {reason}")
    return directory.run


def _last_modification(path: Path) -> float:
    """Return when a file in the directory was last written.

    A directory that is gone meanwhile was modified now.
    """
    try:
        with os.scandir(path) as entries:
            times = [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
        return max(times, default=path.stat().st_mtime)
    except OSError:
        return time.time()
