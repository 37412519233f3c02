"""Print the composition, data, memory and first round of a command; write nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from fedpfl import engine
from fedpfl.config import overrides
from fedpfl.config.choices import GROUPS
from fedpfl.config.messages import format_error
from fedpfl.config.plan import Plan, check_config
from fedpfl.config.run import build_run
from fedpfl.data.datasets.shared import source
from fedpfl.ground import answer
from fedpfl.ground.errors import FedpflError, pluralize
from fedpfl.ground.records import Values
from fedpfl.privacy import Secret
from fedpfl.runner import header, loop, resume
from fedpfl.runner.faults import user_errors
from fedpfl.runner.needs import estimate_needs
from fedpfl.testing.run_trial import try_plugins

SWEEP_OPTIONS = ("-m", "--multirun")
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


def _print_runs(run_words: Sequence[str], is_sweep: bool) -> None:
    """Print a run, a sweep or a search of these words."""
    # The runs of a sweep are composed one by one.
    cfg = overrides.compose_config([word for word in run_words if not overrides.is_sweep(word)])
    path = Path(cfg.hydra.sweep.dir, "(a trial)")
    is_search = "optuna" in str(cfg.hydra.sweeper.get("_target_")).lower()
    if is_sweep or cfg.hydra.mode == RunMode.MULTIRUN:
        if not is_search:
            _print_sweep(overrides.expand_sweep(run_words))
            return
    else:
        cfg = overrides.compose_single_run(run_words)
        path = Path(cfg.hydra.run.dir)
        is_search = False
    _print_composition(cfg)
    _rehearse_run(cfg, path, RunCache())
    if is_search:
        print(f"search      {pluralize(int(cfg.hydra.sweeper.trials), 'trial')}")


def _print_sweep(jobs: Sequence[tuple[list[str], Values]]) -> None:
    """Print a sweep's first run in full, and a line for each run.

    Args:
        jobs: words, and values of the swept keys, of each run.

    Raises:
        FedpflError: for runs that would be refused, after all are printed.
    """
    cache = RunCache()
    has_rehearsed = False
    refusals: list[str] = []
    for number, (run_words, swept_values) in enumerate(jobs, 1):
        values_text = " ".join(f"{key}={value}" for key, value in swept_values.items())
        title = f"run {number} of {len(jobs)}  {values_text}"
        try:
            cfg = overrides.compose_single_run(run_words)
            if number == 1:
                _print_composition(cfg)
            path = Path(cfg.hydra.sweep.dir, cfg.hydra.sweep.subdir)
            status = _rehearse_run(cfg, path, cache, plays_round=not has_rehearsed)
            has_rehearsed = True
        except source.WouldDownload as absence:
            status = str(absence)
        except FedpflError as error:
            status = f"refused: {error}"
            refusals.append(f"{title}: {error}")
        print(f"{title}: {status}")
    if refusals:
        raise FedpflError(
            f"{len(refusals)} of {pluralize(len(jobs), 'run')} would be refused: {refusals[0]}"
        )


def _print_composition(cfg: DictConfig) -> None:
    """Print the choices and the most important values."""
    choices = cfg.hydra.runtime.choices
    chosen_groups = [group for group in SHOWN_GROUPS if choices.get(group) not in (None, "null")]
    print("composition", *[f"{group}={choices[group]}" for group in chosen_groups])
    print("settings   ", *[f"{key}={cfg[key]}" for key in SHOWN_SETTINGS])
    for group in ("local", "eval"):
        # What is no group at all, the check refuses.
        group_values = cfg[group] if OmegaConf.is_dict(cfg[group]) else {}
        values = [f"{key}={value}" for key, value in group_values.items() if value is not None]
        print(f"{group:11} {' '.join(values)}")


def _rehearse_run(cfg: DictConfig, path: Path, cache: RunCache, plays_round: bool = True) -> str:
    """Build a run, play its first round in memory, and print both. Raises FedpflError.

    Args:
        cfg: its configuration.
        path: its run directory, which need not exist.
        cache: shared by the runs of the command.
        plays_round: False to build it alone.

    Returns:
        Its status.
    """
    # ---- Step 1: composition, data and memory.
    plan = check_config(cfg)
    status = _describe_directory(path, plan)
    run = build_run(plan, cache.share)
    facts = {"path": path, "status": status, "identity": plan.identity}
    facts |= header.make_summary_facts(run)
    answer.add_facts(runs=[facts])
    if not plays_round:
        return status
    needs = estimate_needs(run)
    state = resume.restore_state(run, {}, None)
    backend = engine.choose_backend(run.engine, run.net, run.device)
    try_plugins(run, backend, state.round)
    print(*header.format_header(run, path, backend.name, needs), sep="\n")
    print(f"data_dir    {run.settings.data_dir}")
    print(f"status      {status}")
    for note in header.list_notes(run):
        print(note)

    # ---- Step 2: its first round, and an evaluation of all clients.
    secret = Secret.of_seed(run.settings.seed)  # of no run that is kept
    tried_run = replace(
        run,
        eval=replace(run.eval, every=1, finetune_every=1),
        secret=secret if run.account else None,
    )
    with user_errors(cfg, path):
        row = next(loop.train_rounds(tried_run, backend, state)).row
    facts |= {"needs": needs._asdict(), "last": row}
    text = f"round 1 took {row['seconds']:.2f} s"
    if row.get("eval_seconds") is not None:
        text += f", an evaluation of all clients {row['eval_seconds']:.2f} s"
    print(f"time        {text}")
    return status


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
    return contents.status_text
