"""Run and load from Python: what `fedpfl.run` and `fedpfl.load` are. Training is `train.attempt`'s, as everywhere."""

from __future__ import annotations

import copy
import logging
import operator
import os
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from fedpfl import engine, train
from fedpfl.config import overrides, plugins, tidy
from fedpfl.config import plan as config
from fedpfl.config.plan import Run
from fedpfl.data import Federation
from fedpfl.engine import ranks
from fedpfl.engine.backend import EvalCall, arithmetic
from fedpfl.engine.jobs import EvalJob
from fedpfl.engine.participation import One, evaluation
from fedpfl.engine.select import device as find_device
from fedpfl.engine.shard import laid_out
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.identity import identity
from fedpfl.models.net import Bound
from fedpfl.record import checkpoint, environment
from fedpfl.report.load import begun


def run(
    *settings: str | Mapping[str, Any],
    directory: str | os.PathLike[str] | None = None,
    progress: bool = True,
    **keys: Any,
) -> Trained:
    """Train as the command line does, and return what `load` does: `run("method=fedobp", "local.lr=0.05", rounds=5)`.

    An interrupted run goes on, a finished one is loaded. settings: words of the command line, but no sweep; or a whole
    configuration, such as `load(...).config`, alone. keys: the same as words, `rounds=5` for `"rounds=5"`; a mapping's
    keys are joined by dots. directory: of the run; by default where the command line would put it, below outputs/.
    progress: whether the terminal is told.

    Raises FedpflError, in one line, for what the command line refuses. After an interrupt the same call goes on.
    """
    if ranks.launched():
        raise FedpflError("fedpfl.run is for one process; under torchrun use -m fedpfl.train")
    config.register()
    try:
        cfg, experiment = _composed(settings, keys)
        path = Path(directory or cfg.hydra.run.dir)
    except (HydraException, OmegaConfBaseException) as error:
        raise FedpflError(config.one_line(error)) from None
    stop, threads, logger = tidy.nearest(path), torch.get_num_threads(), logging.getLogger("fedpfl")
    level = logger.level
    try:
        train.attempt(cfg, path, experiment, quiet=not progress)
    finally:
        torch.set_num_threads(threads)  # an engine takes 1 and brings threads of its own
        logger.setLevel(level)
        tidy.unmake(path, stop)
    return load(path)


def load(directory: str | os.PathLike[str], device: str = "auto", data_dir: str | os.PathLike[str] = "") -> Trained:
    """Read a run directory. Raises FedpflError, in one line, where there is no run in it.

    Models are read, and the data that they need, when they are first asked for. device: where predictions are computed.
    data_dir: where the data are, if not where the run found them.
    """
    return Trained(Path(directory), device, data_dir)


def logger(words: Sequence[str]) -> dict[str, Any]:
    """Return the `logger` part of a configuration that such words of the command line make. Raises FedpflError."""
    config.register()
    try:
        return config.resolve(overrides.composed_once(words))["logger"]
    except (HydraException, OmegaConfBaseException) as error:
        raise FedpflError(config.one_line(error)) from None


