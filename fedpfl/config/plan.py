"""The plan: a configuration checked as a whole, before data are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig

from fedpfl import engine
from fedpfl.config import plugins
from fedpfl.config.choices import GROUPS, NESTED_GROUPS
from fedpfl.config.group_options import OPTION_READERS, build_choice, read_options
from fedpfl.config.messages import name_source_key
from fedpfl.config.resolution import resolve_config
from fedpfl.config.schema import SCHEMAS, SETTINGS, Checkpoint, Eval, Settings
from fedpfl.data import Augment, Shift, partition
from fedpfl.engine import Engine, Local, Stopping, Store
from fedpfl.engine.backends.selection import find_device
from fedpfl.ground.checks import build_dataclass
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.identity import identity
from fedpfl.ground.tasks import TASKS, Task, require_classification
from fedpfl.methods import METHODS, SEES, Method
from fedpfl.privacy import PRIVACIES, Privacy, SamplePrivacy
from fedpfl.record.loggers import make_loggers
from fedpfl.robust import ATTACKS, DEFENCES, Attack, Defence
from fedpfl.system import SYSTEMS, System


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


def check_config(cfg: DictConfig) -> Plan:
    """Check the whole configuration. Raises FedpflError, about the key that the user set."""
    try:
        return _make_plan(resolve_config(cfg))
    except FedpflError as error:
        raise FedpflError(name_source_key(str(error), cfg)) from None


def _make_plan(config: dict[str, Any]) -> Plan:
    """Check a resolved configuration, group by group."""
    # ---- Step 1: what is needed to read the rest, above all plugins.
    _require_known_groups(config)
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
    method = build_choice(config, "method", METHODS)
    if method.own_steps and not parts["local"].is_plain:
        choice = f"method={config['method']['name']}"
        raise FedpflError(engine.unused_optimizer_text(choice, parts["local"]))
    _require_fit_of_task(config, settings, parts, method)
    _require_fit_of_shift(parts["shift"], settings)
    for group in OPTION_READERS:
        read_options(config, group)
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


def _require_known_groups(config: Mapping[str, Any]) -> None:
    """Raise FedpflError for a key of the run that is none."""
    known_keys = (*SETTINGS, *GROUPS)
    for key in config:
        # Without that line Hydra lays the file's keys below its group.
        if key in NESTED_GROUPS:
            raise FedpflError(
                f"{key}: its file must begin with the line # @package _global_, for its keys to be"
                " those of the run"
            )
        if key not in known_keys:
            raise FedpflError(f"{key} is not a key here; known keys: {', '.join(known_keys)}")


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


def _make_privacy(
    config: Mapping[str, Any], settings: Settings, method: Method, stopping: Stopping
) -> Privacy | SamplePrivacy | None:
    """Return how clients are protected, if they are.

    Raises:
        FedpflError: for what would give them away all the same.
    """
    privacy: Privacy | SamplePrivacy | None = build_choice(config, "privacy", PRIVACIES)
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


def _make_attack(config: Mapping[str, Any], evaluation: Eval) -> Attack | None:
    """Return what hostile clients do, if there are any."""
    attack: Attack | None = build_choice(config, "attack", ATTACKS)
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
    defence: Defence | None = build_choice(config, "defence", DEFENCES)
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


def _make_system(config: Mapping[str, Any], local: Local) -> System | None:
    """Return what devices clients have, if any."""
    system = build_choice(config, "system", SYSTEMS)
    if system and system.stragglers and system.least >= local.amount:
        raise FedpflError(
            f"system.least must be below what others train, {local.amount}, got {system.least}"
        )
    return system
