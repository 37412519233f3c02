"""Deal samples by one of Flower's partitioners."""

from __future__ import annotations

import inspect
import io
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from typing import Any

import numpy as np

from fedpfl.data.datasets.shared.hub import import_without_draws
from fedpfl.data.partition.common import Fraction, Partition, split_clients
from fedpfl.ground.errors import FedpflError, choices_text, error_text, missing_extra

LABEL, GROUP, INDEX = "label", "group", "index"  # columns that a partitioner sees
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
        arguments: Arguments of the class; None stands for an absent one.
        test_fraction: Share of each client's samples for testing.

    Raises:
        FedpflError: There is no such class or argument, or it refuses these data.
    """
    partitioner_class = _find_partitioner(partitioner)
    settings = _make_settings(partitioner_class, arguments or {}, clients, seed)
    holdings = []
    # The library's warnings and progress bars would stand between the lines of a run.
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            instance = partitioner_class(**settings)
            instance.dataset = _make_table(y, groups)
            for client in range(instance.num_partitions):
                rows = list(instance.load_partition(client)[INDEX])
                holdings.append(np.array(rows, dtype=np.int64))
        except Exception as error:  # the library raises many kinds
            raise FedpflError(
                f"partition=flower: {partitioner} refuses partition.arguments for {clients} "
                f"clients: {error_text(error, with_class=True)}"
            ) from None
    partition = split_clients(holdings, test_fraction, np.random.default_rng(seed))
    # Only partitioners by natural ids have such a mapping.
    natural_ids = getattr(instance, "partition_id_to_natural_id", None)
    if not natural_ids or not group_names or settings["partition_by"] != GROUP:
        return partition
    names = tuple(group_names[natural_ids[client]] for client in sorted(natural_ids))
    return replace(partition, client_names=names)


def _make_settings(
    partitioner: Any, arguments: dict[str, Any], clients: int, seed: int
) -> dict[str, Any]:
    """Return a partitioner's arguments, with the run's clients and seed."""
    parameters = inspect.signature(partitioner).parameters
    settings = {key: value for key, value in arguments.items() if value is not None}
    by = GROUP if "NaturalId" in partitioner.__name__ else LABEL
    settings.setdefault("partition_by", by)
    supplied = {
        "num_partitions": clients,
        "seed": seed,
        "partition_by": settings.pop("partition_by"),
    }
    settings |= {key: value for key, value in supplied.items() if key in parameters}
    if "distribution_array" in settings:
        # The configuration has lists, and the library wants an array.
        settings["distribution_array"] = np.array(settings["distribution_array"])
    return settings


def _find_partitioner(name: str) -> Callable[..., Any]:
    """Return a class of the library. Raises FedpflError where it is absent."""
    try:
        partitioner = import_without_draws("flwr_datasets.partitioner")
    except ImportError:
        raise missing_extra(
            "partition=flower needs a package that is not installed", "flwr-datasets"
        ) from None
    # Left out are the base class, one that takes a function, and those that deal columns.
    usable_names = [
        class_name
        for class_name in partitioner.__all__
        if class_name not in UNUSABLE and not class_name.startswith("Vertical")
    ]
    if name not in usable_names:
        raise FedpflError(f"partition.partitioner must be {choices_text(usable_names, name)}")
    return getattr(partitioner, name)


def _make_table(y: np.ndarray, groups: np.ndarray | None) -> Any:
    """Make the partitioner's data set, a row per sample."""
    import datasets

    columns = {LABEL: y, INDEX: np.arange(len(y))}
    if groups is not None:
        columns[GROUP] = groups
    return datasets.Dataset.from_dict(columns)
