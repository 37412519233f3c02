"""What `--dry-run` says of a command: composition, data, memory and time of its runs; nothing is
written.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra.types import RunMode
from omegaconf import DictConfig

from fedpfl import engine
from fedpfl.config import overrides, tidy
from fedpfl.config.choices import GROUPS
from fedpfl.config.messages import format_error
from fedpfl.config.plan import Plan, Run, build_run, check_config
from fedpfl.data.datasets.shared import source
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError, pluralize
from fedpfl.record import console
from fedpfl.record.forecast import Forecast, Remaining, Schedule
from fedpfl.runner import resume, timing
from fedpfl.runner.attendance import warn_if_few_train
from fedpfl.runner.everyone import ClientTable
from fedpfl.runner.header import format_header
from fedpfl.runner.needs import ResourceNeeds, estimate_needs, format_mib, warn_of_shortage

SWEEP_OPTIONS = ("-m", "--multirun")
CHOICES = ("paper", "experiment", "debug", *GROUPS)
GENERAL = ("seed", "rounds", "clients", "participation", "validation", "unseen")


class Found(NamedTuple):
    """What a run's directory holds: its status, and how many rounds were played."""

    status: str
    rounds: int

    def __str__(self) -> str:
        """Return it for people."""
        words = {"new": "new", "finished": "finished, nothing is left to do"}
        return words.get(
            self.status, f"{self.status} after round {self.rounds}, from where it goes on"
        )


class Rehearsed(NamedTuple):
    """Hold what is known of a run before it is played.

    Attributes:
        lines: about it, for people.
        needs: what it will hold in memory and on the disk.
        remaining: what is left of it.
        forecast: seconds of its parts, None where they could not be timed.
        found: what its directory holds.
    """

    lines: list[str]
    needs: ResourceNeeds
    remaining: Remaining
    forecast: Forecast | None
    found: Found

    @property
    def time(self) -> str:
        """Return how long the rest of it takes, for people."""
        if self.found.status == "finished":
            return str(self.found)
        if self.forecast is None:
            return "of unknown length, for a step could not be timed"
        return console.describe_expected_time(self.remaining, self.forecast)

    @property
    def seconds(self) -> float:
        """Return how long the rest of it takes, 0 where that is not known."""
        return self.remaining.seconds(self.forecast) if self.forecast else 0.0


