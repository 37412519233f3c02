"""The choices of configuration groups with their checked keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedpfl.config.schema import ModelOptions, PartitionOptions
from fedpfl.data import datasets, partition
from fedpfl.ground.checks import build_dataclass, checked_arguments, look_up_choice, without_name
from fedpfl.models import ADAPTERS, MODELS


def build_choice(config: Mapping[str, Any], group: str, choices: Mapping[str, Any]) -> Any:
    """Build the choice of a configuration group from the group's other keys."""
    values = config[group]
    schema = look_up_choice(group, values, choices)
    options = without_name(values)
    return build_dataclass(schema, options, group)


def read_model_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the network's options."""
    network = look_up_choice("model", config["model"], MODELS)
    return checked_arguments(
        (network, ModelOptions),
        without_name(config["model"]),
        "model",
        provided_elsewhere=("shape", "classes"),
    )


def read_adapter_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the adapter's options."""
    adapter = look_up_choice("adapter", config["adapter"], ADAPTERS)
    return checked_arguments(
        (adapter,),
        without_name(config["adapter"]),
        "adapter",
        provided_elsewhere=("module", "head", "seed"),
    )


def read_partition_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scheme's options, and the seed if it is not the run's."""
    scheme = look_up_choice("partition", config["partition"], partition.SCHEMES)
    supplied_arguments = tuple(key for key in partition.SUPPLIED_ARGUMENTS if key != "seed")
    return checked_arguments(
        (scheme, PartitionOptions),
        without_name(config["partition"]),
        "partition",
        provided_elsewhere=supplied_arguments,
    )


def read_dataset_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data set's options."""
    reader = look_up_choice("dataset", config["dataset"], datasets.DATA_SETS)
    options = checked_arguments(
        (datasets.load_samples, reader),
        config["dataset"],
        "dataset",
        provided_elsewhere=("data_dir", "options", "source", "task", "together"),
    )
    together = config["partition"].get("together")
    return {**options, "task": config["task"], "together": together}


OPTION_READERS = {
    "model": read_model_options,
    "adapter": read_adapter_options,
    "partition": read_partition_options,
    "dataset": read_dataset_options,
}
"""By group, what checks and returns its options."""


def read_options(config: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Return the checked options of a model, adapter, data set or partition. Raises FedpflError."""
    return OPTION_READERS[group](config)
