"""The plan: a configuration checked as a whole, then data loaded and the network built."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import MISSING, DictConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from fedpfl import data, engine, models
from fedpfl.config import origin, plugins
from fedpfl.config.choices import GROUPS, OPTIONAL_GROUPS
from fedpfl.config.messages import format_error, name_source_key
from fedpfl.config.origin import WeightsOrigin
from fedpfl.config.resolvers import choice_folder
from fedpfl.config.schema import (
    SCHEMAS,
    SETTINGS,
    Checkpoint,
    Eval,
    ModelOptions,
    PartitionOptions,
    Settings,
)
from fedpfl.data import (
    Augment,
    Federation,
    Shift,
    ShiftedClients,
    datasets,
    partition,
    provenance,
)
from fedpfl.engine import Clock, Engine, Local, Stopping, Store
from fedpfl.engine.backends.selection import find_device
from fedpfl.engine.keys import Draws
from fedpfl.ground.checks import (
    build_dataclass,
    checked_arguments,
    look_up_choice,
    require_known_keys,
    require_representable,
    without_name,
)
from fedpfl.ground.dotted import flatten_keys
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.identity import identity
from fedpfl.ground.seeding import seeded_by_key
from fedpfl.ground.tasks import TASKS, Task, require_classification
from fedpfl.methods import METHODS, SEES, Method
from fedpfl.models import ADAPTERS, MODELS, Net
from fedpfl.privacy import (
    PRIVACIES,
    Account,
    Privacy,
    SampleAccount,
    SamplePrivacy,
    SampleProtection,
    Secret,
)
from fedpfl.record.loggers import make_loggers
from fedpfl.robust import (
    ATTACKS,
    DEFENCES,
    Adversary,
    Attack,
    Defence,
    make_adversary,
)
from fedpfl.system import SYSTEMS, System, draw_devices, draw_stragglers


@dataclass(frozen=True)
class Plan:
    """Hold a checked configuration, before data are read.

    Attributes:
        config: all keys, resolved.
        identity: its hash.
    """

    settings: Settings
    local: Local
    eval: Eval
    stopping: Stopping
    checkpoint: Checkpoint
    state: Store
    engine: Engine
    augment: Augment
    shift: Shift
    privacy: Privacy | SamplePrivacy | None
    attack: Attack | None
    defence: Defence | None
    system: System | None
    device: torch.device
    method: Method
    config: dict[str, Any]
    identity: str

    @property
    def task(self) -> Task:
        """Return what labels are for."""
        return TASKS[self.settings.task]


@dataclass(frozen=True)
class Run(Plan):
    """Hold all that a run needs.

    Attributes:
        federation: the clients that take part; as the partition deals them, and in the run of a
            round as the shift has them then.
        newcomers: clients that never take part; None without any.
        shifted: what clients hold in each world; None where nothing is laid over.
        world: that `federation` is of; None: as the partition deals them.
        clock: of simulated time, None without it.
        net: the network.
        data_digest: of all that was read from files, the same for all seeds.
        fingerprint: also of who holds which samples, and of what of the network is frozen.
        account: of privacy, None without it.
        adversary: who attacks, None where attack=none.
        origin: where the network's values are from.
        secret: of a private run, once it has its directory.
        notes: lines for the user about how the data were dealt.
    """

    federation: Federation
    newcomers: Federation | None
    shifted: ShiftedClients | None
    clock: Clock | None
    net: Net
    data_digest: str
    fingerprint: str
    account: Account | SampleAccount | None
    adversary: Adversary | None
    origin: WeightsOrigin
    secret: Secret | None = None
    notes: tuple[str, ...] = ()
    world: int | None = None

    def in_round(self, round_number: int) -> Run:
        """Return the run with what its clients hold in a round."""
        world = self.shift.find_world(round_number)
        if self.shifted is None or world == self.world:
            return self
        federation, newcomers = self.shifted.in_world(world)
        return replace(
            self,
            federation=federation,
            newcomers=newcomers,
            # Who attacks is drawn by the seed alone, so it stays; what they poison is the new
            # world's.
            adversary=_make_adversary(self, federation, newcomers),
            world=world,
        )

    @property
    def client_account(self) -> Account | None:
        """Return the account of a run that hides clients, None for others."""
        return self.account if isinstance(self.account, Account) else None

    @property
    def sample_account(self) -> SampleAccount | None:
        """Return the account of a run that hides samples, None for others."""
        return self.account if isinstance(self.account, SampleAccount) else None

    @property
    def sample_protection(self) -> SampleProtection | None:
        """Return how clients hide their samples, None where they do not."""
        account = self.sample_account
        if account is None:
            return None
        return SampleProtection(account.privacy.clip_length, account.client_noises, self.secret)

    def make_draws(self, purpose: str, round_number: int) -> Draws:
        """Return the random draws of a round for a purpose."""
        return Draws(self.settings.seed, purpose, round_number, self.sample_protection)

    def draw_cohorts(self) -> Iterator[list[int]]:
        """Draw the clients of one round after the other; of a private run in secret."""
        clients = self.federation.clients
        rounds = self.settings.rounds
        if self.secret and self.client_account and self.client_account.noise:
            return engine.draw_secret_cohorts(
                self.secret, clients, self.drawn_share, rounds, self.is_poisson_sampled
            )
        return engine.draw_cohorts(
            self.settings.seed, clients, self.drawn_share, rounds, self.is_poisson_sampled
        )

    @property
    def is_poisson_sampled(self) -> bool:
        """Return whether each client is drawn for itself."""
        return self.privacy is not None and self.privacy.sampling == "poisson"

    @property
    def cohort(self) -> int:
        """Return how many clients a round is meant for."""
        settings = self.settings
        cohorts = engine.draw_cohorts(
            settings.seed, self.federation.clients, settings.participation, 1
        )
        return len(next(cohorts))

    @property
    def drawn_share(self) -> float:
        """Return the share of the clients that is drawn for a round.

        With `system.over` it is more than the cohort, as some may not come through.
        """
        if self.system is None:
            return min(1.0, self.settings.participation)
        return min(1.0, self.settings.participation * self.system.over)


def share_nothing(key: Hashable, make: Callable[[], Any]) -> Any:
    """Share nothing with other runs."""
    return make()


def check_config(cfg: DictConfig) -> Plan:
    """Check the whole configuration. Raises FedpflError, about the key that the user set."""
    try:
        return _make_plan(resolve_config(cfg))
    except FedpflError as error:
        raise FedpflError(name_source_key(str(error), cfg)) from None


def _make_plan(config: dict[str, Any]) -> Plan:
    """Check a resolved configuration, group by group."""
    # ---- Step 1: what is needed to read the rest, above all plugins.
    known_keys = (*SETTINGS, *GROUPS)
    for key in config:
        if key not in known_keys:
            raise FedpflError(f"{key} is not a key here; known keys: {', '.join(known_keys)}")
    settings = build_dataclass(
        Settings,
        {key: config[key] for key in SETTINGS},
        "",
    )
    config["plugins"] = plugins.load_plugins(settings.plugins)
    # These are for this command, not for whoever repeats the run by its configuration.
    config["restart"] = False
    config["extend"] = ""

    # ---- Step 2: groups that hold the same keys whatever is chosen.
    # Ahead of the schema, which would call 0.5 no whole number and not say what to do instead.
    _refuse_part_of_epoch(config["local"])
    parts = {
        group: build_dataclass(schema, config[group], group) for group, schema in SCHEMAS.items()
    }
    device = find_device(settings.device)
    engine.require_supported(parts["engine"], device)
    make_loggers(config["logger"])  # raises for what cannot work

    # ---- Step 3: groups that choose a class or a function.
    method_name = config["method"]["name"]
    method = _build_choice(config, "method", METHODS)
    if method.own_steps and not parts["local"].is_plain:
        raise FedpflError(engine.unused_optimizer_text(f"method={method_name}", parts["local"]))
    _require_fit_of_task(config, settings, parts, method)
    _require_fit_of_shift(parts["shift"], settings)
    for check_group in (_model_options, _adapter_options, _partition_options, _dataset_options):
        check_group(config)
    parts["system"] = _make_system(config, parts["local"])
    parts["privacy"] = _make_privacy(config, settings, method, parts["stopping"])
    if parts["privacy"] and parts["system"]:
        raise FedpflError(
            f"privacy={parts['privacy'].hides} keeps no account of clients that drop out or come"
            " late; use system=none"
        )
    parts["attack"] = _make_attack(config, parts["eval"])
    parts["defence"] = _make_defence(config, method, parts)
    return Plan(
        settings, **parts, device=device, method=method, config=config, identity=identity(config)
    )


def _require_fit_of_task(
    config: Mapping[str, Any], settings: Settings, parts: Mapping[str, Any], method: Method
) -> None:
    """Raise FedpflError for a choice that is about classes, in a task without any."""
    task = TASKS[settings.task]
    method_name = config["method"]["name"]
    if method.needs_classes:
        require_classification(task, f"method={method_name}", method.needs_classes)
    choices = {
        f"metrics=[{','.join(settings.metrics)}]": bool(settings.metrics),
        "eval.classes=own": parts["eval"].classes == "own",
        "eval.common=true": parts["eval"].common,
        "shift.label_permutation=true": parts["shift"].label_permutation,
        "shift.label_noise": parts["shift"].label_noise > 0,
        "shift.imbalance": parts["shift"].imbalance > 1,
    }
    for choice, is_chosen in choices.items():
        if is_chosen:
            require_classification(task, choice, "it is about classes; leave it out")
    scheme = config["partition"].get("name")
    if partition.deals_by_class(scheme, config["partition"]):
        reason = "it deals samples by class; use partition=iid, or sites or groups"
        require_classification(task, f"partition={scheme}", reason)


def _require_fit_of_shift(shift: Shift, settings: Settings) -> None:
    """Raise FedpflError for more clusters than clients, or a schedule that outlasts the run."""
    if shift and shift.by == "cluster" and shift.clusters > settings.clients:
        raise FedpflError(
            f"shift.clusters must be at most clients={settings.clients}, got {shift.clusters}"
        )
    if shift.at and shift.at[-1] >= settings.rounds:
        raise FedpflError(
            f"shift.at must be rounds before the last, {settings.rounds}, got {list(shift.at)}"
        )


def _refuse_part_of_epoch(local: Mapping[str, Any]) -> None:
    epochs = local.get("epochs")
    if isinstance(epochs, float) and epochs > 0 and epochs % 1:
        raise FedpflError(
            f"local.epochs must be a whole number or null, got {epochs}; to train less than an"
            " epoch, count minibatches: local.epochs=null local.steps=..."
        )


def preload_datasets(configs: Iterable[DictConfig]) -> None:
    """Read the data of runs, so that absent data are noticed before any run.

    A configuration that is wrong in itself is left to its run, which says so.

    Raises:
        FedpflError: for data that are not there.
    """
    loaded = set()
    checked = set()
    for cfg in configs:
        try:
            # To check a run whole takes longer than some runs.
            sources = _describe_sources(cfg)
            if sources in checked:
                continue
            config = check_config(cfg).config
            dataset_options = _dataset_options(config)
        except (FedpflError, OmegaConfBaseException):
            continue
        checked.add(sources)
        key = config["data_dir"], repr(dataset_options)
        if key not in loaded:
            datasets.load_samples(data_dir=Path(config["data_dir"]), **dataset_options)
        loaded.add(key)


def _describe_sources(cfg: DictConfig) -> str:
    """Return all that decides which data a run reads.

    Raises:
        OmegaConfBaseException: for what has no value.
    """
    values = []
    for key in ("data_dir", "dataset", "task", "plugins"):
        value = OmegaConf.select(cfg, key)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
        values.append(value)
    return repr(values)


def prepare_sweep(configs: Sequence[DictConfig]) -> None:
    """Raise FedpflError for absent data and for faults that all runs of a sweep share."""
    preload_datasets(configs)
    fault = _find_fault(configs[0])
    if fault and fault == _find_fault(configs[-1]):
        raise FedpflError(fault)


def _find_fault(cfg: DictConfig) -> str:
    """Return what is wrong with a run, "" for nothing."""
    try:
        build_run(check_config(cfg))
    except FedpflError as error:
        return str(error)
    except Exception:  # the run itself tells of it, with its log
        return ""
    return ""


DEALING_KEYS = (
    *(
        "data_dir",
        "dataset",
        "task",
        "clients",
        "partition",
        "validation",
        "unseen",
        "unseen_groups",
    ),
    *("augment", "shift", "eval"),
)
"""Keys and groups that decide what clients hold, beside the seed."""
Share = Callable[[Hashable, Callable[[], Any]], Any]
"""`share(key, make)` returns what runs of one process may have in common."""


def build_run(plan: Plan, share: Share = share_nothing) -> Run:
    """Load the data and build the network. Raises FedpflError.

    Args:
        plan: a checked configuration.
        share: makes the samples, which runs of one process may have in common.
    """
    settings = plan.settings
    if settings.metrics:
        engine.measures.import_torchmetrics()  # raises where it is absent
    dealt_data = _deal_data(plan, share)

    # ---- The network, from its weights if there are any
    model_options = _model_options(plan.config)
    weights = origin.find_weights(
        Path(settings.data_dir),
        model_options.pop("weights", None),
    )
    weights_origin = origin.trace_origin(
        weights=weights,
        hashes=dealt_data.hashes,
        federation=dealt_data.federation,
        newcomers=dealt_data.newcomers,
        overlap=model_options.pop("overlap", False),
        privacy=plan.privacy,
    )
    weight_values = weights and weights.values
    net = _build_net(plan, dealt_data.federation, {**model_options, "weights": weight_values})
    _require_fit(plan, dealt_data.federation, net)

    # ---- What numbers come from. Frozen values are in no checkpoint, and may be drawn.
    account = _make_account(plan, dealt_data.federation, net)
    _require_fit_of_uploads(plan, dealt_data.federation, net)
    clock = _make_clock(plan, dealt_data.federation)
    # One digest of what was read, the same for all seeds; one of who holds what as well.
    data_parts: list[Any] = [dealt_data.samples_digest, weight_values]
    split_parts: list[Any] = [dealt_data.samples_digest, dealt_data.splits, weight_values]
    if net.frozen:
        split_parts.append(net.frozen)
    if clock and clock.system.file:
        data_parts.append(clock.devices)
        split_parts.append(clock.devices)
    return Run(
        **vars(plan),
        federation=dealt_data.federation,
        newcomers=dealt_data.newcomers,
        shifted=dealt_data.shifted,
        clock=clock,
        net=net,
        data_digest=data.fingerprint(*data_parts),
        fingerprint=data.fingerprint(*split_parts),
        account=account,
        adversary=_make_adversary(plan, dealt_data.federation, dealt_data.newcomers),
        origin=weights_origin,
        notes=dealt_data.notes,
    )


@dataclass(frozen=True, eq=False)
class _DealtData:
    """Samples as the clients hold them.

    Attributes:
        federation: the clients that take part.
        newcomers: those that never do, None without any.
        shifted: what they hold in each world, None where nothing is laid over.
        splits: who holds which samples, for the fingerprint.
        samples_digest: of what was read.
        hashes: of all samples; None where they are at nodes.
        notes: lines for the user.
    """

    federation: Federation
    newcomers: Federation | None
    shifted: ShiftedClients | None
    splits: tuple[Any, ...]
    samples_digest: str
    hashes: np.ndarray | None
    notes: tuple[str, ...]


def _deal_data(plan: Plan, share: Share) -> _DealtData:
    """Read the samples and deal them to clients."""
    settings = plan.settings
    dataset_options = _dataset_options(plan.config)

    def load() -> tuple[datasets.Samples, Tensor, str, np.ndarray]:
        with seeded_by_key("dataset"):  # a reader of a user's may draw
            samples = datasets.load_samples(data_dir=Path(settings.data_dir), **dataset_options)
        hashes = provenance.hash_samples(samples.x)
        on_device = replace(samples, x=samples.x.to(plan.device))
        # Runs that share samples train together, for which their labels must be the same tensor.
        return on_device, samples.y.to(plan.device), data.fingerprint(samples), hashes

    # Not the seed: runs that differ by it share the samples and deal them differently.
    samples_key = ("samples", plan.device, settings.data_dir, repr(dataset_options))
    samples, labels, samples_digest, hashes = share(samples_key, load)

    # ---- Who holds which samples
    partition_name = plan.config["partition"]["name"]
    split, seed = _deal_samples(plan, samples)
    newcomer_numbers = _find_newcomers(settings, samples, split, seed)
    everyone = data.build_federation(
        samples,
        split,
        settings.validation,
        seed,
        plan.augment,
        newcomer_numbers,
        plan.eval.classes == "own",
    ).to(plan.device)
    everyone = replace(everyone, y=labels)
    federation, newcomers = everyone.split_newcomers(newcomer_numbers)
    shifted = _shift_clients(plan, everyone, newcomer_numbers, seed, share)
    splits: tuple[Any, ...] = (everyone.train, everyone.test, everyone.validation)
    if newcomers:
        splits += (newcomers.partition_numbers,)
    return _DealtData(
        federation=federation,
        newcomers=newcomers,
        shifted=shifted,
        splits=splits,
        samples_digest=samples_digest,
        hashes=hashes,
        notes=(*split.notes, *_note_unused_groups(samples, partition_name)),
    )


def _deal_samples(plan: Plan, samples: datasets.Samples) -> tuple[partition.Partition, int]:
    """Return who holds which samples, and the seed that it was drawn from."""
    settings = plan.settings
    partition_options = _partition_options(plan.config)
    seed = partition_options.pop("seed", None)
    if seed is None:
        seed = settings.seed
    with seeded_by_key("partition", seed):  # a partition of a user's may draw
        split = partition.deal_samples(
            partition.SCHEMES[plan.config["partition"]["name"]],
            samples,
            settings.clients,
            seed,
            **partition_options,
        )
    return data.thin_classes(split, samples.y.numpy(), plan.shift, seed), seed


def _shift_clients(
    plan: Plan, everyone: Federation, newcomers: Collection[int], seed: int, share: Share
) -> ShiftedClients | None:
    """Return what clients hold in each world, None where nothing is laid over.

    Raises:
        FedpflError: for a shift that these samples cannot have.
    """
    data.require_fit_of_shift(plan.shift, everyone)
    if not plan.shift.is_laid_over:
        return None

    def lay_over() -> ShiftedClients:
        return ShiftedClients(everyone, newcomers, plan.shift, seed)

    # Runs that differ by method alone train together in lockstep where they share samples.
    deal = [str(plan.config[key]) for key in DEALING_KEYS]
    return share(("shift", plan.device, seed, *deal), lay_over)


def _find_newcomers(
    settings: Settings, samples: datasets.Samples, split: partition.Partition, seed: int
) -> list[int]:
    """Return the clients that never take part, ascending."""
    if settings.unseen_groups:
        return data.find_clients_of_groups(samples, split, settings.unseen_groups)
    return data.draw_newcomers(len(split.train), settings.newcomers, seed)


def _build_net(plan: Plan, federation: Federation, model_options: Mapping[str, Any]) -> Net:
    """Build the network, and tell it of clients and rounds."""
    adapter = ADAPTERS[plan.config["adapter"]["name"]]
    net = models.build_network(
        plan.config["model"]["name"],
        federation.shape,
        federation.classes,
        plan.settings.seed,
        **model_options,
        adapter=partial(adapter, **_adapter_options(plan.config)),
    )
    net = net.with_facts(clients=federation.clients, rounds=plan.settings.rounds)
    return net.to(plan.device)


def _require_fit(plan: Plan, federation: Federation, net: Net) -> None:
    """Raise FedpflError for a method that this network or these clients are not for."""
    method = plan.method
    method_name = plan.config["method"]["name"]
    # A method that counts on pairs of A and B would average values of other layers as if they were.
    if method.pairs and method.pairs != net.parts.pairs:
        pairs_word = ""
        if max(method.pairs, net.parts.pairs) > 1:
            pairs_word = f" adapter.pairs={method.pairs}"
        raise FedpflError(
            f"method={method_name} is about low-rank pairs; choose adapter=lora{pairs_word}"
        )
    # Refuses what this network does not have, while nothing is written.
    method.init(net.params, net.parts)
    if method.validates and not any(map(len, federation.validation)):
        raise FedpflError(
            f"method={method_name} chooses by held-out samples, and there are none; set "
            "validation=0.1"
        )


def _note_unused_groups(samples: datasets.Samples, scheme: str) -> list[str]:
    """Return a line where the samples have groups, but the partition mixes them."""
    takes_groups = "groups" in inspect.signature(partition.SCHEMES[scheme]).parameters
    if samples.groups is None or takes_groups or scheme == "file":
        return []
    count = len(samples.group_names) or int(samples.groups.max()) + 1
    return [
        f"partition: the samples are from {count:,} groups (persons, sites or domains), and"
        f" partition={scheme} mixes them; partition=groups makes clients of them"
    ]


def _make_clock(plan: Plan, federation: Federation) -> Clock | None:
    """Return clients' devices in simulated time, and stragglers. Raises FedpflError."""
    if plan.system is None:
        return None
    seed = plan.settings.seed
    clients = federation.clients
    # Devices go by the number in the partition, which a client keeps when others are set apart.
    partition_numbers = [federation.partition_number(client) for client in range(clients)]
    devices = draw_devices(
        plan.system,
        partition_numbers,
        seed,
        Path(plan.settings.data_dir),
    )
    stragglers = draw_stragglers(plan.system, clients, plan.local.amount, seed)
    return Clock(plan.system, devices, stragglers)


