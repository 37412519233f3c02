"""What the schemes share: the result, the split of one client's samples, the checks of arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any

import numpy as np

from fedpfl.ground.casting import cast, hints
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import Above, AtLeast, AtMost, Below

Index = np.ndarray  # int64 [samples of one client]
Generator = np.random.Generator | np.random.RandomState
Alpha = Annotated[float, Above(0), AtMost(10**6)]  # iid is the limit of large alpha
Count = Annotated[int, AtLeast(1)]
Fraction = Annotated[float, AtLeast(0), Below(1)]


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


def scheme(function: Callable[..., Partition]) -> Callable[..., Partition]:
    """Check what a scheme is called with against its annotations. It then raises FedpflError for what does not fit."""

    @wraps(function)
    def checked(y: Any, clients: Any, seed: Any, **options: Any) -> Partition:
        try:
            cast(clients, Count, "clients")
            cast(seed, Annotated[int, AtLeast(0)], "seed")
            for key, value in options.items():
                cast(value, hints(function).get(key, Any), f"partition.{key}")
        except ValueError as error:
            raise FedpflError(str(error)) from None
        return function(y, clients, seed, **options)

    return checked


def checked_labels(y: Any, clients: int) -> np.ndarray:
    """Return labels as int64 `[samples]`. Raises FedpflError for other things, or fewer samples than clients."""
    y = np.asarray(y)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer) or not len(y) or y.min() < 0:
        raise FedpflError(
            f"labels must be non-negative integers [samples], got {y.dtype} {list(y.shape)}; mend the data"
        )
    if clients > len(y):
        raise FedpflError(f"clients must be at most the number of samples, {len(y)}, got {clients}")
    return y.astype(np.int64)


def check_minimum(min_samples: int, clients: int, samples: int) -> None:
    """Raises FedpflError if there are not so many samples for each client."""
    if clients * min_samples > samples:
        raise FedpflError(
            f"clients={clients} with partition.min_samples={min_samples} need {clients * min_samples} samples, "
            f"the data set has {samples}; lower one of them"
        )


def check_fixed(samples_per_client: int, clients: int, samples: int) -> None:
    """Raises FedpflError if there are not so many samples for each client."""
    if clients * samples_per_client > samples:
        raise FedpflError(
            f"clients={clients} with partition.samples_per_client={samples_per_client} need "
            f"{clients * samples_per_client} samples, the data set has {samples}; lower one of them"
        )
