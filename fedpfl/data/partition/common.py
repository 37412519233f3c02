"""Shared by the schemes: the Partition they return, types of options, checks, and steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import Above, AtMost
from fedpfl.ground.records import Record

SPLITS = ("train", "test", "validation")
Indices = np.ndarray  # int64 [samples of one client]
Generator = np.random.Generator | np.random.RandomState
Alpha = Annotated[float, Above(0), AtMost(10**6)]  # iid is the limit of large alpha


@dataclass(frozen=True, eq=False)
class Partition:
    """Sample indices of each client, int64.

    Attributes:
        train: Each client's training samples.
        test: Each client's test samples.
        attempts: Draws that the published scheme needed.
        validation: Each client's validation samples, where a file holds samples out; else empty.
        notes: Lines for the user about the partition.
        client_names: The clients' names, such as those of sites or writers.
    """

    train: tuple[Indices, ...]
    test: tuple[Indices, ...]
    attempts: int = 1
    validation: tuple[Indices, ...] = ()
    notes: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()


def indices_by_class(y: np.ndarray) -> list[Indices]:
    """Return the indices of each class, ascending."""
    order = np.argsort(y, kind="stable")
    return np.split(order, np.cumsum(np.bincount(y))[:-1])


def list_classes(y: np.ndarray, classes_per_client: int) -> list[Indices]:
    """List the indices of each class that has samples.

    Raises:
        FedpflError: There are fewer than a client is to have.
    """
    classes = [indices for indices in indices_by_class(y) if len(indices)]
    if classes_per_client > len(classes):
        raise FedpflError(
            f"partition.classes_per_client must be at most the number of classes, {len(classes)}, "
            f"got {classes_per_client}"
        )
    return classes


def trim_shards(shards: list[Indices], samples: int, client: int, key: str) -> list[Indices]:
    """Return the beginnings of a client's shards, of sizes as equal as the shards allow.

    Args:
        shards: The client's shards.
        samples: The sum of the sizes that are returned.
        client: The client, for an error.
        key: The option with this number of samples, for an error.

    Raises:
        FedpflError: If the shards hold fewer samples.
    """
    sizes = np.array([len(shard) for shard in shards])
    if sizes.sum() < samples:
        raise FedpflError(
            f"partition.{key}={samples} is more than the {sizes.sum()} samples in the shards of "
            f"client {client}; lower it, or lower clients"
        )
    new_sizes = np.zeros_like(sizes)
    # From the smallest shard on: larger ones make up for a small one.
    for position, shard in enumerate(np.argsort(sizes, kind="stable")):
        shards_left = len(shards) - position
        equal_part = -(-(samples - new_sizes.sum()) // shards_left)  # rounded up
        new_sizes[shard] = min(sizes[shard], equal_part)
    return [shard[:size] for shard, size in zip(shards, new_sizes, strict=True)]


def deal_classes(
    classes: int, clients: int, classes_per_client: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Deal each client different classes, those dealt least often first and ties at random."""
    times_dealt = np.zeros(classes, np.int64)
    client_classes = []
    for _ in range(clients):
        tie_break = rng.random(classes)
        dealt_classes = np.lexsort((tie_break, times_dealt))[:classes_per_client]
        times_dealt[dealt_classes] += 1
        client_classes.append(dealt_classes)
    return client_classes


def deal_shards(
    stacks: list[list[Indices]],
    client_classes: Iterable[np.ndarray],
    samples: int | None,
    key: str = "samples_per_client",
) -> list[Indices]:
    """Give each client a shard of each of its classes.

    Args:
        stacks: The shards of each class, which are used up.
        client_classes: The classes of each client.
        samples: How many samples a client keeps; None: all of its shards.
        key: The option with this number, for an error.
    """
    clients = []
    for client, labels in enumerate(client_classes):
        shards = [stacks[label].pop() for label in labels]
        if samples:
            shards = trim_shards(shards, samples, client, key)
        clients.append(np.concatenate(shards))
    return clients


def deal_by_proportions(
    y: np.ndarray, sizes: Sequence[int], alpha: float, rng: np.random.Generator
) -> list[Indices]:
    """Deal each client so many samples by its class proportions ~ Dir(alpha).

    The proportions are restricted to the classes that have samples left.
    """
    classes = indices_by_class(y)
    for indices in classes:
        rng.shuffle(indices)
    remaining = np.array([len(indices) for indices in classes])
    holdings = []
    for needed in sizes:
        proportions = rng.dirichlet(np.full(len(classes), alpha))
        pieces = []
        # Each pass but the first has exhausted a class, so there are at most `classes` passes.
        while needed:
            proportions = np.where(remaining > 0, proportions, 0.0)
            if proportions.sum() <= 0:
                # Those left have no share in the draw: they are taken by how many there are.
                proportions = remaining.astype(float)
            drawn_counts = rng.multinomial(needed, proportions / proportions.sum())
            counts = np.minimum(drawn_counts, remaining)
            for label in np.flatnonzero(counts):
                stop = remaining[label]
                pieces.append(classes[label][stop - counts[label] : stop])
            remaining -= counts
            needed -= int(counts.sum())
        holdings.append(np.concatenate(pieces))
    return holdings