def _build_choice(config: Mapping[str, Any], group: str, choices: Mapping[str, Any]) -> Any:
    """Return what a configuration group chooses, made with the group's other keys."""
    values = config[group]
    schema = look_up_choice(group, values, choices)
    options = without_name(values)
    return build_dataclass(schema, options, group)


def _model_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the network's options."""
    network = look_up_choice("model", config["model"], MODELS)
    return checked_arguments(
        (network, ModelOptions),
        without_name(config["model"]),
        "model",
        provided_elsewhere=("shape", "classes"),
    )


def _adapter_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the adapter's options."""
    adapter = look_up_choice("adapter", config["adapter"], ADAPTERS)
    return checked_arguments(
        (adapter,),
        without_name(config["adapter"]),
        "adapter",
        provided_elsewhere=("module", "head", "seed"),
    )


def _make_privacy(
    config: Mapping[str, Any], settings: Settings, method: Method, stopping: Stopping
) -> Privacy | SamplePrivacy | None:
    """Return how clients are protected, if they are.

    Raises:
        FedpflError: for what would give them away all the same.
    """
    privacy: Privacy | SamplePrivacy | None = _build_choice(config, "privacy", PRIVACIES)
    if privacy is None:
        return None

    # ---- Nothing else may be chosen by clients' samples.
    choice = f"privacy={privacy.hides}"
    if stopping.early:
        raise FedpflError(
            f"{choice}: stopping.early would tell the server of each client's loss; leave it out"
        )
    if settings.validation:
        raise FedpflError(
            f"{choice}: what is chosen by held-out samples gives them away, unaccounted; use"
            " validation=0"
        )
    if isinstance(privacy, SamplePrivacy):
        return privacy

    # ---- What the server sees must be the noised mean alone, and the noise must suffice.
    choice_text = f"{choice} and method={config['method']['name']}"
    if method.server_sees != SEES[0]:
        view_texts = {SEES[1]: "each client's upload", SEES[2]: "what clients keep"}
        view_text = view_texts.get(method.server_sees, "more")
        raise FedpflError(
            f"{choice_text}: its server would see {view_text}, not a {SEES[0]} alone, which is all"
            " that is protected"
        )
    if privacy.sampling == "poisson" and type(method).aggregate is not Method.aggregate:
        raise FedpflError(
            f"{choice_text}: its server may go by how many clients take part, which"
            " privacy.sampling=poisson hides; use fixed"
        )
    privacy.check_clients(settings.clients - settings.newcomers)
    return privacy


