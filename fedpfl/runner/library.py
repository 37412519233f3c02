"""Run and load from Python: `fedpfl.run`, `fedpfl.rounds`, `fedpfl.sweep` and `fedpfl.load`."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import sys
import threading
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf

from fedpfl import engine
from fedpfl.config import overrides, plugins
from fedpfl.config.choices import GROUPS
from fedpfl.config.group_options import read_loggers
from fedpfl.config.messages import format_error
from fedpfl.config.plan import check_config
from fedpfl.config.plugins import resolve_files
from fedpfl.config.resolution import escape_interpolations, resolve_config
from fedpfl.config.resolvers import DEFAULT_TEST_FRACTION
from fedpfl.config.run import Run, build_run
from fedpfl.config.run_location import register_resolver
from fedpfl.config.sweep import prepare_sweep
from fedpfl.data.datasets.memory import HeldData, hold_data
from fedpfl.data.fingerprint import FINGERPRINTED_PARTS
from fedpfl.engine.backends import ranks
from fedpfl.engine.backends.selection import find_device
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.files import remove_empty_folders
from fedpfl.ground.records import Record, Values
from fedpfl.ground.words import check_words
from fedpfl.record import console
from fedpfl.record.callbacks import Callback
from fedpfl.record.run_files import read_checkpoint, require_states_here
from fedpfl.report.load import read_started_run
from fedpfl.runner import resume
from fedpfl.runner.faults import Diverged, user_errors
from fedpfl.runner.loop import Round
from fedpfl.runner.models import Models
from fedpfl.runner.session import Session

AnyPath = str | os.PathLike[str]
_process_lock = threading.RLock()
"""Held while a run moves: Hydra, plugins and seeded generators belong to the process.

