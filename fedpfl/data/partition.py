"""Who holds which samples. Each scheme is a pure function of labels, number of clients and seed.

Every scheme returns disjoint sets of indices, at least one training sample per client, and the client's own test split:
of a client's n shuffled samples the first `int(test_fraction * n)` are its test split.
"""

from __future__ import annotations

import math
import os
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedpfl.errors import FedpflError

Index = np.ndarray  # int64 [samples of one client]
Generator = np.random.Generator | np.random.RandomState


@dataclass(frozen=True, eq=False)
class Partition:
    """Sample indices per client, int64; `attempts` counts the draws that the published scheme needed."""

    train: tuple[Index, ...]
    test: tuple[Index, ...]
    attempts: int = 1


# Schemes


def dirichlet(
    y: Any,
    clients: int,
    seed: int,
    *,
    alpha: float,
    min_samples: int = 10,
    samples_per_client: int | None = None,
    test_fraction: float = 0.25,
) -> Partition:
    """Label skew by Dir(alpha), drawn once and repaired, so that it always ends.

    Each class is cut over the clients by d ~ Dir(alpha, ..., alpha) `[clients]` (Yurochkin et al. 2019). Then each
    client below `min_samples`, in order, is filled up with random samples of whichever client is the largest.

    With `samples_per_client` each client instead draws class proportions p ~ Dir(alpha, ..., alpha) `[classes]` (as
    Hsu et al. 2019) and takes exactly that many samples by them, without replacement; where a class runs out, p is
    restricted to the classes left. `min_samples` then plays no part.

    Raises: FedpflError if an argument is out of range or there are too few samples.
    """
    y = _labels(y, clients, seed, test_fraction)
    _check_alpha(alpha)
    rng = np.random.default_rng(seed)
    if samples_per_client is not None:
        _check_fixed(samples_per_client, clients, len(y))
        owned = _fixed_dirichlet(y, clients, alpha, samples_per_client, rng)
    else:
        _check_minimum(min_samples, clients, len(y))
        owned = _cut(_by_class(y), clients, alpha, rng)
        for index in owned:
            rng.shuffle(index)  # so that the tail is a random choice
        owned = _repair(owned, min_samples)
    return _split(owned, test_fraction, rng)


def published(
    y: Any,
    clients: int,
    seed: int,
    *,
    alpha: float,
    min_samples: int = 10,
    max_attempts: int = 1000,
    test_fraction: float = 0.25,
) -> Partition:
    """The split behind the published FedOBP numbers, index for index: redraw until every client has `min_samples`.

    One legacy NumPy stream (MT19937) serves everything. The order to which a class was shuffled is carried over to the
    next attempt. Source: the authors' public code, a fork of FL-bench.

    Raises: FedpflError after `max_attempts` draws, or if an argument is out of range.
    """
    y = _labels(y, clients, seed, test_fraction)
    _check_alpha(alpha)
    _check_minimum(min_samples, clients, len(y))
    _check_integer("partition.max_attempts", max_attempts, 1)
    if seed >= 2**32:
        raise FedpflError(f"seed must be below 2**32 for partition=published, got {seed}; choose a smaller seed")
    rng = np.random.RandomState(seed)
    classes = _by_class(y)
    for attempt in range(1, max_attempts + 1):
        owned = _cut(classes, clients, alpha, rng)
        if min(map(len, owned)) >= min_samples:
            return _split(owned, test_fraction, rng, attempt)
    raise FedpflError(
        f"partition=published found no split in {max_attempts} attempts in which each of clients={clients} has "
        f"partition.min_samples={min_samples} samples at partition.alpha={alpha}; use partition=dirichlet, which "
        "always ends"
    )


def iid(
    y: Any, clients: int, seed: int, *, samples_per_client: int | None = None, test_fraction: float = 0.25
) -> Partition:
    """A random permutation cut into parts whose sizes differ by at most one (or are all `samples_per_client`).

    Raises: FedpflError if an argument is out of range or there are too few samples.
    """
    y = _labels(y, clients, seed, test_fraction)
    if samples_per_client is not None:
        _check_fixed(samples_per_client, clients, len(y))
    rng = np.random.default_rng(seed)
    total = len(y) if samples_per_client is None else clients * samples_per_client
    return _split(np.array_split(rng.permutation(len(y))[:total], clients), test_fraction, rng)