def _make_account(plan: Plan, federation: Federation, net: Net) -> Account | SampleAccount | None:
    """Return the account of a private run, None for others.

    Raises:
        FedpflError: for a network or a method that it cannot answer for.
    """
    settings = plan.settings
    method = plan.method
    if plan.privacy is None:
        return None
    # With privacy=client only their size counts: who takes part is drawn in secret.
    cohorts = engine.draw_cohorts(
        settings.seed, federation.clients, settings.participation, settings.rounds
    )

    # ---- Step 1: a run that hides samples counts each client's steps.
    if isinstance(plan.privacy, SamplePrivacy):
        return _make_sample_account(
            plan,
            plan.privacy,
            federation,
            net,
            [*map(tuple, cohorts)],
        )

    # ---- Step 2: a run that hides clients must upload nothing beside what is clipped.
    if net.buffers and "aggregate" in method.buffers().values():
        raise FedpflError(
            "privacy=client: the server would average BatchNorm statistics as they are; use"
            " method.statistics=local, or a network without BatchNorm"
        )
    server, client = method.init(net.params, net.parts)
    # Raises where an upload holds more than training moves, as no clipping would protect that.
    engine.untrained_upload(
        method,
        server,
        client,
        dict.fromkeys(method.buffers(), net.buffers),
    )

    # ---- Step 3: the account.
    plan.privacy.check_clients(federation.clients)
    cohort_size = len(next(cohorts))
    return Account(plan.privacy, federation.clients, cohort_size, settings.rounds)