Calls in several threads take turns, a round each.
"""


class RunRequest(NamedTuple):
    """Name the run that a call asks for.

    Attributes:
        cfg: its configuration, with Hydra's part.
        path: its run directory.
        experiment: the experiment that it belongs to, None without any.
        held_data: its samples, where they are in memory.
    """

    cfg: DictConfig
    path: Path
    experiment: str | None
    held_data: HeldData | None = None


def run(
    *settings: str | Values,
    data: Any = None,
    directory: AnyPath | None = None,
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
    **keys: Any,
) -> Trained:
    """Train as the command line does, and return the run as `load` does.

    `run("method=fedobp", "local.lr=0.05", rounds=5)` is `fedpfl train` with these words. An
    interrupted run goes on, a finished one is loaded. After an interrupt the same call goes on.

    Args:
        settings: words of the command line, but no sweep; or a whole configuration, such as
            `load(...).config`, alone.
        data: samples in memory in place of `dataset`: `(x, y)` or `(x, y, groups)` of arrays or
            tensors, a torch Dataset, a pandas DataFrame, or a dict of these by client.
        directory: of the run; by default where the command line would put it, below outputs/.
        progress: whether the terminal is told.
        callbacks: hear of the run beside its `logger`.
        keys: the same as words, `rounds=5` for `"rounds=5"`; a mapping's keys are joined by dots.

    Raises:
        FedpflError: in one line, for mistakes that the command line refuses.
    """
    request = _read_request(settings, keys, directory, data)
    for _ in _play(request, is_quiet=not progress, callbacks=callbacks):
        pass
    return _load_result(request)


def rounds(
    *settings: str | Values,
    data: Any = None,
    directory: AnyPath | None = None,
    progress: bool = False,
    callbacks: Sequence[Callback] = (),
    **keys: Any,
) -> Generator[Round]:
    """Train as `run` does, and yield each round when it is over.

    `for round in fedpfl.rounds("method=fedobp"): ...`: a round has its `row` and answers with the
    models after it (`round.personal(7)`) until the next one begins. Leaving the loop interrupts the
    run, which is saved and goes on when it is asked for again; a finished run has no rounds left.
    Arguments and errors are those of `run`.
    """
    request = _read_request(settings, keys, directory, data)
    return _play(request, is_quiet=not progress, callbacks=callbacks)


def sweep(
    *settings: str,
    data: Any = None,
    directory: AnyPath | None = None,
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
    **keys: Any,
) -> tuple[list[Trained], pd.DataFrame]:
    """Train all combinations of the swept values, one after another.

    `sweep(method=["fedobp", "ditto"], rounds=5)`: finished runs are loaded, the command line's too;
    an interrupted sweep goes on.

    Args:
        settings: words of the command line, such as "seed=1,2,3".
        data: as in `run`.
        directory: in which the runs' are made, by default outputs/.
        progress: as in `run`.
        callbacks: as in `run`.
        keys: as in `run`, but of a list each run has one value; all of them have all `plugins`.

    Returns:
        The runs as `load` does, and a table with a row for each: its swept values, its status, and
        its row of rounds.csv at the last evaluation, empty for runs that diverged.

    Raises:
        FedpflError: before the first run for a mistake in any, after the last for failed runs.
    """
    jobs = _read_jobs(settings, keys, directory, data)
    failures: list[str] = []
    runs: list[Trained] = []
    rows: list[Record] = []
    for request, swept_values in jobs:
        label_token = console.run_label.set(_name_job(swept_values))
        try:
            # A run that diverged stays in the table.
            with contextlib.suppress(Diverged):
                for _ in _play(request, is_quiet=not progress, callbacks=callbacks):
                    pass
            trained = _load_result(request)
        except FedpflError as error:
            failures.append(f"{_name_job(swept_values)}: {error}")
            continue
        finally:
            console.run_label.reset(label_token)
        runs.append(trained)
        is_finished = trained.status == "finished"
        last_row = trained._tables.last_evaluation if is_finished else {}
        rows.append({**swept_values, "status": trained.status, **last_row})
        if progress:
            print(f"sweep: {len(runs)}/{len(jobs)} done  {trained}", file=sys.stderr, flush=True)
    if failures:
        raise FedpflError(
            f"{len(failures)} of {len(jobs)} runs failed, and the same call tries them again: "
            f"{failures[0]}"
        )
    return runs, pd.DataFrame(rows)


def _read_jobs(
    settings: tuple[str, ...],
    keys: Values,
    directory: AnyPath | None,
    data: Any,
) -> list[tuple[RunRequest, Record]]:
    """Return each run of a sweep and its swept values. Raises as `sweep`."""
    # ---- Step 1: the words of each run, as a sweep of the command line expands them.
    register_resolver()
    held_data = None if data is None else hold_data(data)
    with _process_lock, _hydra_errors_in_one_line():
        run_words = _read_words(settings, keys, lists_are_sweeps=True)
        run_words = overrides.adapt_for_sweeps(run_words, GROUPS)
        for word in run_words:
            if word.lstrip("+~").startswith("hydra"):
                raise FedpflError(
                    f"{word} is for sweeps of the command line; here one run follows the other"
                )
        expanded_jobs = overrides.expand_sweep(run_words)

    # ---- Step 2: a directory for each, which no other may have.
    jobs = {}
    with overrides.composing_once():
        for job_words, swept_values in expanded_jobs:
            request = _read_request(job_words, {}, None, held_data)
            cfg = request.cfg
            check_config(cfg)
            path = Path(directory or cfg.hydra.sweep.dir, cfg.hydra.sweep.subdir)
            if path in jobs:
                raise FedpflError(
                    f"{_name_job(swept_values)} is a run already; sweep over what decides a "
                    "result, each value once"
                )
            jobs[path] = request._replace(path=path), swept_values
    prepare_sweep([request.cfg for request, _ in jobs.values()])
    return list(jobs.values())


def _name_job(swept_values: Values) -> str:
    return " ".join(f"{key}={value}" for key, value in swept_values.items())


def _read_request(
    settings: Sequence[str | Values],
    keys: Values,
    directory: AnyPath | None,
    data: Any = None,
) -> RunRequest:
    """Compose the configuration of one run. Raises FedpflError."""
    if ranks.is_launched_by_torchrun():
        raise FedpflError("fedpfl.run is for one process; under torchrun use -m fedpfl.train")
    register_resolver()
    held_data = None if data is None else hold_data(data)
    with _process_lock, _hydra_errors_in_one_line():
        cfg, experiment = _compose(settings, keys, held_data)
        return RunRequest(cfg, Path(directory or cfg.hydra.run.dir), experiment, held_data)


@contextlib.contextmanager
def _hydra_errors_in_one_line() -> Iterator[None]:
    """Raise FedpflError for what Hydra refuses."""
    try:
        yield
    except overrides.HYDRA_ERRORS as error:
        raise FedpflError(format_error(error)) from None


def _play(request: RunRequest, is_quiet: bool, callbacks: Sequence[Callback]) -> Generator[Round]:
    """Yield a session's rounds, and leave the process as it was."""
    cfg, path, experiment, _ = request
    threads = torch.get_num_threads()
    package_log = logging.getLogger("fedpfl")
    log_level = package_log.level
    with _process_lock, user_errors(cfg, path):
        plan = check_config(cfg)
    session = Session(
        plan=plan, path=path, experiment=experiment, is_quiet=is_quiet, callbacks=callbacks
    )
    session_rounds = session.play()
    try:
        while True:
            with _process_lock, user_errors(cfg, path):
                round = next(session_rounds, None)
            if round is None:
                return
            yield round
    finally:
        # Closing takes no turn: any thread may close an abandoned run, in the middle of another's.
        session_rounds.close()
        torch.set_num_threads(threads)  # an engine sets 1 and starts its threads
        package_log.setLevel(log_level)
        remove_empty_folders(path)