def shards(
    y: Any,
    clients: int,
    seed: int,
    *,
    classes_per_client: int,
    samples_per_client: int | None = None,
    test_fraction: float = 0.25,
) -> Partition:
    """The pathological split: each client holds one shard of each of exactly `classes_per_client` classes.

    In order, each client takes the classes dealt least often so far, ties at random; so two classes differ by at most
    one shard, whatever clients * classes_per_client. Then each class is cut into equal shards (McMahan et al. 2017 cut
    the sorted labels, where a client's shards may coincide in class; here they never do). A class dealt to nobody,
    which happens if clients * classes_per_client < classes, is left out. With `samples_per_client` each client keeps
    that many, as evenly over its shards as they allow.

    Raises: FedpflError if an argument is out of range or a class or a client has too few samples.
    """
    y = _labels(y, clients, seed, test_fraction)
    _check_integer("partition.classes_per_client", classes_per_client, 1)
    rng = np.random.default_rng(seed)
    classes = [index for index in _by_class(y) if len(index)]
    if classes_per_client > len(classes):
        raise FedpflError(
            f"partition.classes_per_client must be at most the number of classes, {len(classes)}, "
            f"got {classes_per_client}"
        )
    if samples_per_client is not None:
        _check_fixed(samples_per_client, clients, len(y))

    dealt = np.zeros(len(classes), np.int64)
    hands = []
    for _ in range(clients):
        hand = np.lexsort((rng.random(len(classes)), dealt))[:classes_per_client]
        dealt[hand] += 1
        hands.append(hand)

    stacks: list[list[Index]] = []
    for index, count in zip(classes, dealt, strict=True):
        if len(index) < count:
            raise FedpflError(
                f"partition=shards would cut class {y[index[0]]} with {len(index)} samples into {count} shards; "
                "lower clients or partition.classes_per_client"
            )
        rng.shuffle(index)
        stacks.append(np.array_split(index, count) if count else [])

    owned = []
    for client, hand in enumerate(hands):
        held = [stacks[c].pop() for c in hand]
        if samples_per_client is not None:
            held = _trim(held, samples_per_client, client)
        owned.append(np.concatenate(held))
    return _split(owned, test_fraction, rng)


SCHEMES: dict[str, Callable[..., Partition]] = {
    "dirichlet": dirichlet,
    "published": published,
    "iid": iid,
    "shards": shards,
}


# Steps of the schemes


def _by_class(y: np.ndarray) -> list[Index]:
    """Positions of each class, ascending."""
    order = np.argsort(y, kind="stable")
    return np.split(order, np.cumsum(np.bincount(y))[:-1])


def _cut(classes: list[Index], clients: int, alpha: float, rng: Generator) -> list[Index]:
    """One draw: shuffle each class in place, cut it by Dir(alpha) proportions, give piece k to client k."""
    pieces: list[list[Index]] = [[] for _ in range(clients)]
    for index in classes:
        rng.shuffle(index)
        share = rng.dirichlet(np.full(clients, alpha))
        if not np.isfinite(
            share
        ).all():  # the legacy generator underflows for tiny alpha; all to one client is the limit
            share = np.eye(clients)[rng.choice(clients)]
        cuts = (np.cumsum(share) * len(index)).astype(int)[:-1]
        for client, piece in enumerate(np.split(index, cuts)):
            pieces[client].append(piece)
    return [np.concatenate(piece) for piece in pieces]


