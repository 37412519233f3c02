"""Configuration: YAML holds values, dataclasses are the schema, and every fault is one line that names its key."""

from __future__ import annotations

import inspect
import math
import re
import unicodedata
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import torch
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedpfl import data, engine, models
from fedpfl.config import plugins
from fedpfl.config.choices import choices, moved
from fedpfl.config.resolvers import folder
from fedpfl.data import Augment, Federation, datasets, partition, state_dict
from fedpfl.engine import Engine, Local, Stopping, Store
from fedpfl.engine.select import device as find_device
from fedpfl.ground.casting import Checked, cast, hints
from fedpfl.ground.errors import FedpflError, near
from fedpfl.ground.identity import essence, identity, present
from fedpfl.ground.ranges import Above, AtLeast, AtMost, Below, Between
from fedpfl.methods import METHODS, Method
from fedpfl.models import MODELS, Net
from fedpfl.record import rundir
from fedpfl.record.loggers import check_logger

NOISE = (
    *("full_key:", "object_type=", "reference_type=", "Set the environment variable", "See https"),
    *("Error parsing override", "LexerNoViableAltException", "^"),
)
"""How lines of Hydra's and OmegaConf's messages begin that help nobody."""
KNOWN = {
    r"Ambiguous value for argument '(.*?)'\n": r"\1 is a sweep, which needs -m; if it is one value, write a list "
    "as key=[a,b], a text as \"key='a,b'\"",
    r"Multiple values for (.*?)\. To override": r"\1 has a value, which \1=... replaces; leave out the +",
    "Input config does not have a `_target_` field": "hydra.launcher and hydra.sweeper are groups of keys; choose by "
    "hydra/launcher=... and hydra/sweeper=...",
    ".* does not support sweep type": "interval is no sweep over values; name them, as in seed=1,2,3 or "
    "seed=range(1,4)",
}
"""What to say instead of messages of Hydra's that begin so."""
PLUGINS = ("launcher", "sweeper")  # groups of Hydra's, which are chosen with a slash
SHORT = 12  # names that are listed even where one is near what was meant
FLOAT = torch.finfo(torch.float32)
Seed = Annotated[int, Between(0, 2**32 - 1)]


@dataclass(frozen=True)
class Eval(Checked):
    """When all clients are judged; see conf/train.yaml."""

    every: Annotated[int, AtLeast(1)]
    finetune_epochs: Annotated[int, AtLeast(0)]
    finetune_every: int
    finetune_part: Literal["all", "head"]

    def __post_init__(self) -> None:
        super().__post_init__()
        multiple = self.finetune_every >= 1 and self.finetune_every % self.every == 0
        allowed = f"a positive multiple of eval.every ({self.every})"
        self.check(multiple or not self.finetune_epochs, "finetune_every", allowed)


@dataclass(frozen=True)
class Checkpoint(Checked):
    """How often the state is saved, and whether a finished run keeps it; see conf/train.yaml."""

    seconds: Annotated[float, AtLeast(0)]
    keep: bool = True

    def due(self, since: float, cost: float) -> bool:
        """Return whether to save, so many seconds after the last time, which took `cost` seconds.

        At most a twentieth of a run's time goes into checkpoints, unless one after every round is asked for.
        """
        return since >= max(self.seconds, 20 * cost if self.seconds else 0)


@dataclass(frozen=True)
class Settings(Checked):
    """The top level of the configuration."""

    seed: Seed
    rounds: Annotated[int, AtLeast(1)]
    clients: Annotated[int, AtLeast(1)]
    participation: Annotated[float, Above(0), AtMost(1)]
    validation: Annotated[float, AtLeast(0), Below(1)]
    unseen: Annotated[float, AtLeast(0), Below(1)]
    data_dir: str
    device: str
    restart: bool
    extend: str
    name: str
    plugins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = self.newcomers > 0 or not self.unseen
        self.check(rule, "unseen", f"0, or a share that is a client or more of {self.clients}")

    @property
    def newcomers(self) -> int:
        """How many of the clients never take part."""
        return int(round(self.unseen * self.clients, 9))


@dataclass(frozen=True)
class Deal:
    """What every partition may have: a seed of its own in place of the run's; see docs/data.md."""

    seed: Seed | None = None


@dataclass(frozen=True)
class Start:
    """What every network may start from; see docs/run.md."""

    weights: Path | None = None


SETTINGS = tuple(get_type_hints(Settings))
GROUPS = (
    *("local", "eval", "stopping", "checkpoint", "state"),
    *("dataset", "augment", "partition", "model", "method", "quantile", "norm", "score", "engine", "logger"),
)


