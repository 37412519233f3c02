"""The plan: a configuration checked as a whole, then data loaded and the network built."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedpfl import data, engine, models
from fedpfl.config import plugins
from fedpfl.config.checks import arguments, check_keys, chosen, options, representable, typed
from fedpfl.config.messages import at_its_source, one_line
from fedpfl.config.schema import GROUPS, OPTIONAL, SCHEMAS, SETTINGS, Checkpoint, Deal, Eval, Settings, Start
from fedpfl.data import Augment, Federation, datasets, partition, state_dict
from fedpfl.engine import Engine, Local, Stopping, Store
from fedpfl.engine.select import device as find_device
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.identity import essence, identity
from fedpfl.methods import METHODS, Method
from fedpfl.models import MODELS, Net
from fedpfl.record import rundir
from fedpfl.record.loggers import check_logger


@dataclass(frozen=True)
class Plan:
    """A configuration, checked, before data are read. `config` is the resolved configuration, `identity` its hash."""

    settings: Settings
    local: Local
    eval: Eval
    stopping: Stopping
    checkpoint: Checkpoint
    state: Store
    engine: Engine
    augment: Augment
    device: torch.device
    method: Method
    config: dict[str, Any]
    identity: str


@dataclass(frozen=True)
class Run(Plan):
    """Everything a run needs.

    unseen: the clients that never take part, None without any. read: a digest of all that was read from files, the same
    for all seeds. fingerprint: also of who holds which samples.
    """

    federation: Federation
    unseen: Federation | None
    net: Net
    read: str
    fingerprint: str


def alone(key: Hashable, make: Callable[[], Any]) -> Any:
    """Share nothing with other runs."""
    return make()


def check(cfg: DictConfig) -> Plan:
    """Check the whole configuration. Raises FedpflError, about the key that the user set."""
    try:
        return _plan(resolve(cfg))
    except FedpflError as error:
        raise FedpflError(at_its_source(str(error), cfg)) from None


def _plan(config: dict[str, Any]) -> Plan:
    for key in config:
        if key not in (*SETTINGS, *GROUPS):
            raise FedpflError(f"{key} is not a key here; known keys: {', '.join((*SETTINGS, *GROUPS))}")
    settings = typed(Settings, {key: config[key] for key in SETTINGS}, "")
    config["plugins"] = plugins.load(settings.plugins)
    config |= {"restart": False, "extend": ""}  # for this command, not for whoever repeats the run by its configuration
    own = {group: typed(schema, config[group], group) for group, schema in SCHEMAS.items()}
    device = find_device(settings.device)
    engine.check(own["engine"], device)
    check_logger(config["logger"])
    method = typed(chosen("method", config["method"], METHODS), options(config["method"]), "method")
    if getattr(method, "clients", settings.clients) != settings.clients:
        raise FedpflError(f"method.clients is the run's clients={settings.clients} and cannot be set; leave it out")
    if hasattr(method, "clients"):  # who never takes part is none of them
        method = replace(method, clients=settings.clients - settings.newcomers)
    if method.own_steps and not own["local"].plain:
        raise FedpflError(engine.own_steps(f"method={config['method']['name']}", own["local"]))
    representable(config["logger"], "logger")  # the others are held against their schemas
    for part in (_model, _partition, _source):
        part(config)
    return Plan(settings, **own, device=device, method=method, config=config, identity=identity(config))


def build(plan: Plan, share: Callable[[Hashable, Callable[[], Any]], Any] = alone) -> Run:
    """Load the data and build the network. Raises FedpflError.

    share: `share(key, make)` makes what runs of one process may have in common, their samples.
    """
    settings, config, device = plan.settings, plan.config, plan.device
    source, given = _source(config), _model(config)

    def load() -> tuple[datasets.Samples, str]:
        samples = datasets.load(data_dir=Path(settings.data_dir), **source)
        return replace(samples, x=samples.x.to(device)), data.fingerprint(samples)

    samples, read = share(("samples", device, settings.data_dir, repr(source)), load)
    scheme, dealing = partition.SCHEMES[config["partition"]["name"]], _partition(config)
    own = dealing.pop("seed", None)
    seed = settings.seed if own is None else own
    split = partition.deal(scheme, samples, settings.clients, seed, **dealing)
    whole = data.build(samples, split, settings.validation, seed, plan.augment)
    federation, unseen = data.apart(whole.to(device), settings.newcomers, seed)
    if given.get("weights"):
        given["weights"] = _weights(Path(settings.data_dir), given["weights"])
    net = models.build(config["model"]["name"], federation.shape, federation.classes, settings.seed, **given)
    plan.method.init(net.params, net.parts)  # refuses what this network does not have, while nothing is written
    if plan.method.validates and not any(map(len, federation.validation)):
        name = config["method"]["name"]
        raise FedpflError(f"method={name} chooses by held-out samples, and there are none; set validation=0.1")
    splits = (whole.train, whole.test, whole.validation, *([unseen.numbers] if unseen else []))
    return Run(
        **vars(plan),
        federation=federation,
        unseen=unseen,
        net=net,
        read=data.fingerprint(read, given.get("weights")),
        fingerprint=data.fingerprint(read, splits, given.get("weights")),
    )


def _weights(folder: Path, given: Path) -> dict[str, torch.Tensor]:
    """The initial values in a file, or the model at the server of a finished run. Raises FedpflError."""
    place = folder / given  # absolute paths stay
    if not place.exists() and given.exists():
        place = given
    if not place.is_dir():
        return state_dict.read(place)
    state = rundir.ended(place)[1]
    server = state["server"].get("model", state["server"].get("body", state["server"]))
    values = {**server, **state["server_buffers"].get("main", {})}
    if not values or not all(isinstance(value, torch.Tensor) for value in values.values()):
        raise FedpflError(f"model.weights: the method of the run in {place} has no single model at the server")
    return values


def _model(config: Mapping[str, Any]) -> dict[str, Any]:
    """The network's own options."""
    network = chosen("model", config["model"], MODELS)
    return arguments((network, Start), options(config["model"]), "model", given=("shape", "classes"))


