"""Print the composition, data, memory and first round of a command; write nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig

from fedpfl import engine
from fedpfl.config import overrides
from fedpfl.config.choices import GROUPS
from fedpfl.config.messages import format_error
from fedpfl.config.plan import Plan, check_config
from fedpfl.config.run import Run, build_run
from fedpfl.data.datasets.shared import source
from fedpfl.ground.errors import FedpflError, pluralize
from fedpfl.privacy import Secret
from fedpfl.record.run_files import read_checkpoint
from fedpfl.runner import header, loop, resume
from fedpfl.runner.everyone import ClientTable
from fedpfl.runner.faults import user_errors
from fedpfl.runner.needs import ResourceNeeds, estimate_needs, format_mib
from fedpfl.testing.run_trial import try_plugins

SWEEP_OPTIONS = ("-m", "--multirun")
FINISHED = "finished, nothing is left to do"
SHOWN_GROUPS = ("paper", "experiment", "debug", *GROUPS)
SHOWN_SETTINGS = ("seed", "rounds", "clients", "participation", "validation", "unseen")


class RunCache(dict[Any, Any]):
    """Keep the samples that runs of one command share."""

    def share(self, key: Any, make: Any) -> Any:
        """Return the value that the first call with this key made."""
        if key not in self:
            self[key] = make()
        return self[key]


def print_dry_run(arguments: Sequence[str]) -> None:
    """Print the runs of a command line.

    Args:
        arguments: of `fedpfl.train`, options first, plugins loaded.

    Raises:
        FedpflError: for mistakes that the command itself would refuse.
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
    """Print a run, a sweep or a search of these settings."""
    # The runs of a sweep are composed one by one.
    fixed_settings = [setting for setting in settings if not overrides.is_sweep(setting)]
    common = overrides.compose_config(fixed_settings)
    if not is_sweep and common.hydra.mode != RunMode.MULTIRUN:
        cfg = overrides.compose_single_run(settings)
        _rehearse_run(cfg, check_config(cfg), Path(cfg.hydra.run.dir), RunCache())
    elif "optuna" in str(common.hydra.sweeper.get("_target_")).lower():
        path = Path(common.hydra.sweep.dir, "(a trial)")
        _rehearse_run(common, check_config(common), path, RunCache())
        print(f"search      {pluralize(int(common.hydra.sweeper.trials), 'trial')}")
    else:
        _print_sweep(overrides.expand_sweep(settings))


def _print_sweep(jobs: Sequence[tuple[list[str], Mapping[str, Any]]]) -> None:
    """Print a sweep's first run in full, a line for each run, and totals.

    Args:
        jobs: words, and values of the swept keys, of each run.

    Raises:
        FedpflError: for runs that would be refused, after all are printed.
    """
    cache = RunCache()
    needs: list[ResourceNeeds] = []
    finished_count = 0
    refusals: list[str] = []
    downloads: dict[str, None] = {}
    for number, (settings, swept_values) in enumerate(jobs, 1):
        values_text = " ".join(f"{key}={value}" for key, value in swept_values.items())
        title = f"run {number} of {len(jobs)}  {values_text}"
        try:
            cfg = overrides.compose_single_run(settings)
            path = Path(cfg.hydra.sweep.dir, cfg.hydra.sweep.subdir)
            plan = check_config(cfg)
            status = _describe_directory(path, plan)
            if needs:
                needs.append(estimate_needs(build_run(plan, cache.share)))
            else:
                needs.append(_rehearse_run(cfg, plan, path, cache))
        except source.WouldDownload as absence:
            downloads[str(absence)] = None
            print(f"{title}: its data would be downloaded")
            continue
        except FedpflError as error:
            refusals.append(f"{title}: {error}")
            print(f"{title}: refused: {error}")
            continue
        finished_count += status == FINISHED
        print(f"{title}: {status}")

    # ---- All runs together
    for download in downloads:
        print(f"data        {download}")
    print(f"sweep       {pluralize(len(jobs), 'run')}, {finished_count} of them finished")
    print(
        f"memory      client states up to {format_mib(max((n.states for n in needs), default=0))} "
        f"MiB a run; checkpoints up to {format_mib(sum(n.checkpoint for n in needs))} MiB in all"
    )
    if refusals:
        raise FedpflError(
            f"{len(refusals)} of {pluralize(len(jobs), 'run')} would be refused: {refusals[0]}"
        )