SCHEMAS: dict[str, Callable[..., Any]] = {
    **{"local": Local, "eval": Eval, "stopping": Stopping, "checkpoint": Checkpoint, "state": Store},
    **{"engine": Engine, "augment": Augment},
}
"""What groups of keys are for that hold the same keys whatever is chosen."""

OPTIONAL: dict[str, tuple[str, ...]] = {"quantile": ("q", "otherwise", "table", "title"), "norm": (), "score": ()}
"""Groups that choose a hyperparameter, and their keys beside `name`; a method's `groups` names those it has."""


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
    """Shares nothing with other runs."""
    return make()


def check(cfg: DictConfig) -> Plan:
    """Check the whole configuration. Raises FedpflError, about the key that the user set."""
    try:
        return _plan(resolve(cfg))
    except FedpflError as error:
        raise FedpflError(_at_its_source(str(error), cfg)) from None


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
    if (now := present(config["method"])["name"]) != config["method"]["name"]:
        raise FedpflError(f"method={config['method']['name']} with these values is now method={now}")
    method = typed(_named("method", config["method"], METHODS), _rest(config["method"]), "method")
    if getattr(method, "clients", settings.clients) != settings.clients:
        raise FedpflError(f"method.clients is the run's clients={settings.clients} and cannot be set; leave it out")
    if hasattr(method, "clients"):  # who never takes part is none of them
        method = replace(method, clients=settings.clients - settings.newcomers)
    if method.own_steps and not own["local"].plain:
        raise FedpflError(engine.own_steps(f"method={config['method']['name']}", own["local"]))
    _held(config["logger"], "logger")  # the others are held against their schemas
    for options in (_model, _partition, _source):
        options(config)
    return Plan(settings, **own, device=device, method=method, config=config, identity=identity(config))


def build(plan: Plan, share: Callable[[Hashable, Callable[[], Any]], Any] = alone) -> Run:
    """Load the data and build the network. Raises FedpflError.

    share: `share(key, make)` makes what runs of one process may have in common, their samples.
    """
    settings, config, device = plan.settings, plan.config, plan.device
    source, options = _source(config), _model(config)

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
    if options.get("weights"):
        options["weights"] = _weights(Path(settings.data_dir), options["weights"])
    net = models.build(config["model"]["name"], federation.shape, federation.classes, settings.seed, **options)
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
        read=data.fingerprint(read, options.get("weights")),
        fingerprint=data.fingerprint(read, splits, options.get("weights")),
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
    network = _named("model", config["model"], MODELS)
    return _checked((network, Start), _rest(config["model"]), "model", given=("shape", "classes"))


def _partition(config: Mapping[str, Any]) -> dict[str, Any]:
    """The scheme's own options, and the seed if it is not the run's."""
    scheme = _named("partition", config["partition"], partition.SCHEMES)
    given = tuple(key for key in partition.GIVEN if key != "seed")
    return _checked((scheme, Deal), _rest(config["partition"]), "partition", given=given)


