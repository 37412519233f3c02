"""Schemes that use samples' groups or the data set's original test part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedpfl.data.partition.common import (
    Alpha,
    Indices,
    Partition,
    deal_shards,
    indices_by_class,
    make_site_generator,
    split_clients,
)
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import Count, ProportionBelowOne, WholeNumber


def groups(
    y: np.ndarray,
    clients: int,
    seed: int,
    *,
    groups: np.ndarray | None = None,
    group_names: Sequence[str] = (),
    min_samples: Count = 1,
    samples_per_client: Count | None = None,
    test_from: int | None = None,
    test_fraction: ProportionBelowOne | None = 0.25,
    by_name: bool = False,
) -> Partition:
    """Make natural clients: each is one group, or an equal random part of one.

    A group is a domain, a person or a role. `groups` and `group_names` are the data set's. Groups
    of fewer than `min_samples` are left out; the rest come in order, clients / groups clients
    each, or as many as there are clients, drawn at random. With `samples_per_client` each client
    keeps that many. test_fraction None: a client is tested on its samples of the original test
    part. by_name: a client's samples follow from its group's name and samples and the seed
    alone; else groups are dealt one after the other, as all were before 0.3.0.

    Raises:
        FedpflError: There are no groups or no test part, or clients do not fit the groups.
    """
    if groups is None:
        raise FedpflError(
            "partition=groups needs a data set whose samples are from several domains or persons, "
            "or your archive with an array groups"
        )
    if test_fraction is None and test_from is None:
        raise FedpflError(
            "partition.test_fraction=null tests clients on the data set's original test part, and "
            "this one has none; set partition.test_fraction=0.25 to split each client's samples"
        )
    rng = np.random.default_rng(seed)
    group_indices = _choose_groups(groups, clients, min_samples, rng)
    share = clients // len(group_indices)
    holdings: list[Indices] = []
    names: list[str] = []
    generators: list[np.random.Generator] = []
    for number, indices in group_indices.items():
        name = group_names[number] if group_names else str(number)
        if by_name:
            rng = make_site_generator(seed, name=name)
        parts = np.array_split(rng.permutation(indices), share)
        if len(parts[-1]) < (samples_per_client or 1):
            raise FedpflError(
                f"partition=groups: group {name} has {len(indices)} samples, too few for {share} "
                f"clients of {samples_per_client or 1}; lower clients or "
                "partition.samples_per_client, or raise partition.min_samples"
            )
        for position, part in enumerate(parts, 1):
            holdings.append(part[:samples_per_client])
            generators.append(rng)
            names.append(name if share == 1 else f"{name} ({position})")
    if test_fraction is not None:
        partition = split_clients(holdings, test_fraction, generators)
    else:
        train = tuple(indices[indices < test_from] for indices in holdings)
        partition = Partition(train, tuple(indices[indices >= test_from] for indices in holdings))
    return replace(partition, client_names=tuple(names) if group_names else ())


def _choose_groups(
    groups: np.ndarray, clients: int, min_samples: Count, rng: np.random.Generator
) -> dict[int, Indices]:
    """Return samples, by their numbers, of the groups that clients are made of.

    They are all groups with `min_samples`, or as many of them, drawn at random, as there are
    clients.

    Raises:
        FedpflError: No group is left, or clients are more and no multiple of them.
    """
    group_indices = {
        number: indices
        for number, indices in enumerate(indices_by_class(groups))
        if len(indices) >= min_samples
    }
    count = len(group_indices)
    if not count:
        raise FedpflError(
            f"partition=groups: no group has partition.min_samples={min_samples} samples; lower it"
        )
    if clients < count:
        numbers = list(group_indices)
        positions = sorted(rng.choice(count, clients, replace=False))
        return {numbers[position]: group_indices[numbers[position]] for position in positions}
    if clients % count:
        condition = f" of at least {min_samples} samples" if min_samples > 1 else ""
        raise FedpflError(
            f"partition=groups needs clients to be at most the {count} groups{condition} or a "
            f"multiple of them, got {clients}; set clients={count * (clients // count)}"
        )
    return group_indices


def shuffled_shards(
    y: np.ndarray,
    clients: int,
    seed: int,
    *,
    test_from: int | None = None,
    classes_per_client: Count,
    samples_per_client: Count | None = None,
    test_samples_per_client: Count | None = None,
    test_fraction: ProportionBelowOne | None = None,
) -> Partition:
    """Make the pathological split with classes dealt at random, training and test part alike.

    Each of C classes is cut into `classes_per_client` * clients / C equal shards. The class ids,
    each as often as it has shards, are shuffled and dealt, `classes_per_client` to each client, who
    may be dealt one twice; a client has the same classes in the training and the test part (the
    data set's, from `test_from` on; or `test_fraction` of each class). `samples_per_client` and
    `test_samples_per_client`: keep that many, as evenly over the shards as they allow.

    Raises:
        FedpflError: If there is no test part, or a class has too few samples.
    """
    rng = np.random.default_rng(seed)
    train, test = _train_and_test_pools(y, test_from, test_fraction, rng, "shuffled_shards")
    classes = len(train)

    # ---- Step 1: deal the class ids, each as often as its class has shards.
    if clients * classes_per_client % classes:
        raise FedpflError(
            "partition=shuffled_shards needs clients x partition.classes_per_client to be a "
            f"multiple of the {classes} classes, got {clients} x {classes_per_client}; "
            "partition=shards takes any number"
        )
    shards_per_class = clients * classes_per_client // classes
    smallest_class = min(map(len, train))
    if smallest_class < shards_per_class:
        raise FedpflError(
            f"partition=shuffled_shards would cut a class of {smallest_class} training samples "
            f"into {shards_per_class} shards; lower clients or partition.classes_per_client"
        )
    # A card for each shard, by its class.
    cards = rng.permutation(np.repeat(np.arange(classes), shards_per_class))
    client_classes = cards.reshape(clients, classes_per_client)

    # ---- Step 2: a client has the same classes in both parts.
    def deal_part(pool: list[Indices], samples: int | None, key: str) -> tuple[Indices, ...]:
        stacks = [np.array_split(rng.permutation(indices), shards_per_class) for indices in pool]
        clients_indices = deal_shards(stacks, client_classes, samples, key)
        return tuple(rng.permutation(indices).astype(np.int64) for indices in clients_indices)

    return Partition(
        train=deal_part(train, samples_per_client, "samples_per_client"),
        test=deal_part(test, test_samples_per_client, "test_samples_per_client"),
    )


def fixed_dirichlet(
    y: np.ndarray,
    clients: int,
    seed: int,
    *,
    test_from: int | None = None,
    alpha: Alpha,
    train_samples: Count = 500,
    test_samples: WholeNumber = 100,
) -> Partition:
    """Deal equal sizes, by one draw of class proportions q per client.

    The draw is q ~ Dir(alpha, ..., alpha). A client has round(`train_samples` q_c) samples of class
    c, the last class the rest, and so many of the test part by `test_samples`. It draws without
    replacement from all samples of a class, so CLIENTS MAY SHARE SAMPLES; but what one trains on no
    other is tested on. Where the data set has no original test part, a random share of each class
    is set apart for it.

    Raises:
        FedpflError: If a class has fewer samples than a client is to have of it.
    """
    # ---- Step 1: what there is of each class, to train and to test.
    rng = np.random.default_rng(seed)
    test_share = None if test_from else test_samples / (train_samples + test_samples)
    train_pool, test_pool = _train_and_test_pools(y, test_from, test_share, rng, "fixed_dirichlet")

    # ---- Step 2: a client's samples, without replacement; another client may draw them too.
    def draw_samples(pool: list[Indices], counts: np.ndarray, key: str) -> Indices:
        samples_by_class = []
        for indices, count in zip(pool, counts, strict=True):
            if count > len(indices):
                raise FedpflError(
                    f"partition=fixed_dirichlet: a client is to have {count} samples of a class "
                    f"that has {len(indices)}; lower partition.{key}, or raise partition.alpha"
                )
            samples_by_class.append(rng.choice(indices, count, replace=False))
        return rng.permutation(np.concatenate(samples_by_class)).astype(np.int64)

    # ---- Step 3: each client's proportions hold for both parts.
    train = []
    test = []
    for _ in range(clients):
        proportions = rng.dirichlet(np.full(len(train_pool), alpha))
        train_counts = allot_counts(proportions, train_samples)
        test_counts = allot_counts(proportions, test_samples)
        train.append(draw_samples(train_pool, train_counts, "train_samples"))
        test.append(draw_samples(test_pool, test_counts, "test_samples"))
    return Partition(tuple(train), tuple(test))


# ---- Steps of the schemes


def allot_counts(proportions: np.ndarray, total: int) -> np.ndarray:
    """Return round(total q_c) of each class; the last takes the rest.

    Where rounding leaves the last less than nothing, the largest class gives.
    """
    counts = np.round(total * proportions).astype(np.int64)
    counts[-1] = total - counts[:-1].sum()
    if counts[-1] < 0:
        counts[counts.argmax()] += counts[-1]
        counts[-1] = 0
    return counts


def _train_and_test_pools(
    y: np.ndarray,
    test_from: int | None,
    test_fraction: float | None,
    rng: np.random.Generator,
    scheme: str,
) -> tuple[list[Indices], list[Indices]]:
    """Return the training and the test samples of each class that has any.

    They are the data set's original parts or, with `test_fraction`, a random share of each class.
    """
    if test_fraction is None and test_from is None:
        raise FedpflError(
            f"partition={scheme} splits the data set's original test part, and this one has none; "
            "set partition.test_fraction to set a share of each class apart"
        )
    train = []
    test = []
    for indices in filter(len, indices_by_class(y)):
        if test_fraction is None:
            is_test = indices >= test_from
        else:
            indices = rng.permutation(indices)
            is_test = np.arange(len(indices)) < int(test_fraction * len(indices))
        train.append(indices[~is_test])
        test.append(indices[is_test])
    return train, test