def _print_composition(cfg: DictConfig) -> None:
    """Print the choices and the most important values."""
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


def _rehearse_run(cfg: DictConfig, plan: Plan, path: Path, cache: RunCache) -> ResourceNeeds:
    """Build a run, play its first round in memory, and print both. Raises FedpflError.

    Args:
        cfg: its configuration.
        plan: the same, checked.
        path: its run directory, which need not exist.
        cache: shared by the runs of the command.
    """
    _print_composition(cfg)
    status = _describe_directory(path, plan)
    run = build_run(plan, cache.share)
    needs = estimate_needs(run)
    state = resume.restore_state(run, {}, None)
    backend = engine.choose_backend(run.engine, run.net, run.device)
    try_plugins(run, backend, state.round)
    outlook = header.RunOutlook(
        path=path,
        sample_counts=ClientTable(run).sample_counts,
        backend_name=backend.name,
        state=state,
        needs=needs,
    )
    print(*header.format_header(run, outlook), sep="\n")
    print(f"split       {_describe_split(run)}; data_dir={run.settings.data_dir}")
    print(f"status      {status}")
    for note in header.list_notes(run):
        print(note)
    with user_errors(cfg, path):
        print(f"time        {_time_round(run, backend, state)}")
    return needs


def _time_round(run: Run, backend: engine.Backend, state: engine.State) -> str:
    """Play the first round and an evaluation of all clients; return their seconds as text."""
    every_round = replace(run.eval, every=1, finetune_every=1)
    secret = Secret.of_seed(run.settings.seed)  # of no run that is kept
    tried_run = replace(run, eval=every_round, secret=secret if run.account else None)
    played_round = next(loop.train_rounds(tried_run, backend, state))
    seconds = played_round.row["seconds"]
    text = f"round 1 took {seconds:.2f} s"
    evaluation_seconds = played_round.row.get("eval_seconds")
    if evaluation_seconds is not None:
        text += f", an evaluation of all clients {evaluation_seconds:.2f} s"
    evaluations = math.ceil(run.settings.rounds / run.eval.every)
    rounds_text = pluralize(run.settings.rounds, "round")
    return f"{text}; {rounds_text} with {pluralize(evaluations, 'evaluation')} in all"


def _describe_split(run: Run) -> str:
    """Count the samples of each split."""
    federations = [run.federation]
    if run.newcomers:
        federations.append(run.newcomers)
    sizes = {
        split: sum(len(part) for federation in federations for part in getattr(federation, split))
        for split in ("train", "test", "validation")
    }
    return ", ".join(f"{size:,} {split}" for split, size in sizes.items() if size) + " samples"


def _describe_directory(path: Path, plan: Plan) -> str:
    """Describe the run in a directory. Raises FedpflError for another run's."""
    if plan.settings.restart or not (path / "summary.json").is_file():
        return "new"
    from fedpfl.report.load import inspect_directory  # pandas is slow to load

    contents = inspect_directory(path)
    run = contents.run
    if run and (run.identity, run.seed) != (plan.identity, plan.settings.seed):
        raise FedpflError(
            f"run directory {path} holds a different run; choose another with hydra.run.dir=..."
        )
    if contents.status == "finished":
        return FINISHED
    # A run goes on from its checkpoint, which may be of an earlier round than its last row.
    checkpoint_round = 0
    if run and (path / "state.pt").is_file():
        checkpoint_round = read_checkpoint(path, run.summary)["round"]
    return f"{contents.status} after round {checkpoint_round}, from where it goes on"
