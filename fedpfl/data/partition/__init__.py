"""Who holds which samples. Each scheme is a pure function of labels, number of clients and seed.

Schemes return disjoint sets of indices (but for fixed_dirichlet and files, whose clients may share samples), at least
one training sample per client, and the client's own test split: of a client's n shuffled samples the first
`int(test_fraction * n)`, or samples of the data set's original test part, or what a file says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fedpfl.data.datasets import Samples
from fedpfl.data.partition.common import Index, Partition
from fedpfl.data.partition.file import file
from fedpfl.data.partition.parts import fixed_dirichlet, groups, shuffled_shards
from fedpfl.data.partition.skew import dirichlet, iid, published, shards

__all__ = [
    "SCHEMES",
    "Index",
    "Partition",
    "deal",
    "dirichlet",
    "file",
    "fixed_dirichlet",
    "groups",
    "iid",
    "published",
    "shards",
    "shuffled_shards",
]

SCHEMES: dict[str, Callable[..., Partition]] = {
    "dirichlet": dirichlet,
    "published": published,
    "iid": iid,
    "shards": shards,
    "groups": groups,
    "shuffled_shards": shuffled_shards,
    "fixed_dirichlet": fixed_dirichlet,
    "file": file,
}

GIVEN = ("y", "clients", "seed", "groups", "group_names", "test_from")
"""Arguments of schemes that are not chosen with them."""


def deal(scheme: Callable[..., Partition], samples: Samples, clients: int, seed: int, **options: Any) -> Partition:
    """Deal a data set's samples by a scheme, which is given what it asks for beside the labels."""
    facts = {
        "groups": None if samples.groups is None else samples.groups.numpy(),
        "group_names": samples.group_names,
        "test_from": samples.test_from,
    }
    asked = inspect.signature(scheme).parameters
    known = {key: value for key, value in facts.items() if key in asked}
    return scheme(samples.y.numpy(), clients, seed, **known, **options)