def _make_attack(config: Mapping[str, Any], evaluation: Eval) -> Attack | None:
    """Return what hostile clients do, if there are any."""
    attack: Attack | None = _build_choice(config, "attack", ATTACKS)
    if attack and evaluation.common:
        raise FedpflError(
            "eval.common=true evaluates on everybody's test samples, and with an attack only honest"
            " clients are evaluated; leave it out"
        )
    return attack


def _make_defence(
    config: Mapping[str, Any], method: Method, parts: Mapping[str, Any]
) -> Defence | None:
    """Return what takes the place of the mean of uploads, if anything does.

    Args:
        config: resolved.
        method: of the run.
        parts: other groups of the plan, by name.

    Raises:
        FedpflError: for a server that takes no mean of uploads, and for other groups that it does
            not go with.
    """
    defence: Defence | None = _build_choice(config, "defence", DEFENCES)
    if defence is None:
        return None
    choice = f"defence={config['defence']['name']}"
    if method.server_sees != SEES[0]:
        deeds = {SEES[1]: "looks at each upload", SEES[2]: "looks at what clients keep"}
        deed = deeds.get(method.server_sees, "does more")
        raise FedpflError(
            f"{choice} takes the place of a mean of uploads, and the server of"
            f" method={config['method']['name']} {deed}; use defence=mean"
        )
    # Noise is made for what an upload moves in a mean; a robust rule may move by more.
    if isinstance(parts["privacy"], Privacy):
        raise FedpflError(
            f"{choice}: privacy=client accounts for a mean of uploads alone; use defence=mean"
        )
    absences = {"system=simulated": parts["system"], "stopping.early": parts["stopping"].early}
    for absence, is_chosen in absences.items():
        if is_chosen and defence.least_clients > 1:
            raise FedpflError(
                f"{choice} needs {defence.least_clients} uploads in every round, and by {absence}"
                " a round may have fewer; use defence=median or geometric_median"
            )
    return defence


