"""What `--dry-run` says of a command: composition, data, memory and time; it writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hydra.types import RunMode
from omegaconf import DictConfig

from fedpfl import engine
from fedpfl.config import overrides, tidy
from fedpfl.config.choices import GROUPS
from fedpfl.config.messages import format_error
from fedpfl.config.plan import Plan, check_config
from fedpfl.config.run import Run, build_run
from fedpfl.data.datasets.shared import source
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError, pluralize
from fedpfl.record import console
from fedpfl.record.forecast import Forecast, Remaining, Schedule
from fedpfl.record.run_files import read_checkpoint
from fedpfl.runner import resume, timing
from fedpfl.runner.attendance import warn_if_few_train
from fedpfl.runner.everyone import ClientTable
from fedpfl.runner.header import RunOutlook, format_header
from fedpfl.runner.method_trial import try_plugin_method
from fedpfl.runner.needs import ResourceNeeds, estimate_needs, format_mib, warn_of_shortage

SWEEP_OPTIONS = ("-m", "--multirun")
SHOWN_GROUPS = ("paper", "experiment", "debug", *GROUPS)
SHOWN_SETTINGS = ("seed", "rounds", "clients", "participation", "validation", "unseen")


class DirectoryStatus(NamedTuple):
    """What a run's directory holds.

    Attributes:
        status: of the run, or `new`.
        rounds: how many rounds are played and saved.
    """

    status: str
    rounds: int

    def __str__(self) -> str:
        """Return it for people."""
        if self.status == "new":
            return "new"
        if self.status == "finished":
            return "finished, nothing is left to do"
        return f"{self.status} after round {self.rounds}, from where it goes on"


@dataclass(frozen=True)
class Rehearsal:
    """What is known of a run before it is played.

    Attributes:
        lines: about it, for people.
        needs: what it will hold in memory and on the disk.
        remaining: what is left of it.
        forecast: seconds of its parts, None where they could not be timed.
        directory_status: what its directory holds.
    """

    lines: list[str]
    needs: ResourceNeeds
    remaining: Remaining
    forecast: Forecast | None
    directory_status: DirectoryStatus

    @property
    def seconds(self) -> float:
        """Return how long the rest of it takes, 0 where that is not known."""
        return self.remaining.seconds(self.forecast) if self.forecast else 0.0


class RunCache:
    """Keep what runs of one command share: samples, and forecasts of runs that differ by seed."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}

    def share(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what the first call with this key made."""
        if key not in self._values:
            self._values[key] = make()
        return self._values[key]


def print_dry_run(arguments: Sequence[str]) -> None:
    """Print what a command line would run.

    Args:
        arguments: of `fedpfl.train`, options first, plugins loaded.

    Raises:
        FedpflError: for what the command itself would refuse.
    """
    options = [argument for argument in arguments if argument.startswith("-")]
    other_options = [option for option in options if option not in SWEEP_OPTIONS]
    if other_options:
        raise FedpflError(f"--dry-run goes with -m alone; leave out {other_options[0]}")
    run_words = [argument for argument in arguments if argument not in options]
    try:
        with source.without_writing(), overrides.composing_once():
            _print_runs(run_words, is_sweep=bool(options))
    except source.WouldDownload as absence:
        print(f"data        {absence}")
    except overrides.HYDRA_ERRORS as error:
        raise FedpflError(format_error(error)) from None
    print("dry run     nothing was trained or written")


def _print_runs(settings: Sequence[str], is_sweep: bool) -> None:
    """Print what a run, a sweep or a search of these settings comes to."""
    # What is swept over is composed run by run.
    fixed_settings = [setting for setting in settings if not overrides.is_sweep(setting)]
    common = overrides.compose_config(fixed_settings)
    cache = RunCache()
    if not is_sweep and common.hydra.mode != RunMode.MULTIRUN:
        cfg = overrides.compose_single_run(settings)
        plan = check_config(cfg)
        _print_composition(cfg)
        rehearsal = rehearse_run(
            plan,
            Path(cfg.hydra.run.dir),
            cache,
        )
        print(*rehearsal.lines, sep="\n")
    elif "optuna" in str(common.hydra.sweeper.get("_target_")).lower():
        _print_search(common, cache)
    else:
        _print_sweep(overrides.expand_sweep(settings), cache)


def _print_search(common: DictConfig, cache: RunCache) -> None:
    """Print what a search's trials come to, by the values of the configuration."""
    _print_composition(common)
    path = Path(common.hydra.sweep.dir, "(a trial)")
    rehearsal = rehearse_run(check_config(common), path, cache)
    print(*rehearsal.lines, sep="\n")
    trials = int(common.hydra.sweeper.trials)
    total = console.format_duration(trials * rehearsal.seconds)
    print(f"search      {pluralize(trials, 'trial')}, at most {total} one after another")


def _print_sweep(jobs: Sequence[tuple[list[str], Mapping[str, Any]]], cache: RunCache) -> None:
    """Print a sweep's first run in full, a line for each, and a total.

    Args:
        jobs: words, and values of what is swept over, of each run.
        cache: of what the runs share.

    Raises:
        FedpflError: for runs that would be refused, once all are printed.
    """
    # ---- Step 1: each run; one that is refused does not keep others from being told.
    rehearsals: list[Rehearsal] = []
    refusals: list[str] = []
    for number, (settings, swept_values) in enumerate(jobs, 1):
        values_text = " ".join(f"{key}={value}" for key, value in swept_values.items())
        title = f"run {number} of {len(jobs)}  {values_text}"
        try:
            cfg = overrides.compose_single_run(settings)
            if number == 1:
                _print_composition(cfg)
            path = Path(cfg.hydra.sweep.dir, cfg.hydra.sweep.subdir)
            rehearsal = rehearse_run(check_config(cfg), path, cache)
        except source.WouldDownload:
            raise
        except FedpflError as error:
            refusals.append(f"{title}: {error}")
            print(f"{title}: refused")
            continue
        if not rehearsals:
            print(*rehearsal.lines, sep="\n")
        rehearsals.append(rehearsal)
        time_text = _describe_time(
            rehearsal.directory_status, rehearsal.remaining, rehearsal.forecast
        )
        print(f"{title}: {time_text}")

    # ---- Step 2: all of them together.
    _print_total(rehearsals, len(jobs))
    if refusals:
        raise FedpflError(
            f"{len(refusals)} of {pluralize(len(jobs), 'run')} would be refused: {refusals[0]}"
        )


def _print_total(rehearsals: Sequence[Rehearsal], jobs: int) -> None:
    """Print what the runs of a sweep come to."""
    statuses = [rehearsal.directory_status.status for rehearsal in rehearsals]
    finished_count = statuses.count("finished")
    finished_text = f", {finished_count} of them finished" if finished_count else ""
    total_time = console.format_duration(sum(rehearsal.seconds for rehearsal in rehearsals))
    largest = max((rehearsal.needs.states for rehearsal in rehearsals), default=0)
    disk = sum(rehearsal.needs.checkpoint for rehearsal in rehearsals)
    print(
        f"sweep       {pluralize(jobs, 'run')}{finished_text}: about {total_time} one after another"
    )
    print(
        f"memory      client states up to {format_mib(largest)} MiB a run; checkpoints up to "
        f"{format_mib(disk)} MiB in all"
    )


def _print_composition(cfg: DictConfig) -> None:
    """Print the choices, and the values that most decide how long a run takes."""
    choices = cfg.hydra.runtime.choices
    chosen_groups = [
        f"{group}={choices[group]}"
        for group in SHOWN_GROUPS
        if choices.get(group) not in (None, "null")
    ]
    settings = [f"{key}={cfg[key]}" for key in SHOWN_SETTINGS]
    print(f"composition {' '.join(chosen_groups)}")
    print(f"settings    {' '.join(settings)}")
    for group in ("local", "eval"):
        values = [f"{key}={value}" for key, value in cfg[group].items() if value is not None]
        print(f"{group:12}{' '.join(values)}")


def rehearse_run(plan: Plan, path: Path, cache: RunCache) -> Rehearsal:
    """Build a run, time a part of it, and return what it comes to. Raises FedpflError.

    Args:
        plan: what would be run.
        path: its run directory, which need not be there.
        cache: of what it shares with other runs of the command.
    """
    directory_status = _inspect_directory(path, plan)
    run = build_run(plan, cache.share)
    needs = estimate_needs(run)
    state = resume.restore_state(run, {}, None)

    # ---- Step 1: how long it will take
    schedule = Schedule.of(run.settings.rounds, run.config)
    remaining = schedule.remaining(directory_status.rounds)
    forecast = cache.share(
        ("forecast", plan.identity),
        lambda: timing.forecast_run(run, state),
    )

    # ---- Step 2: the lines that the run itself would begin with
    backend = engine.choose_backend(run.engine, run.net, run.device)
    try_plugin_method(run, backend, state)
    state_bytes = sum(map(tree.nbytes, state.rows.trees))
    outlook = RunOutlook(
        path=path,
        sample_counts=ClientTable(run).sample_counts,
        backend_name=backend.name,
        state_bytes=state_bytes,
        needs=needs,
        time_text=_describe_time(directory_status, remaining, forecast),
    )
    lines = format_header(run, outlook)
    lines.append(f"split       {_describe_split(run)}; data_dir={run.settings.data_dir}")
    lines.append(f"status      {directory_status}")

    # ---- Step 3: what may go wrong
    existing_folder = tidy.find_existing_parent(path)
    notes = [
        *run.notes,
        warn_if_few_train(run, needs.clients),
        *engine.slowness_notices(run.engine, run.device),
        *warn_of_shortage(run, existing_folder, needs, state_bytes),
    ]
    lines.extend(filter(None, notes))
    return Rehearsal(
        lines=lines,
        needs=needs,
        remaining=remaining,
        forecast=forecast,
        directory_status=directory_status,
    )


def _describe_time(
    directory_status: DirectoryStatus, remaining: Remaining, forecast: Forecast | None
) -> str:
    """Return how long the rest of a run takes, for people."""
    if directory_status.status == "finished":
        return str(directory_status)
    if forecast is None:
        return "of unknown length, for a step could not be timed"
    return console.describe_expected_time(remaining, forecast)


def _describe_split(run: Run) -> str:
    """Write how many samples are for what."""
    federations = [run.federation]
    if run.newcomers:
        federations.append(run.newcomers)
    sizes: dict[str, int] = {}
    for title, split in (("training", "train"), ("test", "test"), ("validation", "validation")):
        sizes[title] = sum(
            len(indices) for federation in federations for indices in getattr(federation, split)
        )
    return ", ".join(f"{size:,} {title}" for title, size in sizes.items() if size) + " samples"


def _inspect_directory(path: Path, plan: Plan) -> DirectoryStatus:
    """Return what a run directory holds of the run. Raises FedpflError for another run's."""
    if plan.settings.restart or not (path / "summary.json").is_file():
        return DirectoryStatus("new", 0)
    from fedpfl.report.load import inspect_directory  # pandas is slow to load

    contents = inspect_directory(path)
    if not contents.run:
        return DirectoryStatus(contents.status, 0)
    if (contents.run.identity, contents.run.seed) != (plan.identity, plan.settings.seed):
        raise FedpflError(
            f"run directory {path} holds a different run; choose another with hydra.run.dir=..."
        )
    if contents.status == "finished":
        return DirectoryStatus(contents.status, contents.run.rounds_done)

    # A run goes on from its checkpoint, which may be of an earlier round than its last row.
    checkpoint_round = 0
    if (path / "state.pt").is_file():
        checkpoint_round = read_checkpoint(path, contents.run.summary)["round"]
    return DirectoryStatus(contents.status, checkpoint_round)
