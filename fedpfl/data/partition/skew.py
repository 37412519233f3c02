"""Schemes over labels alone: Dirichlet skew, the published split, equal parts, shards of few
classes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedpfl.data.partition.common import (
    Alpha,
    Fraction,
    Generator,
    Indices,
    Partition,
    PositiveInt,
    deal_shards,
    indices_by_class,
    require_enough_samples,
    split_clients,
)
from fedpfl.ground.errors import FedpflError


def dirichlet(
    y: np.ndarray,
    clients: int,
    seed: int,
    *,
    alpha: Alpha,
    min_samples: PositiveInt = 10,
    samples_per_client: PositiveInt | None = None,
    test_fraction: Fraction = 0.25,
) -> Partition:
    """Skew labels by Dir(alpha), drawn once and repaired, so that it always ends.

    Each class is cut over the clients by d ~ Dir(alpha, ..., alpha) `[clients]` (Yurochkin et al.
    2019). Then each client below `min_samples`, in order, is filled up with random samples of
    whichever client is the largest.

    With `samples_per_client` each client instead draws class proportions p ~ Dir(alpha, ..., alpha)
    `[classes]` (as Hsu et al. 2019) and takes exactly that many samples by them, without
    replacement; where a class runs out, p is restricted to the classes left. `min_samples` then
    plays no part.

    Raises: FedpflError if there are too few samples.
    """
    rng = np.random.default_rng(seed)
    if samples_per_client is not None:
        require_enough_samples(len(y), clients, "samples_per_client", samples_per_client)
        owned = _deal_fixed_sizes(y, clients, alpha, samples_per_client, rng)
    else:
        require_enough_samples(len(y), clients, "min_samples", min_samples)
        owned = _cut_classes(indices_by_class(y), clients, alpha, rng)
        for index in owned:
            rng.shuffle(index)  # so that the tail is a random choice
        sizes = [len(index) for index in owned]
        owned = _fill_small_clients(owned, min_samples)
        notes = _describe_repair(sizes, [len(index) for index in owned], min_samples, alpha)
        return replace(split_clients(owned, test_fraction, rng), notes=notes)
    return split_clients(owned, test_fraction, rng)


def _describe_repair(
    before: list[int], after: list[int], min_samples: int, alpha: float
) -> tuple[str, ...]:
    """Return a line on how much of a Dirichlet split was filled up, where that is a tenth of the
    clients or more.
    """
    filled = sum(size < min_samples for size in before)
    if filled * 10 < len(before):
        return ()
    moved = sum(max(0, new - old) for old, new in zip(before, after, strict=True)) / sum(before)
    return (
        f"partition: {filled:,} of {len(before):,} clients had fewer than min_samples={min_samples} by Dir({alpha:g}) "
        f"and were filled up from the largest ones with {moved:.0%} of all samples: these clients are less skewed; "
        "lower clients or partition.min_samples",
    )


def published(
    y: np.ndarray,
    clients: int,
    seed: int,
    *,
    alpha: Alpha,
    min_samples: PositiveInt = 10,
    max_attempts: PositiveInt = 1000,
    test_fraction: Fraction = 0.25,
) -> Partition:
    """Repeat the split of the published FedOBP numbers, index for index: redraw until all clients
    have `min_samples`.

    One legacy NumPy stream (MT19937) serves everything. The order to which a class was shuffled is
    carried over to the
    next attempt. Source: the authors' public code, a fork of FL-bench.

    Raises: FedpflError if there are too few samples, and after `max_attempts` draws.
    """
    require_enough_samples(len(y), clients, "min_samples", min_samples)
    rng = np.random.RandomState(seed)
    classes = indices_by_class(y)
    for attempt in range(1, max_attempts + 1):
        owned = _cut_classes(classes, clients, alpha, rng)
        if min(map(len, owned)) >= min_samples:
            return split_clients(owned, test_fraction, rng, attempt)
    raise FedpflError(
        f"partition=published found no split in {max_attempts} attempts in which each of clients={clients} has "
        f"partition.min_samples={min_samples} samples at partition.alpha={alpha}; use partition=dirichlet, which "
        "always ends"
    )


def iid(
    y: np.ndarray,
    clients: int,
    seed: int,
    *,
    samples_per_client: PositiveInt | None = None,
    test_fraction: Fraction = 0.25,
) -> Partition:
    """Cut a random permutation into parts whose sizes differ by at most one (or are all
    `samples_per_client`).

    Raises: FedpflError if there are too few samples.
    """
    if samples_per_client is not None:
        require_enough_samples(len(y), clients, "samples_per_client", samples_per_client)
    rng = np.random.default_rng(seed)
    total = len(y) if samples_per_client is None else clients * samples_per_client
    return split_clients(
        np.array_split(rng.permutation(len(y))[:total], clients), test_fraction, rng
    )


def shards(
    y: np.ndarray,
    clients: int,
    seed: int,
    *,
    classes_per_client: PositiveInt,
    samples_per_client: PositiveInt | None = None,
    test_fraction: Fraction = 0.25,
) -> Partition:
    """Make the pathological split: each client holds one shard of each of exactly
    `classes_per_client` classes.

    In order, each client takes the classes dealt least often so far, ties at random; so two classes
    differ by at most one shard, whatever clients * classes_per_client. Then each class is cut into
    equal shards (McMahan et al. 2017 cut the sorted labels, where a client's shards may coincide in
    class; here they never do). A class dealt to nobody, which happens if clients *
    classes_per_client < classes, is left out. With `samples_per_client` each client keeps that
    many, as evenly over its shards as they allow.

    Raises: FedpflError if a class or a client has too few samples.
    """
    rng = np.random.default_rng(seed)
    classes = [index for index in indices_by_class(y) if len(index)]
    if classes_per_client > len(classes):
        raise FedpflError(
            f"partition.classes_per_client must be at most the number of classes, {len(classes)}, "
            f"got {classes_per_client}"
        )
    if samples_per_client is not None:
        require_enough_samples(len(y), clients, "samples_per_client", samples_per_client)

    dealt = np.zeros(len(classes), np.int64)
    hands = []
    for _ in range(clients):
        hand = np.lexsort((rng.random(len(classes)), dealt))[:classes_per_client]
        dealt[hand] += 1
        hands.append(hand)

    stacks: list[list[Indices]] = []
    for index, count in zip(classes, dealt, strict=True):
        if len(index) < count:
            raise FedpflError(
                f"partition=shards would cut class {y[index[0]]} with {len(index)} samples into {count} shards; "
                "lower clients or partition.classes_per_client"
            )
        rng.shuffle(index)
        stacks.append(np.array_split(index, count) if count else [])

    return split_clients(deal_shards(stacks, hands, samples_per_client), test_fraction, rng)


# Steps


def _cut_classes(
    classes: list[Indices], clients: int, alpha: float, rng: Generator
) -> list[Indices]:
    """One draw: shuffle each class in place, cut it by Dir(alpha) proportions, give piece k to
    client k.
    """
    pieces: list[list[Indices]] = [[] for _ in range(clients)]
    for index in classes:
        rng.shuffle(index)
        share = rng.dirichlet(np.full(clients, alpha))
        if not np.isfinite(
            share
        ).all():  # the legacy generator underflows for tiny alpha, whose limit is one client
            share = np.eye(clients)[rng.choice(clients)]
        cuts = (np.cumsum(share) * len(index)).astype(int)[:-1]
        for client, piece in enumerate(np.split(index, cuts)):
            pieces[client].append(piece)
    return [np.concatenate(piece) for piece in pieces]


def _fill_small_clients(owned: list[Indices], minimum: int) -> list[Indices]:
    """Fill clients below `minimum` from the tail of the largest client, which never falls below
    `minimum` itself.

    It ends: while one client is below the minimum, the mean is not (checked before), so the largest
    is above it.
    """
    sizes = np.array([len(index) for index in owned])
    for client in range(len(owned)):
        while sizes[client] < minimum:
            donor = int(sizes.argmax())
            count = min(minimum - sizes[client], sizes[donor] - minimum)
            owned[client] = np.concatenate([owned[client], owned[donor][-count:]])
            owned[donor] = owned[donor][:-count]
            sizes[client] += count
            sizes[donor] -= count
    return owned


def _deal_fixed_sizes(
    y: np.ndarray, clients: int, alpha: float, samples: int, rng: np.random.Generator
) -> list[Indices]:
    """`samples` per client, by class proportions ~ Dir(alpha), restricted to the classes that have
    samples left.
    """
    classes = indices_by_class(y)
    for index in classes:
        rng.shuffle(index)
    left = np.array([len(index) for index in classes])
    owned = []
    for _ in range(clients):
        share = rng.dirichlet(np.full(len(classes), alpha))
        pieces, need = [], samples
        while (
            need
        ):  # each further pass has exhausted a class, so there are at most `classes` passes
            share = np.where(left > 0, share, 0.0)
            if share.sum() <= 0:
                share = left.astype(float)
            take = np.minimum(rng.multinomial(need, share / share.sum()), left)
            for c in np.flatnonzero(take):
                pieces.append(classes[c][left[c] - take[c] : left[c]])
            left -= take
            need -= int(take.sum())
        owned.append(np.concatenate(pieces))
    return owned