def _require_fit_of_uploads(plan: Plan, federation: Federation, net: Net) -> None:
    """Raise FedpflError where a defence or an attack cannot deal with a method's uploads."""
    method = plan.method
    defence = plan.defence
    server, client = method.init(net.params, net.parts)
    statistics = dict.fromkeys(method.buffers(), net.buffers)

    # ---- Step 1: the form of uploads.
    rules: tuple[Attack | Defence | None, ...] = (plan.attack, defence)
    for rule in rules:
        if rule:
            engine.check_upload_form(rule, method, server, client, statistics)
    if defence is None:
        return

    # ---- Step 2: nothing may come past the defence.
    # Averaged statistics pass every rule by, and attackers send what they like.
    if net.buffers and "aggregate" in method.buffers().values():
        raise FedpflError(
            "defence: the server would average BatchNorm statistics as they are; use"
            " method.statistics=local, or a network without BatchNorm"
        )

    # ---- Step 3: enough uploads in every round.
    settings = plan.settings
    cohorts = engine.draw_cohorts(
        settings.seed, federation.clients, settings.participation, settings.rounds
    )
    cohort_size = len(next(cohorts))
    if cohort_size < defence.least_clients:
        raise FedpflError(
            f"defence={plan.config['defence']['name']} needs {defence.least_clients} uploads in"
            f" every round, and a cohort is {cohort_size} clients; raise participation or lower"
            " defence.f"
        )