def _repair(owned: list[Index], minimum: int) -> list[Index]:
    """Fill clients below `minimum` from the tail of the largest client, which never falls below `minimum` itself.

    It ends: while one client is below the minimum, the mean is not (checked before), so the largest is above it.
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


def _fixed_dirichlet(y: np.ndarray, clients: int, alpha: float, samples: int, rng: np.random.Generator) -> list[Index]:
    """`samples` per client, by class proportions ~ Dir(alpha), restricted to the classes that have samples left."""
    classes = _by_class(y)
    for index in classes:
        rng.shuffle(index)
    left = np.array([len(index) for index in classes])
    owned = []
    for _ in range(clients):
        share = rng.dirichlet(np.full(len(classes), alpha))
        pieces, need = [], samples
        while need:  # each further pass has exhausted a class, so there are at most `classes` passes
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


def _trim(held: list[Index], samples: int, client: int) -> list[Index]:
    """The first entries of each shard, `samples` in all, as evenly as the shards' sizes allow."""
    sizes = np.array([len(shard) for shard in held])
    if sizes.sum() < samples:
        raise FedpflError(
            f"partition.samples_per_client={samples} is more than the {sizes.sum()} samples in the shards of client "
            f"{client}; lower it, or lower clients"
        )
    keep = np.zeros_like(sizes)
    for place, shard in enumerate(np.argsort(sizes, kind="stable")):  # smallest first: what it lacks, the others give
        keep[shard] = min(sizes[shard], -(-(samples - keep.sum()) // (len(held) - place)))
    return [shard[:count] for shard, count in zip(held, keep, strict=True)]


def _split(owned: Sequence[Index], test_fraction: float, rng: Generator, attempts: int = 1) -> Partition:
    """Shuffle each client's samples in order of the clients; the first `int(test_fraction * n)` are its test split."""
    train, test = [], []
    for index in owned:
        rng.shuffle(index)
        cut = int(test_fraction * len(index))
        test.append(index[:cut].astype(np.int64))
        train.append(index[cut:].astype(np.int64))
    return Partition(tuple(train), tuple(test), attempts)


# Checks; messages name the keys as the user writes them


def _labels(y: Any, clients: int, seed: int, test_fraction: float) -> np.ndarray:
    """The arguments every scheme shares, checked; labels as int64 `[samples]`."""
    y = np.asarray(y)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer) or not len(y) or y.min() < 0:
        raise FedpflError(
            f"labels must be non-negative integers [samples], got {y.dtype} {list(y.shape)}; mend the data"
        )
    _check_integer("clients", clients, 1)
    _check_integer("seed", seed, 0)
    if clients > len(y):
        raise FedpflError(f"clients must be at most the number of samples, {len(y)}, got {clients}")
    if not _is_number(test_fraction) or not 0 <= test_fraction < 1:
        raise FedpflError(f"partition.test_fraction must be a number in [0, 1), got {test_fraction!r}")
    return y.astype(np.int64)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)


def _check_integer(key: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise FedpflError(f"{key} must be an integer of at least {least}, got {value!r}")


def _check_alpha(alpha: Any) -> None:
    if not _is_number(alpha) or alpha <= 0:
        raise FedpflError(f"partition.alpha must be a positive number, got {alpha!r}")
    if alpha > 1e6:
        raise FedpflError(
            f"partition.alpha must be at most 1e6, got {alpha!r}; partition=iid is the limit of large alpha"
        )


def _check_minimum(min_samples: Any, clients: int, samples: int) -> None:
    _check_integer("partition.min_samples", min_samples, 1)
    if clients * min_samples > samples:
        raise FedpflError(
            f"clients={clients} with partition.min_samples={min_samples} need {clients * min_samples} samples, "
            f"the data set has {samples}; lower one of them"
        )


def _check_fixed(samples_per_client: Any, clients: int, samples: int) -> None:
    _check_integer("partition.samples_per_client", samples_per_client, 1)
    if clients * samples_per_client > samples:
        raise FedpflError(
            f"clients={clients} with partition.samples_per_client={samples_per_client} need "
            f"{clients * samples_per_client} samples, the data set has {samples}; lower one of them"
        )


# File


def save(partition: Any, path: Path | str) -> None:
    """Write a partition as .npz without pickle: flat indices and offsets, for train and test; atomic.

    `partition` is a `Partition`, anything else with `train` and `test`, or a pair `(train, test)`, each one sequence of
    index arrays or tensors per client.
    """
    train, test = (partition.train, partition.test) if hasattr(partition, "train") else partition
    path = Path(path)
    arrays: dict[str, Any] = {"attempts": np.int64(getattr(partition, "attempts", 1))}
    for name, parts in (("train", train), ("test", test)):
        pieces = [np.asarray(part, np.int64) for part in parts]
        arrays[f"{name}_indices"] = np.concatenate([np.empty(0, np.int64), *pieces])
        arrays[f"{name}_offsets"] = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez_compressed(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp gives 0600
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path: Path | str) -> Partition:
    """Read what `save` wrote.

    Raises: FedpflError if the file is absent or is not such a file.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            parts = {
                name: tuple(np.split(file[f"{name}_indices"], file[f"{name}_offsets"][1:-1]))
                for name in ("train", "test")
            }
            attempts = int(file["attempts"])
    except FileNotFoundError:
        raise FedpflError(f"partition file {path} does not exist; check the path") from None
    except (OSError, EOFError, KeyError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise FedpflError(
            f"partition file {path} cannot be read ({type(error).__name__}); delete it to have it made again"
        ) from None
    return Partition(parts["train"], parts["test"], attempts)
