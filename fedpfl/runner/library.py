"""Run and load from Python: what `fedpfl.run`, `fedpfl.rounds`, `fedpfl.sweep` and `fedpfl.load`
are.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import sys
import time
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf

from fedpfl import engine
from fedpfl.config import overrides, plugins, tidy
from fedpfl.config.choices import GROUPS
from fedpfl.config.messages import format_error
from fedpfl.config.plan import (
    Run,
    build_run,
    check_config,
    escape_interpolations,
    prepare_sweep,
    register_resolver,
    resolve_config,
)
from fedpfl.data.fingerprint import FINGERPRINTED_PARTS
from fedpfl.engine.backends import ranks
from fedpfl.engine.backends.selection import device as find_device
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.words import check_words, replaced_words
from fedpfl.record import console
from fedpfl.record.callbacks import Callback
from fedpfl.record.rundir import read_checkpoint
from fedpfl.report.load import read_started_run
from fedpfl.runner import resume
from fedpfl.runner.faults import Diverged, user_errors
from fedpfl.runner.loop import Round
from fedpfl.runner.models import Models
from fedpfl.runner.session import play_session


def run(
    *settings: str | Mapping[str, Any],
    directory: str | os.PathLike[str] | None = None,
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
    **keys: Any,
) -> Trained:
    """Train as the command line does, and return what `load` does: `run("method=fedobp",
    "local.lr=0.05", rounds=5)`.

    An interrupted run goes on, a finished one is loaded. settings: words of the command line, but
    no sweep; or a whole configuration, such as `load(...).config`, alone. keys: the same as words,
    `rounds=5` for `"rounds=5"`; a mapping's
    keys are joined by dots. directory: of the run; by default where the command line would put it,
    below outputs/.
    progress: whether the terminal is told. callbacks: hear of the run beside its `logger`.

    Raises FedpflError, in one line, for what the command line refuses. After an interrupt the same
    call goes on.
    """
    cfg, path, experiment = _asked(settings, keys, directory, callbacks)
    for _ in _played(cfg, path, experiment, not progress, callbacks):
        pass
    return _loaded(path, cfg)


def rounds(
    *settings: str | Mapping[str, Any],
    directory: str | os.PathLike[str] | None = None,
    progress: bool = False,
    callbacks: Sequence[Callback] = (),
    **keys: Any,
) -> Generator[Round]:
    """Train as `run` does, and yield each round when it is over: `for round in
    fedpfl.rounds("method=fedobp"): ...`.

    A round has its `row` and answers with the models after it (`round.personal(7)`) until the next
    one begins. Leaving the loop interrupts the run, which is saved and goes on when it is asked for
    again; a finished run has no rounds left. Arguments and errors are those of `run`.
    """
    return _played(*_asked(settings, keys, directory, callbacks), not progress, callbacks)


def sweep(
    *settings: str,
    directory: str | os.PathLike[str] | None = None,
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
    **keys: Any,
) -> tuple[list[Trained], pd.DataFrame]:
    """Train all combinations of what is swept over, one after another: `sweep(method=["fedobp",
    "ditto"], rounds=5)`.

    Returns the runs as `load` does, and a table with a row for each: its values of what is swept
    over, its status, and its row of rounds.csv at the last evaluation, of which there is nothing
    where it diverged. Finished runs are loaded, the command line's too; an interrupted sweep goes
    on.

    settings: words of the command line, such as "seed=1,2,3". keys: as in `run`, but of a list each
    run has one value.
    directory: in which the runs' are made, by default outputs/. progress, callbacks: as in `run`.

    Raises FedpflError before the first run for what is wrong with any, after the last for those
    that failed.
    """
    jobs = _jobs(settings, keys, directory, callbacks)
    failed, runs, rows = list[str](), list[Trained](), list[dict[str, Any]]()
    events = ""  # when runs began, and how long they took
    for number, (path, (cfg, experiment, swept)) in enumerate(jobs.items(), 1):
        before = console.run_label.set(name := _named(swept))
        began = time.monotonic()
        events += f"{number} {began}\n"
        if progress:
            told = console.describe_job_start(events, len(jobs), began, number)
            print(f"sweep: {told}  {name}", file=sys.stderr, flush=True)
        try:
            with contextlib.suppress(Diverged):  # its row says so
                for _ in _played(cfg, path, experiment, not progress, callbacks):
                    pass
            runs.append(found := _loaded(path, cfg))
            over = found.status == "finished"
            rows.append(
                {**swept, "status": found.status, **(found._tables.last_evaluation if over else {})}
            )
            told = console.describe_result(found.summary) if over else found.status
        except FedpflError as error:
            failed.append(f"{name}: {error}")
            told = f"failed: {error}"
        finally:
            console.run_label.reset(before)
        events += f"{number} {began} {time.monotonic() - began}\n"
        if progress:
            print(f"sweep: {number}/{len(jobs)} done  {name}: {told}", file=sys.stderr, flush=True)
    if failed:
        raise FedpflError(
            f"{len(failed)} of {len(jobs)} runs failed, and the same call tries them again: {failed[0]}"
        )
    return runs, pd.DataFrame(rows)


def _jobs(
    settings: tuple[str, ...],
    keys: Mapping[str, Any],
    directory: str | os.PathLike[str] | None,
    callbacks: Sequence[Callback],
) -> dict[Path, tuple[DictConfig, str | None, dict[str, Any]]]:
    """Return by run directory what `_asked` says of it, and its values of what is swept over.
    Raises as `sweep`.
    """
    register_resolver()
    with _in_one_line():
        words = overrides.adapt_for_sweeps(_words(settings, keys, choices=True), GROUPS)
        if given := next((word for word in words if word.lstrip("+~").startswith("hydra")), None):
            raise FedpflError(
                f"{given} is for sweeps of the command line; here one run follows the other"
            )
        jobs = overrides.expand_sweep(words)
    found: dict[Path, Any] = {}
    for own, swept in jobs:
        cfg, _, experiment = _asked(tuple(own), {}, None, callbacks)
        check_config(cfg)
        path = Path(directory or cfg.hydra.sweep.dir, cfg.hydra.sweep.subdir)
        if path in found:
            raise FedpflError(
                f"{_named(swept)} is a run already; sweep over what decides a result, each value once"
            )
        found[path] = cfg, experiment, swept
    prepare_sweep([cfg for cfg, _, _ in found.values()])
    return found


def _named(swept: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in swept.items())


def _asked(
    settings: tuple[str | Mapping[str, Any], ...],
    keys: Mapping[str, Any],
    directory: str | os.PathLike[str] | None,
    callbacks: Sequence[Callback],
) -> tuple[DictConfig, Path, str | None]:
    """Return the configuration, the run directory and the experiment. Raises FedpflError."""
    if ranks.launched():
        raise FedpflError("fedpfl.run is for one process; under torchrun use -m fedpfl.train")
    if wrong := [one for one in callbacks if not isinstance(one, Callback)]:
        raise FedpflError(
            f"callbacks must be instances of subclasses of fedpfl.Callback, got {wrong[0]!r}"
        )
    register_resolver()
    with _in_one_line():
        cfg, experiment = _composed(settings, keys)
        return cfg, Path(directory or cfg.hydra.run.dir), experiment


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
    """Raise FedpflError for what Hydra refuses."""
    try:
        yield
    except overrides.HYDRA_ERRORS as error:
        raise FedpflError(format_error(error)) from None


def _played(
    cfg: DictConfig, path: Path, experiment: str | None, quiet: bool, callbacks: Sequence[Callback]
) -> Generator[Round]:
    """Yield a session's rounds, and leave threads, logging and folders as they were."""
    stop, threads, package = (
        tidy.find_existing_parent(path),
        torch.get_num_threads(),
        logging.getLogger("fedpfl"),
    )
    level = package.level
    try:
        with user_errors(cfg, path):
            yield from play_session(cfg, path, experiment, quiet, callbacks)
    finally:
        torch.set_num_threads(threads)  # an engine takes 1 and brings threads of its own
        package.setLevel(level)
        tidy.remove_empty_parents(path, stop)