def _make_adversary(
    plan: Plan, federation: Federation, newcomers: Federation | None
) -> Adversary | None:
    """Draw the attackers, and poison what they have. Raises FedpflError."""
    if plan.attack is None:
        return None
    federations = [federation]
    if newcomers:
        federations.append(newcomers)
    return make_adversary(plan.attack, federations, plan.settings.seed)


def _make_sample_account(
    plan: Plan,
    privacy: SamplePrivacy,
    federation: Federation,
    net: Net,
    cohorts: list[tuple[int, ...]],
) -> SampleAccount:
    """Return the account of a run that hides samples, after a rehearsal.

    Raises:
        FedpflError: for a network or a method that would tell of samples without noise.
    """
    settings = plan.settings

    # ---- Step 1: one world, so that a client's samples stay the same.
    if plan.shift.at:
        raise FedpflError(
            "privacy=sample keeps account of one world, in which clients hold the same samples"
            " throughout; use shift.at=[]"
        )

    # ---- Step 2: rehearse training.
    # What is refused is so before anything is written, and phases are as clients will have them.
    rehearsal = engine.SamplingRehearsal(plan.method, net, federation, privacy.clip_length)
    training = rehearsal.plan_training(plan.local)
    tuning: engine.ClientSteps = tuple(() for _ in training)
    tuned_rounds: tuple[int, ...] = ()

    # ---- Step 3: rehearse fine-tuning, and tell in which rounds it is.
    if plan.eval.finetune_epochs:
        # They are a federation apart, whose steps nobody counts.
        if settings.newcomers:
            raise FedpflError(
                "privacy=sample keeps no account of newcomers that are fine-tuned; use unseen=0 or"
                " eval.finetune_epochs=0"
            )
        tuning_local = plan.eval.finetuning_local(plan.local)
        tuning = rehearsal.plan_tuning(tuning_local, plan.eval.finetune_part)
        rounds = range(1, settings.rounds + 1)
        tuned_rounds = tuple(
            number for number in rounds if plan.eval.should_finetune(number, len(rounds))
        )
    return SampleAccount(
        privacy=privacy,
        sizes=tuple(federation.train_sizes.tolist()),
        training=training,
        tuning=tuning,
        cohorts=tuple(cohorts),
        tuned_rounds=tuned_rounds,
    )


