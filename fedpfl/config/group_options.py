"""What takes the keys of configuration groups, and the groups as it makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedpfl.config.choices import GROUPS, OPTIONAL_GROUPS
from fedpfl.config.schema import SCHEMAS, AdapterOptions, ModelOptions, PartitionOptions, Settings
from fedpfl.data import datasets, partition
from fedpfl.ground.checks import build_dataclass, checked_arguments
from fedpfl.ground.errors import FedpflError, choices_text
from fedpfl.ground.records import Record, Values
from fedpfl.methods import METHODS
from fedpfl.models import ADAPTERS, MODELS
from fedpfl.privacy import PRIVACIES
from fedpfl.record.mlflow_logger import MlflowOptions
from fedpfl.record.wandb_logger import WandbOptions
from fedpfl.robust import ATTACKS, DEFENCES
from fedpfl.system import SYSTEMS


@dataclass(frozen=True)
class Choice:
    """Hold the choice of a group and its checked options.

    Attributes:
        name: Of the network, adapter, data set or partition.
        options: Its arguments and the group's common ones.
    """

    name: str
    options: Record


@dataclass(frozen=True)
class NoKeys:
    """Stand for a choice without keys."""


@dataclass(frozen=True)
class Group:
    """Describe the keys of a group.

    Attributes:
        common: Classes or functions that take keys of all choices.
        registry: Those that take a choice's own keys, by name; empty without a choice.
        supplied: Arguments that are no keys.
        is_built: Whether its keys are all that it takes.
    """

    common: tuple[Callable[..., Any], ...] = ()
    registry: Values = field(default_factory=dict)
    supplied: tuple[str, ...] = ()
    is_built: bool = True


READ_GROUPS = {
    "": Group((Settings,)),
    **{group: Group((schema,)) for group, schema in SCHEMAS.items()},
    "method": Group(registry=METHODS),
    "privacy": Group(registry=PRIVACIES),
    "attack": Group(registry=ATTACKS),
    "defence": Group(registry=DEFENCES),
    "system": Group(registry=SYSTEMS),
    "model": Group((ModelOptions,), MODELS, ("shape", "classes"), is_built=False),
    "adapter": Group((AdapterOptions,), ADAPTERS, ("module", "head", "seed"), is_built=False),
    "partition": Group(
        (PartitionOptions,),
        partition.SCHEMES,
        tuple(key for key in partition.SUPPLIED_ARGUMENTS if key != "seed"),
        is_built=False,
    ),
    "logger": Group(registry={"none": NoKeys, "wandb": WandbOptions}),
    "logger.tensorboard": Group((NoKeys,)),
    "logger.mlflow": Group((MlflowOptions,)),
    "dataset": Group(
        (datasets.load_samples,),
        datasets.DATA_SETS,
        ("name", "data_dir", "options", "source", "task", "together"),
        is_built=False,
    ),
}
"""By name; the top level of the configuration is ""."""
LONE_GROUPS = [group for group in GROUPS if group not in (*OPTIONAL_GROUPS, "dataset", "logger")]
"""Groups that are read by themselves."""


def read_group(group: str, values: Any) -> Any:
    """Check the keys of a group, and build the object that they describe.

    Returns:
        An object; for a network, adapter, data set or partition, which takes more, a `Choice`.

    Raises:
        FedpflError: A name or key is unknown, or a value does not fit.
    """
    described = READ_GROUPS[group]
    takers = described.common
    name = ""
    if described.registry:
        values = {"name": None, **values} if isinstance(values, Mapping) else {"name": values}
        name = values.pop("name")
        if not isinstance(name, str) or name not in described.registry:
            raise FedpflError(
                f"{group}.name must be {choices_text(sorted(described.registry), name)}"
            )
        takers = (described.registry[name], *takers)
    # A user's class without `statistics` has what its base class has.
    if group == "method" and values.get("statistics") is None:
        values.pop("statistics", None)
    if described.is_built:
        return build_dataclass(takers[0], values, group)
    return Choice(name, checked_arguments(takers, values, group, described.supplied))


def read_dataset(config: Values) -> Choice:
    """Read the data set, with what other keys say of its samples. Raises as `read_group`."""
    choice = read_group("dataset", config["dataset"])
    choice.options["name"] = choice.name
    choice.options["task"] = config["task"]
    choice.options["together"] = config["partition"].get("together")
    return choice


def read_loggers(values: Values) -> Record:
    """Read the options of each logger, by name. Raises as `read_group`.

    Those of W&B lie beside `name`, all else below the logger's name, so that `logger=[wandb,mlflow]`
    has both.
    """
    own_values = {"name": "none", **values}
    options: Record = {}
    for name in ("mlflow", "tensorboard"):
        if name in own_values:
            options[name] = read_group(f"logger.{name}", own_values.pop(name))
    wandb_options = read_group("logger", own_values)
    if own_values["name"] == "wandb":
        options["wandb"] = wandb_options
    return options