def make_site_generator(seed: int, *keys: int, name: str) -> np.random.Generator:
    """Make the generator of one site, which no other site changes."""
    return np.random.default_rng([seed, *keys, int.from_bytes(name.encode(), "big")])


def split_clients(
    clients: Sequence[Indices],
    test_fraction: float,
    rng: Generator | Sequence[Generator],
    attempts: int = 1,
) -> Partition:
    """Shuffle each client's n samples; the first `int(test_fraction * n)` are its test split.

    Args:
        clients: Samples of each client.
        test_fraction: Share of the test split.
        rng: For all clients, or one for each.
        attempts: Draws that the scheme needed.
    """
    train = []
    test = []
    generators = rng if isinstance(rng, Sequence) else [rng] * len(clients)
    for indices, generator in zip(clients, generators, strict=True):
        generator.shuffle(indices)
        test_size = int(test_fraction * len(indices))
        test.append(indices[:test_size].astype(np.int64))
        train.append(indices[test_size:].astype(np.int64))
    return Partition(tuple(train), tuple(test), attempts)


def require_enough_samples(samples: int, clients: int, key: str, per_client: int) -> None:
    """Raise FedpflError if there are fewer than `per_client` samples for all clients.

    Args:
        samples: Of the data set.
        clients: Number of clients.
        key: The option that says `per_client`.
        per_client: How many samples each client needs.
    """
    if clients * per_client > samples:
        raise FedpflError(
            f"clients={clients} with partition.{key}={per_client} need {clients * per_client} "
            f"samples, the data set has {samples}; lower one of them"
        )


def check_partition(
    partition: Partition, clients: int, samples: int, choice: str, path: object = None
) -> None:
    """Raise FedpflError for a malformed partition, or one that tests on training samples.

    Args:
        partition: A scheme's answer, of any type.
        clients: Number of clients.
        samples: Number of samples of the data set.
        choice: The user's choice of the scheme, such as `partition=iid`.
        path: The file that the partition is from, if any.
    """
    # ---- Step 1: an answer and, if any has one, a name for each client.
    splits: Record = {name: getattr(partition, name, None) for name in SPLITS}
    if not all(isinstance(split, tuple | list) for split in splits.values()):
        raise FedpflError(
            f"{choice} must answer with a fedpfl.data.partition.Partition, "
            f"got {type(partition).__name__}"
        )
    names = partition.client_names
    for values in (partition.train, partition.test, partition.validation or names, names):
        if len(values) != clients and (values or values is partition.test):
            raise FedpflError(
                f"clients must be {len(values)}, as {path or choice} deals to so many, "
                f"got {clients}"
            )
    for name in names:
        if not isinstance(name, str) or not name.isprintable() or names.count(name) > 1:
            raise FedpflError(f"{choice}: client {name!r} needs a printable name of its own")

    # ---- Step 2: the indices of each client, which are not for training and testing too.
    origin = f" of {path}" if path else ""
    for split_name, split in splits.items():
        for client, indices in enumerate(split):
            _check_client(indices, split_name, samples, f"{choice}: client {client}{origin}")
    leaks = find_leaks(partition, np.arange(samples))
    if len(leaks):
        raise FedpflError(
            f"{choice}: sample {leaks[0]}{origin} is for training and for testing or validation "
            "too; deal it to one of them"
        )


def find_leaks(partition: Partition, keys: np.ndarray) -> np.ndarray:
    """Find keys of samples that stand on both sides of a split."""
    test_samples = np.concatenate([*partition.test, *partition.validation]).astype(np.int64)
    return np.intersect1d(keys[np.concatenate(partition.train)], keys[test_samples])


def _check_client(indices: Any, split_name: str, samples: int, holder: str) -> None:
    """Raise FedpflError for a client's split that is no array of different samples."""
    is_array = isinstance(indices, np.ndarray) and indices.ndim == 1
    if not is_array or (indices.size and indices.dtype.kind not in "iu"):
        raise FedpflError(f"{holder} has {split_name} samples that are no array of whole numbers")
    if not indices.size and split_name == "train":
        raise FedpflError(f"{holder} has no training samples; deal it some, or leave it out")
    absent_samples = indices[(indices < 0) | (indices >= samples)]
    if len(absent_samples):
        raise FedpflError(
            f"{holder} has sample {absent_samples[0]}, and the data set has {samples}; "
            "it was made for another one"
        )
    if len(np.unique(indices)) < len(indices):
        raise FedpflError(f"{holder} has a {split_name} sample twice")