def _make_system(config: Mapping[str, Any], local: Local) -> System | None:
    """Return what devices clients have, if any."""
    system = _build_choice(config, "system", SYSTEMS)
    if system and system.stragglers and system.least >= local.amount:
        raise FedpflError(
            f"system.least must be below what others train, {local.amount}, got {system.least}"
        )
    return system


def _partition_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scheme's options, and the seed if it is not the run's."""
    scheme = look_up_choice("partition", config["partition"], partition.SCHEMES)
    supplied_arguments = tuple(key for key in partition.SUPPLIED_ARGUMENTS if key != "seed")
    return checked_arguments(
        (scheme, PartitionOptions),
        without_name(config["partition"]),
        "partition",
        provided_elsewhere=supplied_arguments,
    )


def _dataset_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is to be loaded."""
    reader = look_up_choice("dataset", config["dataset"], datasets.DATA_SETS)
    options = checked_arguments(
        (datasets.load_samples, reader),
        config["dataset"],
        "dataset",
        provided_elsewhere=("data_dir", "options", "source", "task"),
    )
    return {**options, "task": config["task"]}


def escape_interpolations(config: Mapping[str, Any]) -> DictConfig:
    """Return a configuration of these very values.

    Interpolations of a file of somebody else's are text.
    """

    def escape(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: escape(inner_value) for key, inner_value in value.items()}
        if isinstance(value, list | tuple):
            return [escape(inner_value) for inner_value in value]
        if isinstance(value, str):
            return re.sub(r"(\\*)\$\{", r"\1\1\${", value)
        return value

    return OmegaConf.create(escape(config))


