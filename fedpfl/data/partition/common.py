"""What the schemes share: the result, the types of their options, the split of one client's
samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import Above, AtLeast, AtMost, Below

SPLITS = ("train", "test", "validation")
Indices = np.ndarray  # int64 [samples of one client]
Generator = np.random.Generator | np.random.RandomState
Alpha = Annotated[float, Above(0), AtMost(10**6)]  # iid is the limit of large alpha
PositiveInt = Annotated[int, AtLeast(1)]
Fraction = Annotated[float, AtLeast(0), Below(1)]


@dataclass(frozen=True, eq=False)
class Partition:
    """Sample indices per client, int64; `attempts` counts the draws that the published scheme
    needed.

    validation: where a file holds samples out; else empty. notes: lines for the user about what was
    dealt.
    """

    train: tuple[Indices, ...]
    test: tuple[Indices, ...]
    attempts: int = 1
    validation: tuple[Indices, ...] = ()
    notes: tuple[str, ...] = ()


def indices_by_class(y: np.ndarray) -> list[Indices]:
    """Return the positions of each class, ascending."""
    order = np.argsort(y, kind="stable")
    return np.split(order, np.cumsum(np.bincount(y))[:-1])


def trim_shards(held: list[Indices], samples: int, client: int, key: str) -> list[Indices]:
    """Keep the first entries of each shard, `samples` in all, as evenly as the shards' sizes allow."""
    sizes = np.array([len(shard) for shard in held])
    if sizes.sum() < samples:
        raise FedpflError(
            f"partition.{key}={samples} is more than the {sizes.sum()} samples in the shards of client "
            f"{client}; lower it, or lower clients"
        )
    keep = np.zeros_like(sizes)
    for place, shard in enumerate(
        np.argsort(sizes, kind="stable")
    ):  # smallest first: what it lacks, the others give
        keep[shard] = min(sizes[shard], -(-(samples - keep.sum()) // (len(held) - place)))
    return [shard[:count] for shard, count in zip(held, keep, strict=True)]


def deal_shards(
    stacks: list[list[Indices]],
    hands: Iterable[np.ndarray],
    samples: int | None,
    key: str = "samples_per_client",
) -> list[Indices]:
    """Give each client a shard of each class in its hand; of these, with `samples`, it keeps that
    many.
    """
    owned = []
    for client, hand in enumerate(hands):
        held = [stacks[kind].pop() for kind in hand]
        owned.append(np.concatenate(trim_shards(held, samples, client, key) if samples else held))
    return owned


def split_clients(
    owned: Sequence[Indices], test_fraction: float, rng: Generator, attempts: int = 1
) -> Partition:
    """Shuffle each client's samples in order of the clients; the first `int(test_fraction * n)` are
    its test split.
    """
    train, test = [], []
    for index in owned:
        rng.shuffle(index)
        cut = int(test_fraction * len(index))
        test.append(index[:cut].astype(np.int64))
        train.append(index[cut:].astype(np.int64))
    return Partition(tuple(train), tuple(test), attempts)


def require_enough_samples(samples: int, clients: int, key: str, each: int) -> None:
    """Raise FedpflError if there are not `each` samples, an option's value, for all clients."""
    if clients * each > samples:
        raise FedpflError(
            f"clients={clients} with partition.{key}={each} need {clients * each} samples, the data set has {samples}; "
            "lower one of them"
        )


def check_partition(
    parts: Partition, clients: int, samples: int, where: str, path: object = None
) -> None:
    """Raise FedpflError for what does not fit, or would be tested on what somebody trains on.

    where: what the user chose. path: of the file that it is from, if any.
    """
    of, mend = (f" of {path}", "the file") if path else ("", "its code")
    splits: dict[str, Any] = {name: getattr(parts, name, None) for name in SPLITS}
    if not all(isinstance(own, tuple | list) for own in splits.values()):
        raise FedpflError(
            f"{where} must answer with a fedpfl.data.partition.Partition, got {type(parts).__name__}"
        )
    if dealt := {len(own) for name, own in splits.items() if own or name != "validation"} - {
        clients
    }:
        raise FedpflError(
            f"clients must be {min(dealt)}, as {path or where} deals to so many, got {clients}"
        )
    role = np.zeros(samples, np.int8)  # which splits have a sample, as bits
    for bit, name in enumerate(SPLITS):
        for client, index in enumerate(splits[name]):
            holder = f"{where}: client {client}{of}"
            if (
                not isinstance(index, np.ndarray)
                or index.ndim != 1
                or (index.size and index.dtype.kind not in "iu")
            ):
                raise FedpflError(
                    f"{holder} has {name} samples that are no array of whole numbers; mend {mend}"
                )
            if not index.size:
                if name == "train":
                    raise FedpflError(f"{holder} has no training samples; leave it out")
                continue
            if not 0 <= index.min() <= index.max() < samples:
                wrong = index[(index < 0) | (index >= samples)][0]
                raise FedpflError(
                    f"{holder} has sample {wrong}, and the data set has {samples}; it was made for another one"
                )
            if len(np.unique(index)) < len(index):
                raise FedpflError(f"{holder} has a {name} sample twice; mend {mend}")
            role[index] |= 1 << bit
    if (shared := (role & 1 > 0) & (role > 1)).any():
        raise FedpflError(
            f"{where}: sample {shared.argmax()}{of} is for training and for testing or validation too; mend {mend}"
        )