def _partition(config: Mapping[str, Any]) -> dict[str, Any]:
    """The scheme's own options, and the seed if it is not the run's."""
    scheme = chosen("partition", config["partition"], partition.SCHEMES)
    given = tuple(key for key in partition.GIVEN if key != "seed")
    return arguments((scheme, Deal), options(config["partition"]), "partition", given=given)


def _source(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is to be loaded."""
    reader = chosen("dataset", config["dataset"], datasets.SETS)
    return arguments((datasets.load, reader), config["dataset"], "dataset", given=("data_dir", "options", "source"))


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """Return the configuration as plain values, with what its optional groups choose written into the method.

    Raises FedpflError for missing values, and for a group that chooses what the method does not have.
    """
    cfg = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    try:
        missing = OmegaConf.missing_keys(cfg)
        config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise FedpflError(one_line(error)) from None
    groups = [group for group in GROUPS if group not in OPTIONAL]
    if missing := missing or {key for key in (*SETTINGS, *groups) if config.get(key) is None}:
        key = min(missing)
        raise FedpflError(f"{key} has no value; set it with {key}=...")
    extra = [group for group in OPTIONAL if config.get(group) is not None]
    for group in (*groups, *extra):
        if not isinstance(config[group], Mapping):
            raise FedpflError(f"{group} must be a group of keys, got {config[group]!r}")
    method = config["method"]
    for group in ("method", "dataset"):
        config[group].pop("title", None)  # for tables (fedpfl.report.names): it decides nothing
    own = method.pop("groups", ())
    for group in extra:
        if group not in own:
            raise FedpflError(f"{group} is for a hyperparameter that method={method.get('name')} does not have")
        check_keys(options(config[group]), OPTIONAL[group], group)
        representable(config[group], group)
    for key, source in OmegaConf.to_container(cfg.method, resolve=False).items():  # type: ignore[union-attr, assignment]
        if source == "${quantile.q}" and method[key] == "paper":
            method[key] = _table_q(config)
    return {key: value for key, value in config.items() if key not in OPTIONAL}


def run_subdir(config: Mapping[str, Any], experiment: str | None) -> str:
    """Where a run belongs below outputs/: `<experiment or dataset>/<method>/<key>/seed<k>`.

    The method's name is that of the identity, so that runs of earlier versions lie where they are looked for.
    """
    place, method = experiment or config["dataset"]["name"], essence(config)["method"]["name"]
    return f"{place}/{method}/{identity(config)}/seed{config['seed']}"


def register() -> None:
    """Teach OmegaConf the resolvers that conf/train.yaml names. Safe to repeat.

    `fedpfl.run_subdir:table3` puts an experiment's runs among those of another one, of which it is a part.
    """

    def subdir(place: str | None = None, *, _root_: DictConfig) -> str:
        choices = OmegaConf.select(_root_, "hydra.runtime.choices")
        try:
            config = check(_root_).config
        except Exception:
            return "invalid"  # the run itself tells what is wrong, and nothing is written before that
        return run_subdir(config, place or (choices.get("experiment") if choices else None))

    for name, function in (
        ("fedpfl.run_subdir", subdir),
        ("fedpfl.run_dir", lambda place=None, *, _root_: f"outputs/{subdir(place, _root_=_root_)}"),
    ):
        OmegaConf.register_new_resolver(name, function, replace=True, use_cache=False)


def _table_q(config: Mapping[str, Any]) -> Any:
    """Table II, or the fallback of quantile=auto."""
    quantile, name, alpha = config["quantile"], config["dataset"].get("name"), config["partition"].get("alpha")
    table = quantile.get("table")
    if not isinstance(table, Mapping) or not all(isinstance(row, Mapping) for row in table.values()):
        raise FedpflError(f"quantile.table must map data sets to alphas to q, got {table!r}")
    row = table.get(name, {}) if isinstance(name, str) else {}
    found = isinstance(alpha, int | float) and alpha in row
    q, source = (row[alpha], "table") if found else (quantile.get("otherwise"), "otherwise")
    if q is not None and not (type(q) in (int, float) and 0 <= q <= 1):
        raise FedpflError(f"quantile.{source} must hold numbers between 0 and 1, got {q!r}")
    if q is None:
        known = "; ".join(f"{d} ({', '.join(map(str, row))})" for d, row in table.items())
        raise FedpflError(
            f"quantile=paper: Table II has no q for dataset {name} with alpha {alpha}; "
            f"it has {known}; set quantile.q=..."
        )
    return q
