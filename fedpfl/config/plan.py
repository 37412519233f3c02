"""The plan: a configuration checked as a whole, before data are read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from omegaconf import DictConfig

from fedpfl import engine
from fedpfl.config import plugins
from fedpfl.config.choices import GROUPS
from fedpfl.config.group_options import (
    LONE_GROUPS,
    Choice,
    read_dataset,
    read_group,
    read_loggers,
)
from fedpfl.config.messages import name_source_key
from fedpfl.config.resolution import resolve_config
from fedpfl.config.schema import Checkpoint, Eval, Settings
from fedpfl.data import Augment, Shift, partition
from fedpfl.engine import Engine, Local, Stopping, Store
from fedpfl.engine.backends.selection import find_device
from fedpfl.ground.checks import build_dataclass
from fedpfl.ground.errors import FedpflError, choices_text
from fedpfl.ground.identity import identity
from fedpfl.ground.records import Record
from fedpfl.ground.tasks import SURVIVAL, TASKS, Task, require_classification
from fedpfl.methods import SEES, Method
from fedpfl.models import Mixed
from fedpfl.privacy import Privacy, SamplePrivacy
from fedpfl.record.columns import METRICS
from fedpfl.record.loggers import make_loggers
from fedpfl.robust import Attack, Defence
from fedpfl.system import System


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
    dataset: Choice
    partition: Choice
    model: Choice
    adapter: Choice
    loggers: Record
    config: Record
    identity: str

    @property
    def task(self) -> Task:
        """Return the task of the labels."""
        return TASKS[self.settings.task]

    @property
    def mixed_model(self) -> Mixed | None:
        """Return clients' networks of different kinds, None where they have one."""
        is_mixed = self.model.name == "mixed"
        return build_dataclass(Mixed, self.model.options, "model") if is_mixed else None


def check_config(cfg: DictConfig) -> Plan:
    """Check the whole configuration. Raises FedpflError, about the key that the user set."""
    try:
        config = resolve_config(cfg)
        plan = _make_plan(config)
    except FedpflError as error:
        raise FedpflError(name_source_key(str(error), cfg)) from None
    return plan


def _make_plan(config: Record) -> Plan:
    """Check a resolved configuration, group by group."""
    # ---- Step 1: plugins, which add choices.
    settings = read_group("", {key: config[key] for key in config if key not in GROUPS})
    plugin_files = plugins.load_plugins(settings.plugins)
    config["plugins"] = plugin_files
    # A pooled measure has the option of the measure.
    measures = [metric.name for metric in METRICS.values() if metric.option == metric.name]
    for name in settings.metrics:
        if name not in measures:
            raise FedpflError(f"metrics must be some of: {choices_text(measures, name)}")
    # These are for this command, not for a later run of the same configuration.
    config["restart"] = False
    config["extend"] = ""

    # ---- Step 2: groups by themselves.
    parts = {group: read_group(group, config[group]) for group in LONE_GROUPS}
    parts["dataset"] = read_dataset(config)
    device = find_device(settings.device)
    engine.require_supported(parts["engine"], device)
    loggers = read_loggers(config["logger"])
    make_loggers(loggers)  # raises for one that cannot work
    plan = Plan(
        settings=replace(settings, plugins=tuple(plugin_files)),
        **parts,
        device=device,
        loggers=loggers,
        config=config,
        identity=identity(config),
    )

    # ---- Step 3: groups that do not go together.
    _ = plan.mixed_model  # raises for a network's own mistakes
    _require_fit_of_task(plan)
    _require_fit_of_privacy(plan)
    for is_excluded, message in (*_list_exclusions(plan), *_list_exclusions_of_defence(plan)):
        if is_excluded:
            raise FedpflError(message)
    return plan


def _require_fit_of_task(plan: Plan) -> None:
    """Raise FedpflError for a choice that is about classes, in a task without any."""
    config, shift = plan.config, plan.shift
    if plan.method.needs_classes:
        name = f"method={config['method']['name']}"
        require_classification(plan.task, name, plan.method.needs_classes)
    scheme = config["partition"].get("name")
    has_measures = all(plan.task.name in METRICS[name].tasks for name in plan.settings.metrics)
    choices = {
        f"metrics=[{','.join(plan.settings.metrics)}]": not has_measures,
        "eval.classes=own": plan.eval.classes == "own",
        "eval.common=true": plan.eval.common,
        "shift.label_permutation=true": shift.label_permutation,
        "shift.label_noise": shift.label_noise > 0,
        "shift.imbalance": shift.imbalance > 1,
        f"partition={scheme}": partition.deals_by_class(scheme, config["partition"]),
    }
    for choice, is_chosen in choices.items():
        if is_chosen:
            require_classification(plan.task, choice, "it is about classes; choose another")


