"""Deal samples by one of Flower's partitioners."""

from __future__ import annotations

import inspect
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from typing import Any

import numpy as np

from fedpfl.data.datasets.shared.hub import import_without_draws
from fedpfl.data.partition.common import Fraction, Indices, Partition, split_clients
from fedpfl.ground.errors import FedpflError, choices_text, did_you_mean, error_text, missing_extra

LABEL, GROUP, INDEX = "label", "group", "index"  # columns that a partitioner sees
SUPPLIED_BY_RUN = {"num_partitions": "clients", "seed": "partition.seed"}
UNUSABLE = ("Partitioner", "IdToSizeFncPartitioner")


def flower(
    y: np.ndarray,
    clients: int,
    seed: int,
    *,
    groups: np.ndarray | None = None,
    group_names: Sequence[str] = (),
    partitioner: str = "IidPartitioner",
    arguments: dict | None = None,
    test_fraction: Fraction = 0.25,
) -> Partition:
    """Deal samples by a partitioner of flwr-datasets, row for row.

    The partitioner sees a data set of columns `label`, `group` (the number of a sample's group, if
    there are any) and `index`, and is given the number of clients and the seed where it takes them.

    Args:
        y: Labels.
        clients: Number of clients.
        seed: Of the partitioner, and of the split into training and test samples.
        groups: The group of each sample.
        group_names: Their names.
        partitioner: A class of `flwr_datasets.partitioner`.
        arguments: What it is made with; None stands for what is not given.
        test_fraction: Share of each client's samples for testing.

    Raises:
        FedpflError: There is no such class or argument, or it refuses these data.
    """
    # ---- Step 1: what the partitioner is told.
    partitioner_class = _find_partitioner(partitioner)
    settings = {key: value for key, value in (arguments or {}).items() if value is not None}
    _require_arguments(partitioner, partitioner_class, settings)
    parameters = inspect.signature(partitioner_class).parameters
    for name, value in (("num_partitions", clients), ("seed", seed)):
        if name in parameters:
            settings[name] = value
    if "partition_by" in parameters:
        is_natural = "NaturalId" in partitioner
        settings.setdefault("partition_by", GROUP if is_natural else LABEL)
        _require_column(partitioner, settings["partition_by"], groups)
    if "distribution_array" in settings:
        # The configuration has lists, and the library wants an array.
        settings["distribution_array"] = np.array(settings["distribution_array"])

    # ---- Step 2: it deals rows of a table of labels and groups.
    try:
        instance, holdings = _deal_rows(
            partitioner_class,
            settings,
            _make_table(y, groups),
        )
    except Exception as error:  # whatever the library raises for these arguments
        raise FedpflError(
            f"partition=flower: {partitioner} refuses partition.arguments for {clients} clients: "
            f"{error_text(error, with_class=True)}"
        ) from None

    # ---- Step 3: each client's rows, split.
    _require_clients(partitioner, holdings, clients)
    partition = split_clients(holdings, test_fraction, np.random.default_rng(seed))
    return replace(partition, client_names=_name_clients(instance, settings, group_names))


def _deal_rows(
    partitioner_class: Callable[..., Any], arguments: Mapping[str, Any], table: Any
) -> tuple[Any, list[Indices]]:
    """Return a partitioner that has dealt, and the rows of each client in its order."""
    # The library's warnings and progress bars would stand between the lines of a run.
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        instance = partitioner_class(**arguments)
        instance.dataset = table
        holdings = []
        for client in range(instance.num_partitions):
            rows = list(instance.load_partition(client)[INDEX])
            holdings.append(np.array(rows, dtype=np.int64))
    return instance, holdings


def _require_clients(name: str, holdings: Sequence[Indices], clients: int) -> None:
    """Raise FedpflError for another number of clients, or one without samples."""
    if len(holdings) != clients:
        raise FedpflError(
            f"clients must be {len(holdings)}, as partition=flower with {name} deals to so many, "
            f"got {clients}"
        )
    for client, indices in enumerate(holdings):
        if not len(indices):
            raise FedpflError(
                f"partition=flower: {name} gives client {client} of {clients} no sample; lower "
                "clients, or change partition.arguments"
            )


def _find_partitioner(name: str) -> Callable[..., Any]:
    """Return a class of the library. Raises FedpflError where it is absent."""
    try:
        partitioner = import_without_draws("flwr_datasets.partitioner")
    except ImportError:
        raise missing_extra(
            "partition=flower needs a package that is not installed", "flwr-datasets"
        ) from None
    # What is left out is the base class, what takes a function, and what deals columns.
    usable_names = [
        class_name
        for class_name in partitioner.__all__
        if class_name not in UNUSABLE and not class_name.startswith("Vertical")
    ]
    if name.startswith("Vertical") and name in partitioner.__all__:
        raise FedpflError(
            f"partition.partitioner={name} deals columns, and clients here hold samples; choose "
            "another"
        )
    if name not in usable_names:
        raise FedpflError(f"partition.partitioner must be {choices_text(usable_names, name)}")
    return getattr(partitioner, name)


def _require_arguments(
    name: str, partitioner_class: Callable[..., Any], arguments: Mapping[str, Any]
) -> None:
    """Raise FedpflError for an argument that the class does not have, or lacks."""
    parameters = inspect.signature(partitioner_class).parameters
    for key in arguments:
        if key in SUPPLIED_BY_RUN:
            raise FedpflError(
                f"partition.arguments.{key} is {SUPPLIED_BY_RUN[key]} here; set that, and "
                "leave it out"
            )
        if key not in parameters:
            names = [parameter for parameter in parameters if parameter not in SUPPLIED_BY_RUN]
            suggestion = did_you_mean(str(key), names)
            raise FedpflError(
                f"partition.arguments.{key} is no argument of {name}, which has "
                f"{', '.join(names) or 'none to set'}{suggestion}"
            )
    supplied = {*SUPPLIED_BY_RUN, "partition_by"}
    for key, parameter in parameters.items():
        is_required = parameter.default is parameter.empty and key not in supplied
        if is_required and key not in arguments:
            raise FedpflError(f"{name} needs partition.arguments.{key}=...")


def _require_column(name: str, column: Any, groups: np.ndarray | None) -> None:
    """Raise FedpflError for a column that the data set does not have."""
    if column == GROUP and groups is None:
        raise FedpflError(
            f"partition=flower: {name} deals by groups, and the samples of this data set have "
            "none; choose another, or set partition.arguments.partition_by=label"
        )
    if column not in (LABEL, GROUP):
        raise FedpflError(
            f"partition.arguments.partition_by must be label or group, got {column!r}"
        )


def _make_table(y: np.ndarray, groups: np.ndarray | None) -> Any:
    """Return what a partitioner deals: a row per sample."""
    import datasets

    columns = {LABEL: y, INDEX: np.arange(len(y))}
    if groups is not None:
        columns[GROUP] = groups
    return datasets.Dataset.from_dict(columns)


def _name_clients(
    instance: Any, arguments: Mapping[str, Any], group_names: Sequence[str]
) -> tuple[str, ...]:
    """Return the groups' names where each client is one group, else nothing."""
    # Only partitioners by natural ids have such a mapping.
    natural_ids = getattr(instance, "partition_id_to_natural_id", None)
    if not natural_ids or not group_names or arguments["partition_by"] != GROUP:
        return ()
    return tuple(group_names[natural_ids[client]] for client in sorted(natural_ids))