def _source(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is to be loaded."""
    reader = _named("dataset", config["dataset"], datasets.SETS)
    return _checked((datasets.load, reader), config["dataset"], "dataset", given=("data_dir", "options", "source"))


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """Return the configuration as plain values, with what its optional groups choose written into the method.

    Raises FedpflError for missing values, and for a group that chooses what the method does not have.
    """
    cfg = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    groups = [group for group in GROUPS if group not in OPTIONAL]
    try:
        if missing := OmegaConf.missing_keys(cfg):
            raise _without_value(min(missing))
        if OmegaConf.is_config(cfg.get("method")):
            cfg.method = OmegaConf.to_container(cfg.method, resolve=True)
        plain: dict[str, Any] = OmegaConf.to_container(cfg)  # type: ignore[assignment]
        # These are in the method by now; what it takes nothing from, as where the user sets method.q, is not looked up.
        optional = {group: plain[group] for group in OPTIONAL if plain.get(group) is not None}
        cfg = OmegaConf.masked_copy(cfg, [key for key in plain if key not in OPTIONAL])
        config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise FedpflError(one_line(error)) from None
    for key in (*SETTINGS, *groups):
        if config.get(key) is None:
            raise _without_value(key)
    for group, values in [(group, config[group]) for group in groups] + [*optional.items()]:
        if not isinstance(values, Mapping):
            raise FedpflError(f"{group} must be a group of keys, got {values!r}")
    method = config["method"]
    for group in ("method", "dataset"):
        config[group].pop("title", None)  # for tables (fedpfl.report.names): it decides nothing
    own = method.pop("groups", ())
    for group, values in optional.items():
        if group not in own:
            raise FedpflError(f"{group} is for a hyperparameter that method={method.get('name')} does not have")
        _known(_rest(values), OPTIONAL[group], group)
        _held(values, group)
    return config


def _without_value(key: str) -> FedpflError:
    return FedpflError(f"{key} has no value; set it with {key}=...")


def run_subdir(config: Mapping[str, Any], experiment: str | None, debug: str | None = None) -> str:
    """Where a run belongs below outputs/: `<place>/<method>/<key>/seed<k>`.

    The place is the experiment's folder, an experiment's name that is in none, or else the data set; with `_<debug>`.
    The method's name is that of the identity, so that runs of earlier versions lie where they are looked for.
    """
    place = "_".join(filter(None, (folder(experiment) if experiment else config["dataset"]["name"], debug)))
    return f"{place}/{essence(config)['method']['name']}/{identity(config)}/seed{config['seed']}"


def register() -> None:
    """Teach OmegaConf the resolvers that conf/train.yaml names. Safe to repeat."""

    def subdir(*, _root_: DictConfig) -> str:
        choices = OmegaConf.select(_root_, "hydra.runtime.choices") or {}
        try:
            config = check(_root_).config
        except Exception:
            return "invalid"  # the run itself tells what is wrong, and nothing is written before that
        return run_subdir(config, choices.get("experiment"), choices.get("debug"))

    for name, function in (
        ("fedpfl.run_subdir", subdir),
        ("fedpfl.run_dir", lambda *, _root_: f"outputs/{subdir(_root_=_root_)}"),
    ):
        OmegaConf.register_new_resolver(name, function, replace=True, use_cache=False)


def described(choice: Mapping[str, Any]) -> str:
    """A group's choice for people: `dirichlet (alpha=0.1, min_samples=10)`."""
    values = ", ".join(f"{key}={value}" for key, value in choice.items() if key != "name" and value is not None)
    return f"{choice['name']} ({values})" if values else str(choice["name"])


def one_line(error: Exception) -> str:
    """Return an error's message as one line; of Hydra's and OmegaConf's, the part that helps."""
    text, cause = str(error), error.__cause__
    if isinstance(error, FedpflError):
        return text
    inner: BaseException | None = error if isinstance(error, OmegaConfBaseException) else None
    while inner and not isinstance(inner, FedpflError):
        inner = inner.__cause__ or inner.__context__
    if inner:  # raised by a resolver of ours
        return str(inner)
    if isinstance(error, MissingConfigException):
        group, name = re.fullmatch(r"((?:hydra/)?[^/]*)/?(.*)", str(error.missing_cfg_file)).groups()  # type: ignore[union-attr]
        if now := moved(group, name):
            return f"{group}={name} is now {now}"
        # Of one among several (`logger=[wandb,foo]`) Hydra does not tell them.
        if known := choices(group) or error.options:
            return f"{group} must be {_one_of(known, name)}"
    if unknown := re.search(r"Could not override '(.*?)'", text):
        if unknown[1].split(".")[0] in OPTIONAL:
            return f"{unknown[1]} is for a hyperparameter that the method does not have"
        root = cause.parent_node._get_root() if isinstance(cause, OmegaConfBaseException) and cause.parent_node else {}
        given: Any = OmegaConf.to_container(root, resolve=False) if root else dict.fromkeys(GROUPS)
        if now := moved(str((given.get("method") or {}).get("name")), unknown[1]):
            return f"{unknown[1]} is now {now}"
        meant = _near_key(unknown[1], given)
        asked = "--cfg hydra" if unknown[1].startswith("hydra") else "--help"
        rest = f"did you mean {meant}?" if meant else f"`python -m fedpfl.train {asked}` tells all keys"
        return f"{unknown[1] or 'nothing'} is not a key here; {rest}"
    for pattern, told in KNOWN.items():
        if found := re.match(pattern, text):
            return found.expand(told)
    if isinstance(error, OSError) and error.filename:
        return f"cannot make {error.filename}: {error.strerror}; choose another place with hydra.run.dir=..."
    if isinstance(error, OverrideParseException):
        text = f"{error.override!r} cannot be read as key=value\n{text}"
    if isinstance(cause, OmegaConfBaseException):
        text = f"{text}\n{cause}"
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        text = f"{error.full_key}: {text}"
    lines = [line.strip().removesuffix(".") for line in text.splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith(NOISE)) or type(error).__name__


def _at_its_source(message: str, cfg: DictConfig) -> str:
    """The message about `method.q` as one about `quantile.q`, where that is what `method.q` takes its value from."""
    key, space, rest = message.partition(" ")
    value: Any = OmegaConf.to_container(cfg, resolve=False)
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    source = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
    return f"{source[1]}{space}{rest}" if source else message


def _one_of(known: Collection[str], got: object) -> str:
    """`one of a, b, c, got 'x'`, with what was probably meant."""
    meant = near(str(got), known)
    listed = ", ".join(known) if len(known) <= SHORT or not meant else f"{len(known)} names"
    return f"one of {listed}, got {got!r}{meant}"


def _near_key(got: str, config: Any) -> str | None:
    """The key, with dots, that was probably meant: of the same name elsewhere, or with a similar one."""

    def keys(values: Any, path: str) -> Iterator[str]:
        for key, value in values.items() if isinstance(values, Mapping) else ():
            yield f"{path}{key}"
            yield from keys(value, f"{path}{key}.")

    known = [key for key in keys(config, "") if key.startswith("hydra") == got.startswith("hydra")]
    place, dot, name = got.replace("/", ".").rpartition(".")
    beside = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == place]
    if ("/" in got or got in PLUGINS) and (group := near(name, PLUGINS, "hydra/{}")):
        return group
    if meant := near(name, beside, "{}"):
        return f"{place}{dot}{meant}"
    elsewhere = next((key for key in known if key.endswith(f".{name}")), None)
    return elsewhere or (None if beside else near(got, known, "{}"))


