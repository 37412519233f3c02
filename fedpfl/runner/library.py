"""Run and load from Python: what `fedpfl.run`, `fedpfl.rounds` and `fedpfl.load` are."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Generator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedpfl import engine
from fedpfl.config import overrides, plugins, tidy
from fedpfl.config.messages import one_line
from fedpfl.config.plan import Run, build, check, literal, register, resolve
from fedpfl.engine import ranks
from fedpfl.engine.select import device as find_device
from fedpfl.ground.errors import FedpflError
from fedpfl.record.callbacks import Callback
from fedpfl.record.rundir import saved
from fedpfl.report.load import begun
from fedpfl.runner import resume
from fedpfl.runner.faults import mended
from fedpfl.runner.loop import Round
from fedpfl.runner.models import Models
from fedpfl.runner.session import session


def run(
    *settings: str | Mapping[str, Any],
    directory: str | os.PathLike[str] | None = None,
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
    **keys: Any,
) -> Trained:
    """Train as the command line does, and return what `load` does: `run("method=fedobp", "local.lr=0.05", rounds=5)`.

    An interrupted run goes on, a finished one is loaded. settings: words of the command line, but no sweep; or a whole
    configuration, such as `load(...).config`, alone. keys: the same as words, `rounds=5` for `"rounds=5"`; a mapping's
    keys are joined by dots. directory: of the run; by default where the command line would put it, below outputs/.
    progress: whether the terminal is told. callbacks: hear of the run beside its `logger`.

    Raises FedpflError, in one line, for what the command line refuses. After an interrupt the same call goes on.
    """
    cfg, path, experiment = _asked(settings, keys, directory, callbacks)
    for _ in _played(cfg, path, experiment, not progress, callbacks):
        pass
    return load(path, plugins=cfg.get("plugins", ()))


def rounds(
    *settings: str | Mapping[str, Any],
    directory: str | os.PathLike[str] | None = None,
    progress: bool = False,
    callbacks: Sequence[Callback] = (),
    **keys: Any,
) -> Generator[Round]:
    """Train as `run` does, and yield each round when it is over: `for round in fedpfl.rounds("method=fedobp"): ...`.

    A round has its `row` and answers with the models after it (`round.personal(7)`) until the next one begins. Leaving
    the loop interrupts the run, which is saved and goes on when it is asked for again; a finished run has no rounds
    left. Arguments and errors are those of `run`.
    """
    return _played(*_asked(settings, keys, directory, callbacks), not progress, callbacks)


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
        raise FedpflError(f"callbacks must be instances of subclasses of fedpfl.Callback, got {wrong[0]!r}")
    register()
    try:
        cfg, experiment = _composed(settings, keys)
        return cfg, Path(directory or cfg.hydra.run.dir), experiment
    except (HydraException, OmegaConfBaseException) as error:
        raise FedpflError(one_line(error)) from None


def _played(
    cfg: DictConfig, path: Path, experiment: str | None, quiet: bool, callbacks: Sequence[Callback]
) -> Generator[Round]:
    """Yield a session's rounds, and leave threads, logging and folders as they were."""
    stop, threads, package = tidy.nearest(path), torch.get_num_threads(), logging.getLogger("fedpfl")
    level = package.level
    try:
        with mended(cfg, path):
            yield from session(cfg, path, experiment, quiet, callbacks)
    finally:
        torch.set_num_threads(threads)  # an engine takes 1 and brings threads of its own
        package.setLevel(level)
        tidy.unmake(path, stop)


def load(
    directory: str | os.PathLike[str],
    device: str = "auto",
    data_dir: str | os.PathLike[str] = "",
    plugins: Sequence[str | os.PathLike[str]] = (),
) -> Trained:
    """Read a run directory. Raises FedpflError, in one line, where there is no run in it, or a file is damaged.

    Models are read, and the data that they need, when they are first asked for. device: where predictions are computed.
    data_dir: where the data are, if not where the run found them. plugins: files of the run's method, network and data,
    where they are none of fedpfl's; no other code is run.
    """
    return Trained(Path(directory), device, data_dir, plugins)


def logger(words: Sequence[str]) -> dict[str, Any]:
    """Return the `logger` part of a configuration that such words of the command line make. Raises FedpflError."""
    register()
    try:
        return resolve(overrides.composed_once(words))["logger"]
    except (HydraException, OmegaConfBaseException) as error:
        raise FedpflError(one_line(error)) from None


class Trained(Models):
    """A run directory. `rounds` and `clients` are tables, the models are those of the last checkpoint.

    What needs a model raises FedpflError, in one line, where there is no checkpoint, where the data are not those that
    the run read, or for a client that there is not.
    """

    def __init__(
        self,
        path: Path,
        device: str = "auto",
        data_dir: str | os.PathLike[str] = "",
        plugins: Sequence[str | os.PathLike[str]] = (),
    ):
        self.path = path
        self._tables = begun(path)
        self._device, self._data_dir, self._plugins = device, data_dir, [os.fspath(file) for file in plugins]

    def __repr__(self) -> str:
        done = f"{self._tables.reached} of {self._tables.planned} rounds"
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
        """Build the run's data, network and method as it was made; where it is computed may be another place."""
        where = find_device(self._device)
        told = {**self.config, "device": self._device, "logger": {"name": "none"}, "state": {"device": "auto"}}
        told["engine"] = {**told.get("engine", {})}
        if where.type == "cpu" and told["engine"].get("precision") == "tf32":
            told["engine"]["precision"] = "fp32"
        told |= {"data_dir": os.fspath(self._data_dir)} if self._data_dir else {}
        if (wanted := told.get("plugins")) and not self._plugins:
            raise FedpflError(
                f"{self.path} is of a run with plugins, whose code is only run for who names it: give "
                f"plugins=[{', '.join(map(str, wanted))}], or where these files are now"
            )
        told["plugins"] = self._plugins
        try:
            plan = check(literal(told))
        except FedpflError as error:
            raise FedpflError(f"{self.path / 'config.yaml'} is not of this version: {error}") from None
        run = build(plan)
        if self.summary.get("data") not in (None, run.fingerprint):
            raise FedpflError(
                f"the data are not those of run {self.path} (samples, labels, groups, or who holds which); give "
                "data_dir=... where they are"
            )
        code = resume.written(run)
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
        return resume.begin(self._run, saved(self.path, self._tables.summary), self.path)


def _composed(settings: tuple[str | Mapping[str, Any], ...], keys: Mapping[str, Any]) -> tuple[DictConfig, str | None]:
    """Return the configuration with Hydra's part, and the experiment's name."""
    if any(not isinstance(one, str) for one in settings):
        (whole, *more) = settings
        if more or keys or not isinstance(whole, Mapping):
            raise FedpflError("a whole configuration stands alone; change it, or give words such as 'rounds=5'")
        own = whole if OmegaConf.is_config(whole) else literal(whole)
        return OmegaConf.merge({"hydra": {"run": {"dir": "outputs/${fedpfl.run_subdir:}"}}}, own), None  # type: ignore[return-value]
    words = [*map(str, settings), *(word for key, value in keys.items() for word in overrides.words(key, value))]
    if option := next((word for word in words if word.startswith("-")), None):
        raise FedpflError(f"{option} is an option of the command line; give words such as 'rounds=5'")
    plugins.load(overrides.chosen(words, "plugins"))
    cfg = overrides.composed_once(words)
    return cfg, cfg.hydra.runtime.choices.get("experiment")