class Cache:
    """Keep what runs of one command have in common: samples, and the forecasts of runs that differ
    by seed.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def share(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what the first call with this key made."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def print_dry_run(words: Sequence[str]) -> None:
    """Print what a command line would run.

    Args:
        words: of `fedpfl.train`, options first, plugins loaded.

    Raises:
        FedpflError: for what the command itself would refuse.
    """
    options = [word for word in words if word.startswith("-")]
    if others := [option for option in options if option not in SWEEP_OPTIONS]:
        raise FedpflError(f"--dry-run goes with -m alone; leave out {others[0]}")
    keys = [word for word in words if word not in options]
    try:
        with source.writing_nothing():
            _show(keys, is_sweep=bool(options))
    except source.WouldDownload as absent:
        print(f"data        {absent}")
    except overrides.HYDRA_ERRORS as error:
        raise FedpflError(format_error(error)) from None
    print("dry run     nothing was trained or written")


def _show(keys: Sequence[str], is_sweep: bool) -> None:
    """Print what a run, a sweep or a search of these keys comes to."""
    common, cache = (
        overrides.compose_config([key for key in keys if not overrides.is_sweep(key)]),
        Cache(),
    )
    if not is_sweep and common.hydra.mode != RunMode.MULTIRUN:
        cfg = overrides.compose_single_run(keys)
        _print_composition(cfg)
        print(*rehearse(check_config(cfg), Path(cfg.hydra.run.dir), cache).lines, sep="\n")
    elif "optuna" in str(common.hydra.sweeper.get("_target_")).lower():
        _show_search(common, cache)
    else:
        _show_sweep(overrides.expand_sweep(keys), cache)


def _show_search(common: DictConfig, cache: Cache) -> None:
    """Print what the trials of a search come to, by the values that the configuration itself has."""
    _print_composition(common)
    rehearsed = rehearse(check_config(common), Path(common.hydra.sweep.dir, "(a trial)"), cache)
    print(*rehearsed.lines, sep="\n")
    trials = int(common.hydra.sweeper.trials)
    total = console.format_duration(trials * rehearsed.seconds)
    print(f"search      {pluralize(trials, 'trial')}, at most {total} one after another")


def _show_sweep(jobs: Sequence[tuple[list[str], Mapping[str, Any]]], cache: Cache) -> None:
    """Print the first run of a sweep in full, a line for each, and what all come to. Raises
    FedpflError.
    """
    all_rehearsed, refused = list[Rehearsed](), list[str]()
    for number, (words, swept) in enumerate(jobs, 1):
        title = f"run {number} of {len(jobs)}  {' '.join(f'{key}={value}' for key, value in swept.items())}"
        try:
            cfg = overrides.compose_single_run(words)
            if number == 1:
                _print_composition(cfg)
            path = Path(cfg.hydra.sweep.dir, cfg.hydra.sweep.subdir)
            rehearsed = rehearse(check_config(cfg), path, cache)
        except source.WouldDownload:
            raise
        except FedpflError as error:
            refused.append(f"{title}: {error}")
            print(f"{title}: refused")
            continue
        if not all_rehearsed:
            print(*rehearsed.lines, sep="\n")
        all_rehearsed.append(rehearsed)
        print(f"{title}: {rehearsed.time}")
    _print_total(all_rehearsed, len(jobs))
    if refused:
        raise FedpflError(
            f"{len(refused)} of {pluralize(len(jobs), 'run')} would be refused: {refused[0]}"
        )


def _print_total(all_rehearsed: Sequence[Rehearsed], jobs: int) -> None:
    """Print what the runs of a sweep come to."""
    finished = sum(own.found.status == "finished" for own in all_rehearsed)
    done = f", {finished} of them finished" if finished else ""
    seconds = console.format_duration(sum(own.seconds for own in all_rehearsed))
    largest = max((own.needs.states for own in all_rehearsed), default=0)
    disk = sum(own.needs.checkpoint for own in all_rehearsed)
    print(f"sweep       {pluralize(jobs, 'run')}{done}: about {seconds} one after another")
    print(
        f"memory      client states up to {format_mib(largest)} MiB a run; checkpoints up to {format_mib(disk)} MiB in all"
    )


def _print_composition(cfg: DictConfig) -> None:
    """Print which choices were made, and the values that most decide how long a run takes."""
    chosen = cfg.hydra.runtime.choices
    words = [
        f"{group}={chosen[group]}" for group in CHOICES if chosen.get(group) not in (None, "null")
    ]
    general = [f"{key}={cfg[key]}" for key in GENERAL]
    print(f"composition {' '.join(words)}")
    print(f"settings    {' '.join(general)}")
    for group in ("local", "eval"):
        values = [f"{key}={value}" for key, value in cfg[group].items() if value is not None]
        print(f"{group:12}{' '.join(values)}")


def rehearse(plan: Plan, path: Path, cache: Cache) -> Rehearsed:
    """Build a run, time a part of it, and return what it comes to. Raises FedpflError.

    Args:
        plan: what would be run.
        path: its run directory, which need not be there.
        cache: of what it shares with other runs of the command.
    """
    found = _look_into(path, plan)
    run = build_run(plan, cache.share)
    needs, state = estimate_needs(run), resume.restore_state(run, {}, None)
    rounds = run.settings.rounds
    remaining = Schedule.of(rounds, run.config).remaining(found.rounds)
    forecast = cache.share(("forecast", plan.identity), lambda: timing.forecast_run(run, state))
    rehearsed = Rehearsed([], needs, remaining, forecast, found)
    backend = engine.choose(run.engine, run.net, run.device)
    held = sum(map(tree.nbytes, state.rows.trees))
    counts = ClientTable(run).counts
    lines = format_header(
        run, path, run.cohort, counts, backend.name, held, needs, time=rehearsed.time
    )
    place = tidy.find_existing_parent(path)
    notes = [
        *run.notes,
        warn_if_few_train(run, needs.clients),
        *engine.slow(run.engine, run.device),
        *warn_of_shortage(run, place, needs, held),
    ]
    splits = f"split       {_describe_split(run)}; data_dir={run.settings.data_dir}"
    rehearsed.lines.extend([*lines, splits, f"status      {found}", *filter(None, notes)])
    return rehearsed


def _describe_split(run: Run) -> str:
    """Write how many samples are for what."""
    members = [run.federation, *([run.unseen] if run.unseen else [])]
    sizes = {
        name: sum(len(own) for one in members for own in getattr(one, split))
        for name, split in (("training", "train"), ("test", "test"), ("validation", "validation"))
    }
    return ", ".join(f"{size:,} {name}" for name, size in sizes.items() if size) + " samples"


def _look_into(path: Path, plan: Plan) -> Found:
    """Return what a run directory holds of the run. Raises FedpflError where that is another one."""
    if plan.settings.restart or not (path / "summary.json").is_file():
        return Found("new", 0)
    from fedpfl.report.load import inspect_directory  # pandas is slow to load

    seen = inspect_directory(path)
    if seen.run and (seen.run.identity, seen.run.seed) != (plan.identity, plan.settings.seed):
        raise FedpflError(
            f"run directory {path} holds a different run; choose another with hydra.run.dir=..."
        )
    return Found(seen.status, seen.run.rounds_done if seen.run else 0)