def _loaded(path: Path, cfg: DictConfig) -> Trained:
    """Load what was just trained, with the plugins that its user named."""
    return load(
        path, plugins=[Path(file).expanduser().absolute() for file in cfg.get("plugins") or ()]
    )


def load(
    directory: str | os.PathLike[str],
    device: str = "auto",
    data_dir: str | os.PathLike[str] = "",
    plugins: Sequence[str | os.PathLike[str]] = (),
) -> Trained:
    """Read a run directory. Raises FedpflError, in one line, where there is no run in it, or a file
    is damaged.

    Models are read, and the data that they need, when they are first asked for. device: where
    predictions are computed.
    data_dir: where the data are, if not where the run found them. plugins: files of the run's
    method, network and data, where they are none of fedpfl's; no other code is run.
    """
    return Trained(Path(directory), device, data_dir, plugins)


def read_logger_settings(words: Sequence[str]) -> dict[str, Any]:
    """Return the `logger` part of a configuration that such words of the command line make. Raises
    FedpflError.
    """
    register_resolver()
    with _in_one_line():
        return resolve_config(overrides.compose_single_run(words))["logger"]


class Trained(Models):
    """A run directory. `rounds` and `clients` are tables, the models are those of the last
    checkpoint.

    What needs a model raises FedpflError, in one line, where there is no checkpoint, where the data
    are not those that the run read, or for a client that there is not.
    """

    def __init__(
        self,
        path: Path,
        device: str = "auto",
        data_dir: str | os.PathLike[str] = "",
        plugins: Sequence[str | os.PathLike[str]] = (),
    ):
        self.path = path
        self._tables = read_started_run(path)
        self._device, self._data_dir, self._plugins = (
            device,
            data_dir,
            [os.fspath(file) for file in plugins],
        )

    def __repr__(self) -> str:
        done = f"{self._tables.rounds_done} of {self._tables.rounds_planned} rounds"
        last = self._tables.evaluations["accuracy"].dropna()
        accuracy = f", {last.iloc[-1]:.2f} %" if len(last) else ""
        return f"<{self._tables.method} on {self._tables.dataset}: {self.status}, {done}{accuracy}, {self.path}>"

    def __len__(self) -> int:
        return self._run.settings.clients

    @property
    def rounds(self) -> pd.DataFrame:
        """Return a row per round; docs/run_directory.md has the columns."""
        return self._tables.rounds

    @property
    def clients(self) -> pd.DataFrame:
        """Return a row per client, with its accuracy at the last evaluation."""
        return self._tables.clients

    @property
    def config(self) -> dict[str, Any]:
        """Return a copy of the whole configuration, as `run` takes it."""
        return copy.deepcopy(self._tables.config)

    @property
    def summary(self) -> dict[str, Any]:
        """Return a copy of summary.json."""
        return copy.deepcopy(self._tables.summary)

    @property
    def status(self) -> str:
        """Return finished, running, interrupted, diverged or failed, when it was loaded."""
        return self._tables.status

    @property
    def round(self) -> int:
        """Return the round after which the models were saved, perhaps an earlier one than the last."""
        return self._state.round

    @cached_property
    def _run(self) -> Run:
        """Build the run's data, network and method as it was made; where it is computed may be
        another place.
        """
        where = find_device(self._device)
        told = {
            **self.config,
            "device": self._device,
            "logger": {"name": "none"},
            "state": {"device": "auto"},
        }
        told["engine"] = {**told.get("engine", {})}
        if where.type == "cpu" and told["engine"].get("precision") == "tf32":
            told["engine"]["precision"] = "fp32"
        told |= {"data_dir": os.fspath(self._data_dir)} if self._data_dir else {}
        if (wanted := told.get("plugins")) and not self._plugins:
            raise FedpflError(
                f"{self.path} is of a run with plugins, whose code is only run for who names it: give "
                f"{overrides.quote_list('plugins', map(str, wanted))}, or where these files are now"
            )
        told["plugins"] = self._plugins
        try:
            plan = check_config(escape_interpolations(told))
        except FedpflError as error:
            raise FedpflError(
                f"{self.path / 'config.yaml'} is not of this version: {error}"
            ) from None
        run = build_run(plan)
        if self.summary.get("data") not in (None, run.fingerprint):
            raise FedpflError(
                f"the data are not those of run {self.path} ({FINGERPRINTED_PARTS}); give data_dir=... where they are"
            )
        code = resume.digest_code(run)
        if any(code != known for known in self.summary.get("code", [])):
            warnings.warn(f"{self.path}: the method's code has changed since the run", stacklevel=2)
        return run

    @cached_property
    def _state(self) -> engine.State:
        file = self.path / "state.pt"
        if not file.exists():
            raise FedpflError(
                f"{file} is not there, and the models with it: the run kept none (checkpoint.keep=false), or has not "
                "come to its first checkpoint; run it with checkpoint.keep=true restart=true"
            )
        return resume.restore_state(
            self._run, read_checkpoint(self.path, self._tables.summary), self.path
        )


