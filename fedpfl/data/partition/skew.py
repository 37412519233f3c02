"""Schemes over labels alone: Dirichlet skew, the published split, equal parts, few classes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedpfl.data.partition.common import (
    Alpha,
    Generator,
    Indices,
    Partition,
    deal_by_proportions,
    deal_classes,
    deal_shards,
    indices_by_class,
    list_classes,
    require_enough_samples,
    split_clients,
)
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import Count, ProportionBelowOne


def dirichlet(
    y: np.ndarray,
    clients: int,
    seed: int,
    *,
    alpha: Alpha,
    min_samples: Count = 10,
    samples_per_client: Count | None = None,
    test_fraction: ProportionBelowOne = 0.25,
) -> Partition:
    """Skew labels by Dir(alpha), drawn once and repaired, so that it always ends.

    Each class is cut over the clients by d ~ Dir(alpha, ..., alpha) `[clients]` (Yurochkin et al.
    2019). Then each client below `min_samples`, in order, is filled up with random samples of
    whichever client is the largest.

    With `samples_per_client` each client instead draws class proportions p ~ Dir(alpha, ..., alpha)
    `[classes]` (as Hsu et al. 2019) and takes exactly that many samples by them, without
    replacement; where a class runs out, p is restricted to the classes left. `min_samples` then
    plays no part.

    Raises:
        FedpflError: If there are too few samples.
    """
    rng = np.random.default_rng(seed)
    if samples_per_client is not None:
        require_enough_samples(len(y), clients, "samples_per_client", samples_per_client)
        holdings = deal_by_proportions(y, [samples_per_client] * clients, alpha, rng)
        return split_clients(holdings, test_fraction, rng)

    require_enough_samples(len(y), clients, "min_samples", min_samples)
    holdings = _cut_classes(indices_by_class(y), clients, alpha, rng)
    for indices in holdings:
        rng.shuffle(indices)  # so that the tail, which a client may lose, is a random choice
    filled = sum(len(indices) < min_samples for indices in holdings)
    partition = split_clients(_fill_small_clients(holdings, min_samples), test_fraction, rng)
    # A few clients filled up change the skew little.
    if filled * 10 < clients:
        return partition
    note = (
        f"partition: {filled:,} of {clients:,} clients had fewer than min_samples={min_samples} by "
        f"Dir({alpha:g}) and were filled up from the largest ones: these clients are less skewed; "
        "lower clients or partition.min_samples"
    )
    return replace(partition, notes=(note,))


def published(
    y: np.ndarray,
    clients: int,
    seed: int,
    *,
    alpha: Alpha,
    min_samples: Count = 10,
    max_attempts: Count = 1000,
    test_fraction: ProportionBelowOne = 0.25,
) -> Partition:
    """Repeat the split of the published FedOBP numbers, index for index.

    It is drawn again until all clients have `min_samples`. One legacy NumPy stream (MT19937) serves
    everything, and the order to which a class was shuffled is carried over to the next attempt.
    Source: the authors' public code, a fork of FL-bench.

    Raises:
        FedpflError: If there are too few samples, and after `max_attempts` draws.
    """
    require_enough_samples(len(y), clients, "min_samples", min_samples)
    rng = np.random.RandomState(seed)
    classes = indices_by_class(y)
    for attempt in range(1, max_attempts + 1):
        holdings = _cut_classes(classes, clients, alpha, rng)
        if min(map(len, holdings)) >= min_samples:
            return split_clients(holdings, test_fraction, rng, attempt)
    raise FedpflError(
        f"partition=published found no split in {max_attempts} attempts in which each of "
        f"clients={clients} has partition.min_samples={min_samples} samples at "
        f"partition.alpha={alpha}; use partition=dirichlet, which always ends"
    )


def iid(
    y: np.ndarray,
    clients: int,
    seed: int,
    *,
    samples_per_client: Count | None = None,
    test_fraction: ProportionBelowOne = 0.25,
) -> Partition:
    """Cut a random permutation into parts of `samples_per_client`, or of nearly equal sizes.

    Without `samples_per_client` sizes differ by at most one.

    Raises:
        FedpflError: If there are too few samples.
    """
    if samples_per_client is not None:
        require_enough_samples(len(y), clients, "samples_per_client", samples_per_client)
    rng = np.random.default_rng(seed)
    total = len(y) if samples_per_client is None else clients * samples_per_client
    permutation = rng.permutation(len(y))[:total]
    return split_clients(np.array_split(permutation, clients), test_fraction, rng)


def shards(
    y: np.ndarray,
    clients: int,
    seed: int,
    *,
    classes_per_client: Count,
    samples_per_client: Count | None = None,
    test_fraction: ProportionBelowOne = 0.25,
) -> Partition:
    """Make the pathological split: each client holds a shard of `classes_per_client` classes.

    In order, each client takes the classes dealt least often so far, ties at random; so two classes
    differ by at most one shard, for any clients * classes_per_client. Then each class is cut into
    equal shards (McMahan et al. 2017 cut the sorted labels, where a client's shards may coincide in
    class; here they never do). A class without a client, which happens if clients *
    classes_per_client < classes, is left out. With `samples_per_client` each client keeps that
    many, as evenly over its shards as they allow.

    Raises:
        FedpflError: If a class or a client has too few samples.
    """
    rng = np.random.default_rng(seed)
    classes = list_classes(y, classes_per_client)
    if samples_per_client is not None:
        require_enough_samples(len(y), clients, "samples_per_client", samples_per_client)

    # ---- Step 1: each client takes the classes dealt least often so far, ties at random.
    client_classes = deal_classes(len(classes), clients, classes_per_client, rng)
    times_dealt = np.bincount(
        np.concatenate(client_classes),
        minlength=len(classes),
    )

    # ---- Step 2: each class is cut into as many shards.
    stacks: list[list[Indices]] = []
    for indices, shard_count in zip(classes, times_dealt, strict=True):
        if len(indices) < shard_count:
            raise FedpflError(
                f"partition=shards would cut class {y[indices[0]]} with {len(indices)} samples "
                f"into {shard_count} shards; lower clients or partition.classes_per_client"
            )
        rng.shuffle(indices)
        stacks.append(np.array_split(indices, shard_count) if shard_count else [])

    holdings = deal_shards(stacks, client_classes, samples_per_client)
    return split_clients(holdings, test_fraction, rng)


# ---- Steps of the schemes


def _cut_classes(
    classes: list[Indices], clients: int, alpha: float, rng: Generator
) -> list[Indices]:
    """Draw once: shuffle each class in place and cut it over the clients by Dir(alpha)."""
    pieces: list[list[Indices]] = [[] for _ in range(clients)]
    for indices in classes:
        rng.shuffle(indices)
        proportions = rng.dirichlet(np.full(clients, alpha))
        # The legacy generator underflows for tiny alpha; its limit is one client.
        if not np.isfinite(proportions).all():
            proportions = np.eye(clients)[rng.choice(clients)]
        cuts = (np.cumsum(proportions) * len(indices)).astype(int)[:-1]
        for client, piece in enumerate(np.split(indices, cuts)):
            pieces[client].append(piece)
    return [np.concatenate(client_pieces) for client_pieces in pieces]


def _fill_small_clients(holdings: list[Indices], minimum: int) -> list[Indices]:
    """Fill clients below `minimum` from the tail of whichever client is the largest.

    It ends: while one client is below the minimum, the mean is not (checked before), so the largest
    client is above it, and it never falls below it.
    """
    sizes = np.array([len(indices) for indices in holdings])
    for client in range(len(holdings)):
        while sizes[client] < minimum:
            donor = int(sizes.argmax())
            count = min(minimum - sizes[client], sizes[donor] - minimum)
            holdings[client] = np.concatenate([holdings[client], holdings[donor][-count:]])
            holdings[donor] = holdings[donor][:-count]
            sizes[client] += count
            sizes[donor] -= count
    return holdings
