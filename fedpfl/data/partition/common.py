"""What the schemes share: the result, the split of one client's samples, the checks of arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedpfl.ground.errors import FedpflError

Index = np.ndarray  # int64 [samples of one client]
Generator = np.random.Generator | np.random.RandomState


@dataclass(frozen=True, eq=False)
class Partition:
    """Sample indices per client, int64; `attempts` counts the draws that the published scheme needed.

    validation: where a file holds samples out; else empty.
    """

    train: tuple[Index, ...]
    test: tuple[Index, ...]
    attempts: int = 1
    validation: tuple[Index, ...] = ()


# Steps


def by_class(y: np.ndarray) -> list[Index]:
    """Return the positions of each class, ascending."""
    order = np.argsort(y, kind="stable")
    return np.split(order, np.cumsum(np.bincount(y))[:-1])


def trim(held: list[Index], samples: int, client: int, key: str = "samples_per_client") -> list[Index]:
    """Keep the first entries of each shard, `samples` in all, as evenly as the shards' sizes allow."""
    sizes = np.array([len(shard) for shard in held])
    if sizes.sum() < samples:
        raise FedpflError(
            f"partition.{key}={samples} is more than the {sizes.sum()} samples in the shards of client "
            f"{client}; lower it, or lower clients"
        )
    keep = np.zeros_like(sizes)
    for place, shard in enumerate(np.argsort(sizes, kind="stable")):  # smallest first: what it lacks, the others give
        keep[shard] = min(sizes[shard], -(-(samples - keep.sum()) // (len(held) - place)))
    return [shard[:count] for shard, count in zip(held, keep, strict=True)]


def split(owned: Sequence[Index], test_fraction: float, rng: Generator, attempts: int = 1) -> Partition:
    """Shuffle each client's samples in order of the clients; the first `int(test_fraction * n)` are its test split."""
    train, test = [], []
    for index in owned:
        rng.shuffle(index)
        cut = int(test_fraction * len(index))
        test.append(index[:cut].astype(np.int64))
        train.append(index[cut:].astype(np.int64))
    return Partition(tuple(train), tuple(test), attempts)


# Checks; messages name the keys as the user writes them


def checked_labels(y: Any, clients: int, seed: int, test_fraction: float) -> np.ndarray:
    """Check the arguments that all schemes share; return labels as int64 `[samples]`."""
    y = np.asarray(y)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer) or not len(y) or y.min() < 0:
        raise FedpflError(
            f"labels must be non-negative integers [samples], got {y.dtype} {list(y.shape)}; mend the data"
        )
    check_integer("clients", clients, 1)
    check_integer("seed", seed, 0)
    if clients > len(y):
        raise FedpflError(f"clients must be at most the number of samples, {len(y)}, got {clients}")
    if not is_number(test_fraction) or not 0 <= test_fraction < 1:
        raise FedpflError(f"partition.test_fraction must be a number in [0, 1), got {test_fraction!r}")
    return y.astype(np.int64)


def is_number(value: Any) -> bool:
    """Return whether it is a finite number, not a bool."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)


def check_integer(key: str, value: Any, least: int) -> None:
    """Raises FedpflError for anything but an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise FedpflError(f"{key} must be an integer of at least {least}, got {value!r}")


def check_alpha(alpha: Any) -> None:
    """Raises FedpflError for what is no concentration."""
    if not is_number(alpha) or alpha <= 0:
        raise FedpflError(f"partition.alpha must be a positive number, got {alpha!r}")
    if alpha > 1e6:
        raise FedpflError(
            f"partition.alpha must be at most 1e6, got {alpha!r}; partition=iid is the limit of large alpha"
        )


def check_minimum(min_samples: Any, clients: int, samples: int) -> None:
    """Raises FedpflError if there are not so many samples for each client."""
    check_integer("partition.min_samples", min_samples, 1)
    if clients * min_samples > samples:
        raise FedpflError(
            f"clients={clients} with partition.min_samples={min_samples} need {clients * min_samples} samples, "
            f"the data set has {samples}; lower one of them"
        )


def check_fixed(samples_per_client: Any, clients: int, samples: int) -> None:
    """Raises FedpflError if there are not so many samples for each client."""
    check_integer("partition.samples_per_client", samples_per_client, 1)
    if clients * samples_per_client > samples:
        raise FedpflError(
            f"clients={clients} with partition.samples_per_client={samples_per_client} need "
            f"{clients * samples_per_client} samples, the data set has {samples}; lower one of them"
        )