def _load_result(request: RunRequest) -> Trained:
    """Load the finished run, with the plugins that its user named."""
    plugin_files = request.cfg.get("plugins") or ()
    return load(request.path, plugins=list(plugin_files), data=request.held_data)


def load(
    directory: AnyPath,
    device: str = "auto",
    data_dir: AnyPath = "",
    plugins: Sequence[AnyPath] = (),
    data: Any = None,
) -> Trained:
    """Read a run directory.

    Models are read, and the data that they need, when they are first asked for.

    Args:
        directory: of the run.
        device: where predictions are computed.
        data_dir: where the data are, if not where the run found them.
        plugins: files of the run's own method, network and data; no other code is run.
        data: the samples of a run with samples in memory, as in `run`.

    Raises:
        FedpflError: in one line, where there is no run in it, or a file is damaged.
    """
    held_data = None if data is None else hold_data(data)
    return Trained(Path(directory), device, data_dir, plugins, held_data)


def read_logger_options(run_words: Sequence[str]) -> Record:
    """Return the options of the loggers that words ask for. Raises FedpflError."""
    register_resolver()
    with _process_lock, _hydra_errors_in_one_line():
        config = resolve_config(overrides.compose_single_run(run_words))
    return read_loggers(config["logger"])


class Trained(Models):
    """A run directory, with its tables and the models of its last checkpoint.

    Without a checkpoint, with other data than the run read, or for an unknown client, all that needs
    a model raises FedpflError, in one line.
    """

    def __init__(
        self,
        path: Path,
        device: str = "auto",
        data_dir: AnyPath = "",
        plugins: Sequence[AnyPath] = (),
        held_data: HeldData | None = None,
    ):
        self.path = path
        self._held_data = held_data  # which keeps them readable
        self._tables = read_started_run(path)
        self._device = device
        self._data_dir = data_dir
        self._plugins = resolve_files(plugins)

    def __repr__(self) -> str:
        tables = self._tables
        parts = (tables.status_text, console.describe_result(tables.summary), f"{self.path}>")
        return f"<{tables.method} on {tables.dataset}: {', '.join(filter(None, parts))}"

    def __len__(self) -> int:
        return self._run.settings.clients

    @property
    def rounds(self) -> pd.DataFrame:
        """Return a row per round; docs/run_directory.md has the columns."""
        return self._tables.rounds

    @property
    def clients(self) -> pd.DataFrame:
        """Return a row per client, with its accuracy at the last evaluation.

        Where clients have names, they are the index: `run.clients.loc["hospital_07"]`.
        """
        tables = self._tables
        if not tables.client_names:
            return tables.clients
        names = tables.clients["client"].astype(int).map(tables.client_names)
        return tables.clients.set_index(names.rename("name"))

    @property
    def client_names(self) -> dict[int, str]:
        """Return the clients' names by number; {} where clients are numbers alone."""
        return dict(self._tables.client_names)

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the names of the classes; empty where they are numbers alone."""
        return self._tables.class_names

    @property
    def config(self) -> Record:
        """Return a copy of the whole configuration, as `run` takes it."""
        return copy.deepcopy(self._tables.config)

    @property
    def summary(self) -> Record:
        """Return a copy of summary.json."""
        return copy.deepcopy(self._tables.summary)

    @property
    def status(self) -> str:
        """Return finished, running, interrupted, diverged or failed, when it was loaded."""
        return self._tables.status

    @property
    def round(self) -> int:
        """Return the round after which the models were saved, which may not be the last."""
        return self._state.round

    @property
    def _run(self) -> Run:
        """Return the run with what its clients held in the last round that was saved."""
        run = self._dealt_run
        return run.in_round(max(1, self.round)) if run.shifted else run

    @cached_property
    def _dealt_run(self) -> Run:
        """Build the run's data, network and method, on the device that `load` was given."""
        config = self._adapt_config()
        with _process_lock:
            try:
                plan = check_config(escape_interpolations(config))
            except FedpflError as error:
                raise FedpflError(
                    f"{self.path / 'config.yaml'} is not of this version: {error}"
                ) from None
            run = build_run(plan)
        if self.summary.get("data") not in (None, run.fingerprint):
            raise FedpflError(
                f"the data are not those of run {self.path} ({FINGERPRINTED_PARTS}); give"
                " data_dir=... where they are"
            )
        code = resume.digest_code(run)
        if self.summary.get("code", [code]) != [code]:
            warnings.warn(f"{self.path}: the method's code has changed since the run", stacklevel=2)
        return run

    def _adapt_config(self) -> Record:
        """Return the run's configuration, to be computed here. Raises FedpflError for plugins."""
        config = self.config
        config |= {"device": self._device, "logger": {"name": "none"}, "state": {"device": "auto"}}
        if self._data_dir:
            config["data_dir"] = os.fspath(self._data_dir)
        engine_settings = config.setdefault("engine", {})
        # Only a GPU has tf32, which needs no other precision of models than fp32.
        is_on_cpu = find_device(self._device).type == "cpu"
        if is_on_cpu and engine_settings.get("precision") == "tf32":
            engine_settings["precision"] = "fp32"
        plugin_files = config.get("plugins")
        if plugin_files and not self._plugins:
            raise FedpflError(
                f"{self.path} is of a run with plugins, whose code is only run for who names it: "
                f"give {overrides.quote_list('plugins', map(str, plugin_files))}, or where these "
                "files are now"
            )
        config["plugins"] = self._plugins
        return config

    @cached_property
    def _state(self) -> engine.State:
        file = self.path / "state.pt"
        if not file.exists():
            raise FedpflError(
                f"{file} is not there, and the models with it: the run kept none "
                "(checkpoint.keep=false), or has not come to its first checkpoint; run it with "
                "checkpoint.keep=true restart=true"
            )
        require_states_here(self.path, self._tables.summary)
        checkpoint = read_checkpoint(self.path, self._tables.summary)
        return resume.restore_state(self._dealt_run, checkpoint, self.path)


