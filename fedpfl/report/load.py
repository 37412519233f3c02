"""Find run directories and read them: a `Run` of each that can be read, a `Directory` of each,
whole or broken.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedpfl.ground.errors import FedpflError, pluralize
from fedpfl.ground.identity import identity
from fedpfl.ground.lock import is_held_by_process
from fedpfl.report import labels, reading
from fedpfl.report.filters import apply_filters
from fedpfl.report.run import STALE_SECONDS, Run
from fedpfl.report.text import clip_text, one_line

_SIGNS = frozenset({"config.yaml", "rounds.csv", "summary.json", "state.pt", "run.lock"})


@dataclass(frozen=True, eq=False)
class Directory:
    """One run directory, whatever is wrong in it.

    status: of STATUSES. changed, held: as in `Run`. run: None where it cannot be read. reason: why
    it is broken, failed or diverged.
    """

    path: Path
    status: str
    modified_at: float
    run: Run | None = None
    reason: str = ""
    is_locked: bool | None = None

    @property
    def status_text(self) -> str:
        """The status, and how far it is: `running 40/400`."""
        return self.run.status_text if self.run else self.status

    @property
    def search_name(self) -> str:
        """The search that it is a trial of, empty for any other run."""
        return self.run.search_name if self.run else ""

    @property
    def hours(self) -> float:
        """Hours of all its processes, of a run that has not finished those of its recorded rounds;
        nan if unknown.
        """
        if self.run is None or self.status == "finished":
            return self.run.summary_number("hours") if self.run else math.nan
        return (
            float(self.run.rounds.reindex(columns=["seconds", "eval_seconds"]).sum().sum()) / 3600
        )

    @property
    def is_stale(self) -> bool:
        """Whether it has not changed for so long that nobody can be writing it."""
        return self.run.is_stale if self.run else time.time() - self.modified_at > STALE_SECONDS


def print_to_stderr(line: str) -> None:
    """Print one line for the user where it does not mix with tables."""
    print(one_line(line), file=sys.stderr)


def no_runs_error(roots: Iterable[Path]) -> FedpflError:
    """Return the error of a command that found no runs."""
    below = ", ".join(map(str, roots))
    return FedpflError(
        f"no runs found below {below}; run `python -m fedpfl.train` first or name another folder"
    )


def runs(
    *roots: str | Path,
    where: Sequence[str] = (),
    warn: Callable[[str], None] = print_to_stderr,
    trials: bool = False,
) -> list[Run]:
    """Read all readable runs below the roots, ordered by path; one call of `warn` for each
    directory that is skipped.

    where: filters, such as `method=fedobp`. trials: as in `read_directories`. Raises FedpflError
    where a root does not exist, or no run is let through.
    """
    found: list[Run] = []
    every = read_directories([*map(Path, roots)], trials, warn)
    kept = set(filter_runs([seen.run for seen in every if seen.run], where))
    for seen in every:
        if seen.run is None or seen.run in kept:
            try:
                found.append(_usable(seen))
            except FedpflError as error:
                warn(f"skipped {error}")
    return _without_copies(sorted(found, key=lambda run: str(run.path)), warn)


def inspect_directories(
    *roots: Path, where: Sequence[str] = (), trials: bool = False
) -> list[Directory]:
    """Look at every run directory below the roots, broken ones too unless there are filters. Raises
    as `runs`.
    """
    every = read_directories(roots, trials)
    kept = set(filter_runs([seen.run for seen in every if seen.run], where))
    return [seen for seen in every if seen.run in kept] if where else every


def read_directories(
    roots: Sequence[Path],
    trials: bool = False,
    warn: Callable[[str], None] = print_to_stderr,
) -> list[Directory]:
    """Look at the run directories below the roots, but for trials of searches; `warn` is told of
    these.

    A trial chose among values and is no result, so it joins no table unless asked for: by `trials`,
    or as a root.

    Raises FedpflError where a root does not exist, or holds trials alone.
    """
    every = [inspect_directory(path) for path in find_run_directories(*roots, warn=warn)]
    named = {root.resolve() for root in roots}
    results = [
        seen for seen in every if trials or not seen.search_name or seen.path.resolve() in named
    ]
    if count := len(every) - len(results):
        hidden = f"{pluralize(count, 'trial')} of searches"
        if not results:
            below = ", ".join(map(str, roots))
            raise FedpflError(f"{below}: there are no runs but {hidden}; --trials shows them")
        warn(f"left out {hidden}; --trials shows them")
    return results


def filter_runs(found: Sequence[Run], where: Sequence[str]) -> list[Run]:
    """Return the runs that filters let through. Raises FedpflError for what no run is."""
    named = [{"method": run.method_title, "dataset": run.dataset} for run in found]
    kept = apply_filters([run.config for run in found], where, named)
    return [run for run, own in zip(found, kept, strict=True) if own]


def find_run_directories(
    *roots: Path, warn: Callable[[str], None] = print_to_stderr
) -> Iterator[Path]:
    """Yield every run directory below the roots once, whole or not, ordered by path; links are not
    followed.

    Raises FedpflError where a root does not exist.
    """
    seen: set[Path] = set()
    for root in roots:
        if not root.is_dir():
            raise FedpflError(
                f"no such directory: {root}; give the folder that holds the runs, such as outputs"
            )
        for folder, subfolders, files in os.walk(
            root, onerror=lambda error: warn(f"skipped {error.filename}: {error.strerror}")
        ):
            subfolders.sort()
            if _SIGNS.isdisjoint(files):
                # .hydra and wandb hold a config.yaml of their own.
                subfolders[:] = [
                    name for name in subfolders if not name.startswith(".") and name != "wandb"
                ]
                continue
            subfolders.clear()
            path = Path(folder)
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield path


def inspect_directory(
    path: Path, held: Callable[[Path], bool | None] = is_held_by_process
) -> Directory:
    """Look at one run directory; never raises for what is wrong in it, which makes it `broken`.
    held: as in `begun`.
    """
    known, changed = held(path), _changed(path)
    try:
        run = read_started_run(path, lambda _: known)
        if run.status == "finished" and not run.rounds_done:
            raise FedpflError(f"{path}: finished, but {_without_rounds(path)}")
    except FedpflError as error:
        reason = str(error).removeprefix(f"{path}: ")
        return Directory(path, "running" if known else "broken", changed, None, reason, known)
    reason = (
        " ".join(str(run.summary.get("error") or "").split())
        if run.status in ("failed", "diverged")
        else ""
    )
    return Directory(path, run.status, run.modified_at, run, reason, run.is_locked)


def read_run(path: Path) -> Run:
    """Read one run directory. Raises FedpflError, in one line, where it is broken or holds no round
    yet.
    """
    return _usable(inspect_directory(path))


def read_started_run(path: Path, held: Callable[[Path], bool | None] = is_held_by_process) -> Run:
    """Read configuration and summary of one run directory, which need not hold a round. Raises as
    `read`.

    held: says whether a living process holds it.
    """
    # The lock before the summary: a run that ends in between reads as finished, not as interrupted.
    known, changed = held(path), _changed(path)
    summary = reading.read_summary(path)
    config = reading.read_config(path, summary)
    for key in ("dataset", "partition", "method"):
        if not isinstance(config.get(key), dict) or "name" not in config[key]:
            raise FedpflError(f"{path}: config.yaml lacks {key}.name")
    if (status := summary.get("status") or "running") not in (
        "finished",
        "running",
        "failed",
        "diverged",
    ):
        raise FedpflError(
            f"{path}: summary.json holds an unknown status, {clip_text(repr(str(status)))}"
        )
    try:
        q, clients = (
            config["method"].get("q"),
            config.get("clients", 1) * config.get("participation", 1.0),
        )
        run = Run(
            path,
            config,
            summary,
            known,
            changed,
            seed=int(config["seed"]),
            method=labels.method_label(config["method"]),
            method_name=str(config["method"]["name"]),
            dataset=labels.dataset_label(config["dataset"]),
            dataset_name=str(config["dataset"]["name"]),
            partition=labels.partition_label(config["partition"]),
            q=float(q) if isinstance(q, int | float) else None,
            cohort=max(1, int(summary.get("cohort") or clients + 1e-9)),
            identity=identity(config),
            fingerprint=str(summary.get("read") or summary.get("data") or ""),
        )
        _ = run.rounds_planned, run.rounds_done
    except reading.VALUE_ERRORS as error:
        why = f"config.yaml or summary.json holds no usable value: {reading.describe_error(error)}"
        raise FedpflError(f"{path}: {why}") from None
    if "files" not in summary and summary.get("identity") not in (
        None,
        f"{run.identity}-seed{run.seed}",
    ):
        raise FedpflError(f"{path}: config.yaml is not the configuration that the run began with")
    return run


def _usable(seen: Directory) -> Run:
    if seen.run is None or not seen.run.rounds_done:
        raise FedpflError(
            f"{seen.path}: {seen.status_text}: {seen.reason or _without_rounds(seen.path)}"
        )
    return seen.run


def _without_copies(found: list[Run], warn: Callable[[str], None]) -> list[Run]:
    """Of runs with one configuration, one seed and the same data (a sweep begun twice), the one
    furthest along.
    """
    best: dict[tuple[str, int, str], Run] = {}
    for run in found:
        key = run.identity, run.seed, run.fingerprint
        other = best.setdefault(key, run)
        if other is not run:
            better, worse = sorted(
                (other, run),
                key=lambda run: (run.status == "finished", run.rounds_done, not run.search_name),
                reverse=True,
            )
            best[key] = better
            warn(f"skipped {worse.path}: same configuration and seed as {better.path}")
    return list(best.values())


def _without_rounds(path: Path) -> str:
    return (
        "no round recorded yet"
        if os.path.lexists(path / "rounds.csv")
        else "no rounds.csv; no round was played"
    )


def _changed(path: Path) -> float:
    """When a file in the directory was last written; a directory that is gone meanwhile changed
    now.
    """
    try:
        with os.scandir(path) as entries:
            times = [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
        return max(times, default=path.stat().st_mtime)
    except OSError:
        return time.time()