def _list_exclusions(plan: Plan) -> list[tuple[bool, str]]:
    """Return pairs of choices that exclude each other: if both are chosen, and the message."""
    settings, local, shift, system = plan.settings, plan.local, plan.shift, plan.system
    method_choice = f"method={plan.config['method']['name']}"
    of_clients = {
        "privacy": plan.privacy,
        "attack": plan.attack,
        "defence": plan.defence,
        "system": plan.system,
        "stopping.early": plan.stopping.early or None,
    }
    is_about_clients = plan.method.pools_samples and any(of_clients.values())
    chosen = ", ".join(group for group, value in of_clients.items() if value)
    is_survival = plan.task is SURVIVAL
    return [
        (
            is_survival and isinstance(plan.privacy, SamplePrivacy),
            "privacy=sample clips gradients of single samples, and task=survival compares samples",
        ),
        (
            plan.eval.horizon is not None and not is_survival,
            "eval.horizon is for task=survival; leave it out",
        ),
        (
            is_about_clients,
            f"{method_choice} trains on the samples of all clients together, and {chosen} is about"
            " clients that keep theirs; leave it out",
        ),
        (
            plan.method.own_steps and not local.is_plain,
            engine.unused_optimizer_text(method_choice, local),
        ),
        (
            bool(shift) and shift.by == "cluster" and shift.clusters > settings.clients,
            f"shift.clusters must be at most clients={settings.clients}, got {shift.clusters}",
        ),
        (
            bool(shift.at) and shift.at[-1] >= settings.rounds,
            f"shift.at must be rounds before the last, {settings.rounds}, got {list(shift.at)}",
        ),
        (
            bool(system and system.stragglers and system.least >= local.amount),
            f"system.least must be below local training, {local.amount}",
        ),
        (
            plan.attack is not None and plan.eval.common,
            "eval.common=true evaluates on the test samples of all clients, an attack on those of"
            " honest clients alone; leave one of them out",
        ),
    ]


def _list_exclusions_of_defence(plan: Plan) -> list[tuple[bool, str]]:
    """Return choices that exclude the defence: if they are chosen, and the message."""
    defence = plan.defence
    if defence is None:
        return []
    choice = f"defence={plan.config['defence']['name']}"
    may_lack_uploads = (
        f"{choice} needs {defence.least_clients} uploads in every round, and a round with"
        " system=simulated or stopping.early may have fewer; use defence=median"
    )
    needs_several = defence.least_clients > 1
    return [
        (
            plan.method.server_sees != SEES[0],
            f"{choice} replaces a mean of uploads, and the server of"
            f" method={plan.config['method']['name']} sees more; use defence=mean",
        ),
        (
            # The noise suffices for a mean; one upload may move a robust aggregate by more.
            isinstance(plan.privacy, Privacy),
            f"{choice}: privacy=client accounts for a mean of uploads alone; use defence=mean",
        ),
        (needs_several and plan.system is not None, may_lack_uploads),
        (needs_several and plan.stopping.early, may_lack_uploads),
    ]


def _require_fit_of_privacy(plan: Plan) -> None:
    """Raise FedpflError for choices that would give clients away."""
    privacy = plan.privacy
    if privacy is None:
        return
    choice = f"privacy={privacy.hides}"
    chosen_by_samples = {
        "stopping.early=false": plan.stopping.early,
        "validation=0": plan.settings.validation > 0,
        # No account is kept of clients that drop out or come late.
        "system=none": plan.system is not None,
    }
    for needed_choice, is_missing in chosen_by_samples.items():
        if is_missing:
            raise FedpflError(f"{choice} accounts for uploads alone; use {needed_choice}")
    if isinstance(privacy, SamplePrivacy):
        return

    # ---- The server must see the noised mean alone, and the noise must suffice.
    choice += f" and method={plan.config['method']['name']}"
    if plan.method.server_sees != SEES[0]:
        raise FedpflError(
            f"{choice}: its server sees {plan.method.server_sees}, and only a {SEES[0]} is protected"
        )
    if privacy.sampling == "poisson" and type(plan.method).aggregate is not Method.aggregate:
        raise FedpflError(
            f"{choice}: its server may use the number of clients, which"
            " privacy.sampling=poisson hides; use fixed"
        )
    privacy.check_clients(plan.settings.clients - plan.settings.newcomers)