def _compose(
    settings: Sequence[str | Values],
    keys: Values,
    held_data: HeldData | None,
) -> tuple[DictConfig, str | None]:
    """Return the configuration with Hydra's part, and the experiment's name."""
    if all(isinstance(setting, str) for setting in settings):
        run_words = _read_words(settings, keys)
        if held_data:
            run_words = _add_data_words(run_words, held_data)
        cfg = overrides.compose_single_run(run_words)
        return cfg, cfg.hydra.runtime.choices.get("experiment")
    config, *more_settings = settings
    if more_settings or keys or not isinstance(config, Mapping):
        raise FedpflError(
            "a whole configuration stands alone; change it, or give words such as 'rounds=5'"
        )
    # A configuration that was read has no Hydra's part, which says where it runs.
    hydra_part = {"hydra": {"run": {"dir": "outputs/${fedpfl.run_subdir:}"}}}
    config = config if OmegaConf.is_config(config) else escape_interpolations(config)
    return OmegaConf.merge(hydra_part, config), None  # type: ignore[return-value]


def _add_data_words(run_words: list[str], held_data: HeldData) -> list[str]:
    """Return the words of a run with samples in memory.

    Samples from several clients are split by these clients, unless words set a partition.
    """
    read_value = partial(overrides.read_text_value, run_words)
    if dataset := read_value("dataset"):
        raise FedpflError(f"dataset={dataset} and data=... are two; leave out one")
    values: Record = {"dataset": "memory", "dataset.digest": held_data.digest}
    groups = held_data.count_groups(read_value("dataset.by"))
    if groups and not read_value("partition"):
        values |= {
            "partition": "natural",
            "partition.test_fraction": DEFAULT_TEST_FRACTION,
            "clients": groups,
        }
    data_words: list[str] = []
    for key, value in values.items():
        if not read_value(key):
            data_words += overrides.format_words(key, value)
    return [*data_words, *run_words]


def _read_words(settings: Sequence[Any], keys: Values, lists_are_sweeps: bool = False) -> list[str]:
    """Return the words of the command line, and load the plugins that they name.

    Args:
        settings: words.
        keys: values by key, which become words.
        lists_are_sweeps: whether a list is a sweep over its values, and no list.
    """
    run_words = list(map(str, settings))
    for key, value in keys.items():
        # Runs of a sweep have their plugins in common: these decide what there is to sweep over.
        is_sweep = lists_are_sweeps and key != "plugins"
        run_words.extend(overrides.format_words(key, value, is_sweep))
    run_words = check_words(run_words, (), "here are no options, only words such as 'rounds=5'")
    plugins.load_plugins(overrides.read_list_value(run_words, "plugins"))
    return run_words