def typed(schema: Callable[..., Any], values: Any, path: str) -> Any:
    """Build dataclass `schema` from `values`, checking keys, types and (in its __post_init__) ranges."""
    arguments = _checked(schema, values, path)
    try:
        return schema(**arguments)
    except ValueError as error:
        raise FedpflError(f"{path}.{error}" if path else str(error)) from None


def _checked(
    schema: Callable[..., Any] | tuple[Callable[..., Any], ...], values: Any, path: str, given: tuple[str, ...] = ()
) -> dict[str, Any]:
    """`values` as arguments of `schema` (dataclasses or functions), checked against its annotations.

    given: arguments that come from elsewhere in the configuration.
    """
    if not isinstance(values, Mapping):
        raise FedpflError(f"{path} must be a group of keys, got {values!r}")
    schemas = schema if isinstance(schema, tuple) else (schema,)
    own = {name: parameter for one in schemas for name, parameter in inspect.signature(one).parameters.items()}
    parameters = {name: parameter for name, parameter in own.items() if name not in given}
    annotations = {name: hint for one in schemas for name, hint in hints(one).items()}
    dot = f"{path}." if path else ""
    _known(values, tuple(parameters), path)
    for key, parameter in parameters.items():
        if key not in values and parameter.default is parameter.empty:
            raise FedpflError(f"{dot}{key} has no value; set it with {dot}{key}=...")
    arguments = {}
    try:
        for key, value in values.items():
            arguments[key] = cast(_held(value, dot + key), annotations.get(key, Any), dot + key)
    except ValueError as error:
        raise FedpflError(str(error)) from None
    return arguments


def _known(values: Mapping[str, Any], keys: tuple[str, ...], path: str) -> None:
    for key in values:
        if key not in keys:
            dot = f"{path}." if path else ""
            meant = near(str(key), keys, f"did you mean {dot}{{}}?")
            rest = [f"known keys: {', '.join(keys) or 'name'}"] if len(keys) <= SHORT or not meant else []
            rest += [meant] if meant else []
            raise FedpflError(f"{dot}{key} is not a key here; {'; '.join(rest)}")


def _held(value: Any, path: str) -> Any:
    """`value`, if it can be computed with (float32, int64) or written down."""
    for key, item in value.items() if isinstance(value, Mapping) else ():
        _held(item, f"{path}.{key}")
    for item in value if isinstance(value, list) else ():
        _held(item, path)
    if type(value) is float and not math.isfinite(value):
        raise FedpflError(f"{path} must be a finite number, got {value}")
    if type(value) is float and value and not FLOAT.smallest_normal <= abs(value) <= FLOAT.max:
        raise FedpflError(
            f"{path} must be within {FLOAT.smallest_normal:.2g} and {FLOAT.max:.2g} in size, as float32 is, got {value}"
        )
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise FedpflError(f"{path} must be a whole number of at most 64 bits, got {value}")
    if isinstance(value, str) and any(unicodedata.category(c) in ("Cc", "Cs") for c in value):
        raise FedpflError(f"{path} must be a text without control characters, got {value!r}")
    return value


def _named(group: str, values: Any, registry: Mapping[str, Any]) -> Any:
    name = values.get("name") if isinstance(values, Mapping) else values
    if not isinstance(name, str) or name not in registry:
        raise FedpflError(f"{group}.name must be {_one_of(sorted(registry), name)}")
    return registry[name]


def _rest(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != "name"}