class Trained:
    """A run directory. `rounds` and `clients` are tables, the models are those of the last checkpoint.

    What needs a model raises FedpflError, in one line, where there is no checkpoint, where the data are not those that
    the run read, or for a client that there is not.
    """

    def __init__(self, path: Path, device: str = "auto", data_dir: str | os.PathLike[str] = ""):
        self.path = path
        self._tables = begun(path)
        self._device, self._data_dir = device, data_dir

    def __repr__(self) -> str:
        done = f"{self._tables.reached} of {self._tables.planned} rounds"
        last = self._tables.evaluations["accuracy"].dropna()
        accuracy = f", {last.iloc[-1]:.2f} %" if len(last) else ""
        return f"<{self._tables.method} on {self._tables.dataset}: {self.status}, {done}{accuracy}, {self.path}>"

    def __len__(self) -> int:
        return self._run.settings.clients

    @property
    def rounds(self) -> pd.DataFrame:
        """A row per round; docs/run_directory.md has the columns."""
        return self._tables.rounds

    @property
    def clients(self) -> pd.DataFrame:
        """A row per client, with its accuracy at the last evaluation."""
        return self._tables.clients

    @property
    def config(self) -> dict[str, Any]:
        """A copy of the whole configuration, as `run` takes it."""
        return copy.deepcopy(self._tables.config)

    @property
    def summary(self) -> dict[str, Any]:
        """A copy of summary.json."""
        return copy.deepcopy(self._tables.summary)

    @property
    def status(self) -> str:
        """finished, running, interrupted, diverged or failed, when it was loaded."""
        return self._tables.status

    @property
    def round(self) -> int:
        """The round after which the models were saved, of an interrupted run perhaps an earlier one than the last."""
        return self._state.round

    def personal(self, client: int) -> dict[str, Tensor]:
        """Return a client's personal model: the one that is evaluated between rounds, as a `state_dict` of `network`.

        Of methods that predict with more than one network (APFL, FedRoD, masked HeteroFL) all their entries, with dots:
        `w.fc.weight`, `buffers.w.norm.running_mean`.
        """
        job = self._judged(client)
        if job.params.keys() == self._run.net.params.keys():
            values = {**job.params, **job.buffers.get(self._role(job), {})}
        else:
            values = dict(tree.items({**job.params, "buffers": job.buffers}))
        return _own(values)

    def mask(self, client: int) -> dict[str, Tensor]:
        """Return which entries are a client's own: bool tensors by names of parameters, of those that may be."""
        run, (_, state, number) = self._run, self._place(client)
        masks = run.method.masks(state.server, state.client(number))
        if not masks:
            raise FedpflError(f"method={run.config['method']['name']} has no mask of single entries")
        return _own(masks)

    def predict(self, client: int, samples: Any) -> Tensor:
        """Return the logits `[samples, classes]` of a client's personal model, float32 on the CPU.

        samples: `[samples, ...]`, an array or a tensor, of the data set's shape and type (images: uint8); they are
        normalised as in training.
        """
        run, job = self._run, self._judged(client)
        x, like = torch.as_tensor(samples), run.federation.x
        if x.shape[1:] != like.shape[1:] or x.dtype != like.dtype:
            wanted, got = ((f"{t.dtype}".removeprefix("torch."), list(t.shape[1:])) for t in (like, x))
            raise FedpflError(
                f"samples must be {wanted[0]} [samples, {str(wanted[1])[1:]} as those of data set "
                f"{run.federation.name}, got {got[0]} {list(x.shape)}"
            )
        if not len(x):
            return torch.empty(0, run.federation.classes)
        bound = run.net.bind(job.buffers)
        with torch.no_grad(), arithmetic(run.device, run.engine.precision), self._autocast():
            chunks = laid_out(run.federation, x.to(run.device)).split(256)
            return torch.cat([run.method.predict(bound, job.params, chunk).float() for chunk in chunks]).cpu()

    def samples(self, client: int, split: str = "test") -> tuple[Tensor, Tensor]:
        """Return a client's samples of a split (train, test, validation) and their labels, as the data set has them."""
        run, (federation, _, number) = self._run, self._place(client)
        splits = {"train": federation.train, "test": federation.test, "validation": federation.validation}
        if not splits.get(split):
            known = ", ".join(name for name, own in splits.items() if own)
            raise FedpflError(f"split must be one of {known}, got {split!r}")
        own = splits[split][number].to(run.device)
        return run.federation.x[own].cpu(), run.federation.y[own].cpu()

    def global_model(self) -> dict[str, Tensor]:
        """Return what the server holds of the network, as a `state_dict`; without what stays with the clients.

        Raises FedpflError where that is everything.
        """
        run, server = self._run, self._state.server
        values: dict[str, Tensor] = {}
        for part in (server, *server.values()):
            for name, leaf in part.items() if isinstance(part, dict) else ():
                if isinstance(leaf, Tensor) and name in run.net.params and leaf.shape == run.net.params[name].shape:
                    values.setdefault(name, leaf)
        if not values:
            raise FedpflError(f"method={run.config['method']['name']} has no global model: all stays with the clients")
        values = tree.named(values, [name for name in run.net.params if name in values])
        return _own({**values, **next(iter(self._state.server_buffers.values()), {})})

    def network(self) -> nn.Module:
        """Return a copy of the network as it was before round 1, for `load_state_dict`; it takes normalised samples."""
        net = self._run.net.copy()
        net.module.load_state_dict({**net.params, **net.buffers})
        return net.module.cpu().eval()

    @cached_property
    def _run(self) -> Run:
        """The run's data, network and method, as it was made; where it is computed may be another place."""
        where = find_device(self._device)
        told = {**self.config, "device": self._device, "logger": {"name": "none"}, "state": {"device": "auto"}}
        told["engine"] = {**told.get("engine", {})}
        if where.type == "cpu" and told["engine"].get("precision") == "tf32":
            told["engine"]["precision"] = "fp32"
        told |= {"data_dir": os.fspath(self._data_dir)} if self._data_dir else {}
        known = self.summary.get("identity")
        if known != f"{identity(self.config)}-seed{self._tables.seed}":
            raise FedpflError(f"{self.path / 'config.yaml'} is not the configuration that the run began with")
        try:
            plan = config.check(OmegaConf.create(told))
        except FedpflError as error:
            raise FedpflError(f"{self.path / 'config.yaml'} is not of this version: {error}") from None
        run = config.build(plan)
        if self.summary.get("data") not in (None, run.fingerprint):
            raise FedpflError(
                f"the data are not those of run {self.path} (samples, labels, groups, or who holds which); give "
                "data_dir=... where they are"
            )
        code = environment.source(type(run.method)) | plugins.code(run.config["plugins"])
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
        past = checkpoint.load(file)
        if past.get("identity", self.summary["identity"]) != self.summary["identity"]:
            raise FedpflError(f"{file} belongs to a different run")
        return train.begin(self._run, past, self.path)[0]

    @property
    def _autocast(self) -> Any:
        return partial(torch.autocast, self._run.device.type, torch.bfloat16, self._run.engine.precision == "bf16")

    def _judged(self, client: int) -> EvalJob:
        """What the engine evaluates of a client: its personal model, and its statistics."""
        run, (federation, state, number) = self._run, self._place(client)
        call = EvalCall(run.method, federation, state, [number], before=train.looking(run, state))
        with arithmetic(run.device, run.engine.precision):
            job = next(evaluation(call, One(number), run.net, self._autocast))
        assert isinstance(job, EvalJob)
        return job

    def _role(self, job: EvalJob) -> str:
        """Whose statistics the method predicts with."""
        asked: list[str] = []

        class Asked(Bound):
            def __call__(self, params: tree.Tree, x: Tensor, role: str = "main") -> Tensor:
                asked.append(role)
                return super().__call__(params, x, role)

        run = self._run
        with torch.no_grad():
            x = laid_out(run.federation, run.federation.x[:1])
            run.method.predict(Asked(run.net, job.buffers, False, None), job.params, x)
        return asked[0]

    def _place(self, client: int) -> tuple[Federation, engine.State, int]:
        """Where a client is: its federation, that one's state, and the number there."""
        run, clients = self._run, len(self)
        try:
            number = operator.index(client)
        except TypeError:
            number = -1
        if not 0 <= number < clients:
            raise FedpflError(f"client must be a whole number from 0 to {clients - 1}, got {client!r}")
        federation, number = train.everyone(run)[number]
        return federation, self._newcomers if federation is run.unseen else self._state, number

    @cached_property
    def _newcomers(self) -> engine.State:
        return train.newcomers(self._run, self._state)


def _composed(settings: tuple[str | Mapping[str, Any], ...], keys: Mapping[str, Any]) -> tuple[DictConfig, str | None]:
    """The configuration with Hydra's part, and the experiment's name."""
    if any(not isinstance(one, str) for one in settings):
        (whole, *more) = settings
        if more or keys or not isinstance(whole, Mapping):
            raise FedpflError("a whole configuration stands alone; change it, or give words such as 'rounds=5'")
        return OmegaConf.create({"hydra": {"run": {"dir": "${fedpfl.run_dir:}"}}, **whole}), None
    words = [*map(str, settings), *(word for key, value in keys.items() for word in overrides.words(key, value))]
    if option := next((word for word in words if word.startswith("-")), None):
        raise FedpflError(f"{option} is an option of the command line; give words such as 'rounds=5'")
    plugins.load(overrides.chosen(words, "plugins"))
    cfg = overrides.composed_once(words)
    return cfg, cfg.hydra.runtime.choices.get("experiment")


def _own(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, of which each has its own memory."""
    return {name: leaf.detach().cpu().clone(memory_format=torch.contiguous_format) for name, leaf in values.items()}