def _composed(
    settings: tuple[str | Mapping[str, Any], ...], keys: Mapping[str, Any]
) -> tuple[DictConfig, str | None]:
    """Return the configuration with Hydra's part, and the experiment's name."""
    if any(not isinstance(one, str) for one in settings):
        (whole, *more) = settings
        if more or keys or not isinstance(whole, Mapping):
            raise FedpflError(
                "a whole configuration stands alone; change it, or give words such as 'rounds=5'"
            )
        own = whole if OmegaConf.is_config(whole) else escape_interpolations(whole)
        return OmegaConf.merge(
            {"hydra": {"run": {"dir": "outputs/${fedpfl.run_subdir:}"}}}, own
        ), None  # type: ignore[return-value]
    cfg = overrides.compose_single_run(_words(settings, keys))
    return cfg, cfg.hydra.runtime.choices.get("experiment")


def _words(settings: Sequence[Any], keys: Mapping[str, Any], choices: bool = False) -> list[str]:
    """Return what the command line would be given, and load the plugins that it names. choices: as
    in `words`.
    """
    words = [
        *map(str, settings),
        *(word for key in keys for word in overrides.format_words(key, keys[key], choices)),
    ]
    words = check_words(words, {}, "here are no options, only words such as 'rounds=5'")
    if note := replaced_words(words):
        warnings.warn(note, stacklevel=5)
    plugins.load_plugins(overrides.read_list_value(words, "plugins"))
    return words
