"""Schemes that know more of samples than their labels: which group they are from, which were the
original test part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from fedpfl.data.partition.common import (
    Alpha,
    Fraction,
    Indices,
    Partition,
    PositiveInt,
    deal_shards,
    indices_by_class,
    split_clients,
)
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import AtLeast


def groups(
    y: np.ndarray,
    clients: int,
    seed: int,
    *,
    groups: np.ndarray | None = None,
    group_names: Sequence[str] = (),
    min_samples: PositiveInt = 1,
    samples_per_client: PositiveInt | None = None,
    test_from: int | None = None,
    test_fraction: Fraction | None = 0.25,
) -> Partition:
    """Make natural clients: each is one group (a domain, a person, a role), or an equal random part
    of one.

    `groups` and `group_names` are the data set's. Groups of fewer than `min_samples` are left out;
    the others come in order, clients / groups clients each, or as many as there are clients, drawn
    at random. With `samples_per_client` each client keeps that many. test_fraction None: a client
    is tested on its samples of the original test part.

    Raises: FedpflError if the data set has no groups, clients are more and no multiple of them, a
    group has too few samples, or there is no test part.
    """
    if groups is None:
        raise FedpflError(
            "partition=groups needs a data set whose samples are from several domains or persons (digit5, har, "
            "office_home, pacs, femnist, shakespeare, speech_commands, cifar10_c, or your archive with an array groups)"
        )
    if test_fraction is None and test_from is None:
        raise FedpflError(
            "partition.test_fraction=null tests clients on the data set's original test part, and this one has none; "
            "set partition.test_fraction=0.25 to split each client's samples"
        )
    rng = np.random.default_rng(seed)
    taken = _choose_groups(groups, clients, min_samples, rng)
    each, needed = clients // len(taken), samples_per_client or 1
    pieces: list[Indices] = []
    names = [
        group_names[number] if group_names else str(number)
        for number, _ in taken
        for _ in range(each)
    ]
    for place, (_, index) in enumerate(taken):
        parts = np.array_split(rng.permutation(index), each)
        if len(parts[-1]) < needed:
            raise FedpflError(
                f"partition=groups: group {names[place * each]} has {len(index)} samples, too few for {each} clients "
                f"of {needed}; lower clients or partition.samples_per_client, or raise partition.min_samples"
            )
        pieces += [part[:samples_per_client] for part in parts]
    if test_fraction is not None:
        return split_clients(pieces, test_fraction, rng)
    train, test = (
        [index[(index >= test_from) == held].astype(np.int64) for index in pieces]
        for held in (False, True)
    )
    for client, index in enumerate(train):
        if not len(index):
            raise FedpflError(
                f"partition=groups: group {names[client]} leaves client {client} no training samples, as the data "
                "set's own split has it; set partition.test_fraction=0.25 to split anew"
            )
    return Partition(tuple(train), tuple(test))


def _choose_groups(
    groups: np.ndarray, clients: int, min_samples: PositiveInt, rng: np.random.Generator
) -> list[tuple[int, Indices]]:
    """Numbers and samples of the groups that clients are made of: of those large enough as many as
    there are clients.

    Raises FedpflError if there are none, or clients are more and no multiple of them.
    """
    large = [
        (number, index)
        for number, index in enumerate(indices_by_class(groups))
        if len(index) >= min_samples
    ]
    if not large:
        raise FedpflError(
            f"partition=groups: no group has partition.min_samples={min_samples} samples; lower it"
        )
    if clients < len(large):
        return [large[place] for place in sorted(rng.choice(len(large), clients, replace=False))]
    if clients % len(large):
        enough = f" of at least {min_samples} samples" if min_samples > 1 else ""
        raise FedpflError(
            f"partition=groups needs clients to be at most the {len(large)} groups{enough} or a multiple of them, got "
            f"{clients}; set clients={len(large) * (clients // len(large))}"
        )
    return large


def shuffled_shards(
    y: np.ndarray,
    clients: int,
    seed: int,
    *,
    test_from: int | None = None,
    classes_per_client: PositiveInt,
    samples_per_client: PositiveInt | None = None,
    test_samples_per_client: PositiveInt | None = None,
    test_fraction: Fraction | None = None,
) -> Partition:
    """Make the pathological split with classes dealt at random, and the original test part split
    likewise.

    Each of C classes is cut into `classes_per_client` * clients / C equal shards. The class ids,
    each as often as it has shards, are shuffled and dealt, `classes_per_client` to each client, who
    may be dealt one twice; the same hands hold for the training and the test part (the data set's,
    from `test_from` on; or `test_fraction` of each class). `samples_per_client` and
    `test_samples_per_client`: keep that many, as evenly over the shards as they allow.

    Raises: FedpflError if there is no test part, or a class has too few samples.
    """
    rng = np.random.default_rng(seed)
    train, test = _train_and_test_pools(y, test_from, test_fraction, rng, "shuffled_shards")
    kinds = len(train)
    if clients * classes_per_client % kinds:
        raise FedpflError(
            f"partition=shuffled_shards needs clients x partition.classes_per_client to be a multiple of the {kinds} "
            f"classes, got {clients} x {classes_per_client}; partition=shards takes any number"
        )
    each = clients * classes_per_client // kinds
    least = min(train, key=len)
    if len(least) < each:
        raise FedpflError(
            f"partition=shuffled_shards would cut a class of {len(least)} training samples into {each} shards; lower "
            "clients or partition.classes_per_client"
        )
    hands = rng.permutation(np.repeat(np.arange(kinds), each)).reshape(clients, classes_per_client)

    def part(pool: list[Indices], samples: int | None, key: str) -> tuple[Indices, ...]:
        stacks = [np.array_split(rng.permutation(index), each) for index in pool]
        return tuple(
            rng.permutation(index).astype(np.int64)
            for index in deal_shards(stacks, hands, samples, key)
        )

    return Partition(
        part(train, samples_per_client, "samples_per_client"),
        part(test, test_samples_per_client, "test_samples_per_client"),
    )


def fixed_dirichlet(
    y: np.ndarray,
    clients: int,
    seed: int,
    *,
    test_from: int | None = None,
    alpha: Alpha,
    train_samples: PositiveInt = 500,
    test_samples: Annotated[int, AtLeast(0)] = 100,
) -> Partition:
    """Deal equal sizes by one draw of class proportions q ~ Dir(alpha, ..., alpha) for both parts
    of a client.

    A client has round(`train_samples` q_c) samples of class c, the last class the rest, and so many
    of the test part by `test_samples`. It draws without replacement from all samples of a class, so
    CLIENTS MAY SHARE SAMPLES; but what one trains on no other is tested on. Where the data set has
    no original test part, a random share of each class is set apart for it.

    Raises: FedpflError if a class has fewer samples than a client is to have of it.
    """
    for key, value in (("train_samples", train_samples), ("test_samples", test_samples)):
        if value > len(y):
            raise FedpflError(
                f"partition.{key}={value} is more than the {len(y)} samples of the data set; lower it"
            )
    rng = np.random.default_rng(seed)
    share = test_samples / (train_samples + test_samples)
    pools = _train_and_test_pools(
        y, test_from, None if test_from else share, rng, "fixed_dirichlet"
    )
    kinds = len(pools[0])

    def drawn(pool: list[Indices], counts: np.ndarray, key: str) -> Indices:
        sizes = np.array([len(index) for index in pool])
        short = np.flatnonzero(counts > sizes)
        if len(short):
            raise FedpflError(
                f"partition=fixed_dirichlet: a client is to have {counts[short[0]]} samples of a class that has "
                f"{sizes[short[0]]}; lower partition.{key}, or raise partition.alpha"
            )
        chosen = [
            rng.choice(index, count, replace=False)
            for index, count in zip(pool, counts, strict=True)
        ]
        return rng.permutation(np.concatenate(chosen)).astype(np.int64)

    train, test = [], []
    for _ in range(clients):
        proportions = rng.dirichlet(np.full(kinds, alpha))
        train.append(drawn(pools[0], allot_counts(proportions, train_samples), "train_samples"))
        test.append(drawn(pools[1], allot_counts(proportions, test_samples), "test_samples"))
    return Partition(tuple(train), tuple(test))


# Steps


def allot_counts(proportions: np.ndarray, total: int) -> np.ndarray:
    """Return round(total q_c) of each class; the last takes the rest, and if there is none, the
    largest gives.
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
    """Training and test samples of each class that has any: the original parts, or a random share
    of each class.
    """
    classes = [index for index in indices_by_class(y) if len(index)]
    if test_fraction is not None:
        shuffled = [(rng.permutation(index), int(test_fraction * len(index))) for index in classes]
        return [index[cut:] for index, cut in shuffled], [index[:cut] for index, cut in shuffled]
    if test_from is None:
        raise FedpflError(
            f"partition={scheme} splits the data set's original test part, and this one has none; set "
            "partition.test_fraction to set a share of each class apart"
        )
    return [index[index < test_from] for index in classes], [
        index[index >= test_from] for index in classes
    ]