def resolve_config(cfg: DictConfig) -> dict[str, Any]:
    """Return the configuration as plain values, its optional groups written into the method.

    Raises:
        FedpflError: for missing values, and for a group that chooses what the method does not have.
    """
    # ---- Step 1: resolve interpolations.
    cfg = OmegaConf.masked_copy(
        cfg,
        [str(key) for key in cfg if key != "hydra"],
    )
    groups = [group for group in GROUPS if group not in OPTIONAL_GROUPS]
    try:
        unresolved: dict[str, Any] = OmegaConf.to_container(cfg)  # type: ignore[assignment]
        if missing := [key for key, value in flatten_keys(unresolved) if _is_missing(value)]:
            raise _missing_value_error(min(missing))
        if OmegaConf.is_config(cfg.get("method")):
            cfg.method = OmegaConf.to_container(cfg.method, resolve=True)
        # These are in the method by now; what it takes nothing from, as where the user sets
        # method.q, is not looked up.
        optional_groups = {
            group: unresolved[group]
            for group in OPTIONAL_GROUPS
            if unresolved.get(group) is not None
        }
        for group in OPTIONAL_GROUPS:
            cfg.pop(group, None)
        config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise FedpflError(format_error(error)) from None

    # ---- Step 2: nothing is missing, and groups are groups.
    for key in (*SETTINGS, *groups):
        if config.get(key) is None:
            raise _missing_value_error(key)
    required_groups = {group: config[group] for group in groups}
    for group, values in (required_groups | optional_groups).items():
        if not isinstance(values, Mapping):
            raise FedpflError(f"{group} must be a group of keys, got {values!r}")

    # ---- Step 3: optional groups are for methods that name them.
    method = config["method"]
    for group in ("method", "dataset"):
        config[group].pop("title", None)  # for tables (fedpfl.report.names): it decides nothing
    groups_of_method = method.pop("groups", ())
    for group, values in optional_groups.items():
        if group not in groups_of_method:
            raise FedpflError(
                f"{group} is for a hyperparameter that method={method.get('name')} does not have"
            )
        require_known_keys(without_name(values), OPTIONAL_GROUPS[group], group)
        require_representable(values, group)
    return config


def _is_missing(value: Any) -> bool:
    """Return whether a value, or one of a list, has still to be set."""
    return value == MISSING or (isinstance(value, list) and MISSING in value)


def _missing_value_error(key: str) -> FedpflError:
    return FedpflError(f"{key} has no value; set it with {key}=...")


INVALID = "no-run-of-these-settings"
"""Where a run would lie whose configuration is refused."""


def require_run_directory(cfg: DictConfig, path: Path) -> None:
    """Raise FedpflError where a run has no directory.

    It is refused, or one of its keys takes its value from Hydra's own.
    """
    if INVALID in path.parts:
        check_config(cfg)
        values: Any = OmegaConf.to_container(cfg)
        hydra_keys = [key for key, value in flatten_keys(values) if "${hydra:" in str(value)]
        label = ", ".join(hydra_keys) or "where the run belongs"
        raise FedpflError(
            f"{label}: where the run belongs follows from its keys, and one of them asks Hydra"
            " (${hydra:...}) for what is not known then; give it a plain value, or set"
            " hydra.run.dir"
        )


def run_subdir(config: Mapping[str, Any], experiment: str | None, debug: str | None = None) -> str:
    """Return where a run belongs below outputs/: `<folder>/<method>/<key>/seed<k>`.

    The folder is the experiment's, an experiment's name that is in none, or else the data set;
    with `_<debug>`.
    """
    folder = choice_folder(experiment) if experiment else config["dataset"]["name"]
    if debug:
        folder = f"{folder}_{debug}"
    return f"{folder}/{config['method']['name']}/{identity(config)}/seed{config['seed']}"


# A key that asks where the run belongs would decide its own value. The variable is of one context,
# as other threads may ask at the same time.
_IS_RESOLVING = ContextVar("is_resolving", default=False)


# It is no closure: launchers pickle resolvers for their workers, and no ContextVar can be pickled.
def _resolve_subdir(*, _root_: DictConfig, _node_: Node) -> str:
    """Return where the run of a configuration belongs, or INVALID where it is refused."""
    if _IS_RESOLVING.get() or OmegaConf.select(_root_, "hydra") is None:
        raise FedpflError(
            f"{_node_._get_full_key(None)}: ${{fedpfl.run_subdir:}} follows from all keys of"
            " the run, so none of them may ask for it"
        )
    choices = OmegaConf.select(_root_, "hydra.runtime.choices") or {}
    token = _IS_RESOLVING.set(True)
    try:
        config = check_config(_root_).config
    except Exception:
        return INVALID  # the run itself tells what is wrong, and nothing is written before that
    finally:
        _IS_RESOLVING.reset(token)
    folder = run_subdir(config, choices.get("experiment"), choices.get("debug"))
    # A trial lies apart: no run of the user's is taken for one, and no trial of another search
    # stands in the way.
    study = OmegaConf.select(_root_, "hydra.sweeper.study")
    return f"search-{study}/{folder}" if study else folder


def register_resolver() -> None:
    """Teach OmegaConf the resolver that conf/train.yaml names. Safe to repeat."""
    OmegaConf.register_new_resolver(
        "fedpfl.run_subdir",
        _resolve_subdir,
        replace=True,
        use_cache=False,
    )


def read_options(config: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Return the checked options of a model, data set or partition. Raises FedpflError."""
    readers = {
        "model": _model_options,
        "dataset": _dataset_options,
        "partition": _partition_options,
    }
    return readers[group](config)
