"""Partitions: which client holds which samples.

Each scheme is a pure function of labels, number of clients and seed. Schemes return disjoint sets
of indices (but for fixed_dirichlet and files: their clients may share samples), at least one
training sample per client, and the client's own test split: of a client's n shuffled samples the
first `int(test_fraction * n)`, or samples of the data set's original test part, or as a file
says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fedpfl.data.datasets import Samples
from fedpfl.data.partition.common import Indices, Partition, check_partition, find_leaks
from fedpfl.data.partition.file import file
from fedpfl.data.partition.parts import fixed_dirichlet, groups, shuffled_shards
from fedpfl.data.partition.sizes import extended_dirichlet, quantity
from fedpfl.data.partition.skew import dirichlet, iid, published, shards
from fedpfl.data.partition.together import deal_units
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Values

__all__ = [
    "SCHEMES",
    "SUPPLIED_ARGUMENTS",
    "Indices",
    "Partition",
    "call_scheme",
    "check_partition",
    "deal_samples",
    "deals_by_class",
]

SCHEMES: dict[str, Callable[..., Partition]] = {
    scheme.__name__: scheme
    for scheme in (
        dirichlet,
        published,
        iid,
        shards,
        quantity,
        extended_dirichlet,
        groups,
        shuffled_shards,
        fixed_dirichlet,
        file,
    )
}
SUPPLIED_ARGUMENTS = ("y", "clients", "seed", "groups", "group_names", "test_from")
"""Arguments of schemes that are no configuration keys."""

DEALING_BY_CLASS = (
    dirichlet,
    published,
    shards,
    extended_dirichlet,
    shuffled_shards,
    fixed_dirichlet,
)


def deals_by_class(scheme: str | None, options: Values) -> bool:
    """Return True for a scheme that goes by the classes of samples."""
    # `quantity` does with alpha.
    is_skewed = scheme == "quantity" and options.get("alpha") is not None
    return is_skewed or SCHEMES.get(scheme or "") in DEALING_BY_CLASS


def deal_samples(
    scheme: Callable[..., Partition], samples: Samples, clients: int, seed: int, **options: Any
) -> Partition:
    """Distribute a data set's samples by a scheme, and check the partition.

    Args:
        scheme: One of SCHEMES, or a plugin's.
        samples: The data set.
        clients: Number of clients.
        seed: Of the partition.
        options: The scheme's configuration.

    Raises:
        FedpflError: If there are too few samples, or the partition breaks a rule.
    """

    def deal(some_samples: Samples) -> Partition:
        return call_scheme(scheme, some_samples, clients, seed, **options)

    is_by_unit = samples.units is not None and scheme is not file
    partition = deal_units(deal, samples) if is_by_unit else deal(samples)
    choice = "partition.path" if scheme is file else f"partition={scheme.__name__}"
    check_partition(partition, clients, len(samples.y), choice, options.get("path"))
    leaks = () if samples.units is None else find_leaks(partition, samples.units.numpy())
    if len(leaks):
        raise FedpflError(
            f"partition.together: {len(leaks)} units of the file are for training and for testing "
            "or validation too; deal them together"
        )
    return partition


def call_scheme(
    scheme: Callable[..., Partition], samples: Samples, clients: int, seed: int, **options: Any
) -> Partition:
    """Return a scheme's answer, not yet checked."""
    # Labels and groups are copies, as a plugin's scheme might change them in place.
    facts = {
        "groups": None if samples.groups is None else samples.groups.numpy().copy(),
        "group_names": samples.group_names,
        "test_from": samples.test_from,
    }
    # A scheme is given the facts that it has arguments for.
    for key in facts.keys() & inspect.signature(scheme).parameters.keys():
        options[key] = facts[key]
    return scheme(samples.y.numpy().copy(), clients, seed, **options)
