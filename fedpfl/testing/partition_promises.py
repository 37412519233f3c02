"""Promises of every partition, which deal samples; each raises Unkept where it is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from fedpfl.data import partition
from fedpfl.data.datasets import Samples
from fedpfl.data.fingerprint import fingerprint
from fedpfl.data.partition import Partition
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Values
from fedpfl.ground.seeding import seeded_by_key
from fedpfl.testing.dataset_promises import absolute_path
from fedpfl.testing.promises import (
    Promise,
    Trial,
    Unkept,
    Untriable,
    promise_in,
    repeats_elsewhere,
)

SIZES = (10, 2, 40)  # numbers of clients
SEEDS = (0, 1, 2)
SAMPLES = 10_000
CLASSES = 10
GROUPS = 5
TESTS = 2_000


def make_samples(
    count: int = SAMPLES, classes: int = CLASSES, has_groups_and_test: bool = True
) -> Samples:
    """Return samples of one pixel, with or without groups and a test part."""
    rng = np.random.default_rng(0)
    # Equally many samples of each class, in a random order.
    y = torch.from_numpy(rng.permutation(np.arange(count) % classes))
    x = torch.zeros(count, 1, 1, 1, dtype=torch.uint8)
    samples = Samples(name="tried", x=x, y=y, classes=classes, mean=None, std=None)
    if not has_groups_and_test:
        return samples
    return replace(
        samples,
        groups=torch.from_numpy(rng.permutation(np.arange(count) % GROUPS)),
        group_names=tuple(f"group {number}" for number in range(GROUPS)),
        test_from=count - count * TESTS // SAMPLES,
    )


class PartitionTrial(Trial):
    """A partition that deals samples again and again.

    Args:
        scheme: The partition's function.
        options: The scheme's options.
        clients: The number of clients, None: several.
        read_samples: Answers with the samples to deal, in place of made ones.
    """

    def __init__(
        self,
        scheme: Callable[..., Partition],
        options: Values,
        clients: int | None = None,
        read_samples: Callable[[], Samples] = make_samples,
    ):
        self.scheme = scheme
        self.sizes = (clients,) if clients else SIZES
        self.options = absolute_path(options)
        self._read_samples = read_samples

    @cached_property
    def samples(self) -> Samples:
        """Return the samples that are dealt."""
        return self._read_samples()

    @cached_property
    def partitions(self) -> dict[int, Partition]:
        """Return partitions by their number of clients, without those that the scheme refuses.

        Raises:
            Unkept: where one is wrong.
            Untriable: where it refuses all numbers of clients.
        """
        partitions: dict[int, Partition] = {}
        refusal = ""
        for clients in self.sizes:
            try:
                partitions[clients] = self.deal(clients)
            except FedpflError as error:
                refusal = str(error)
        if not partitions:
            raise Untriable(refusal)
        return partitions

    def deal(self, clients: int, seed: int = SEEDS[0]) -> Partition:
        """Deal anew.

        Raises:
            FedpflError: The scheme refuses.
            Unkept: Its answer is wrong.
        """
        samples = self.samples
        with seeded_by_key("partition", seed):
            parts = partition.call_scheme(self.scheme, samples, clients, seed, **self.options)
        count = len(samples.y)
        label = f"with {clients} clients"
        try:
            partition.check_partition(parts, clients, count, label, self.options.get("path"))
        except FedpflError as fault:
            raise Unkept(str(fault)) from None
        return parts

    def digests(self, is_elsewhere: bool = False) -> dict[str, str]:
        """Return the digest of its answer to the first number of clients that it takes."""
        return {"split": fingerprint(next(iter(self.partitions.values())))}


PARTITION_PROMISES: list[Promise] = []
promise = promise_in(PARTITION_PROMISES)

OWN_GENERATOR = "draw from a generator of the seed alone: np.random.default_rng(seed)"


@promise(
    "deals each client whole numbers of samples, none twice and none both to train and to test", ""
)
def has_the_form(trial: PartitionTrial) -> None:
    """No client is tested on a training sample, and each has a training sample."""
    assert trial.partitions


@promise("deals the same for the same seed", OWN_GENERATOR)
def repeats(trial: PartitionTrial) -> None:
    """For each number of clients, in the same order too."""
    for clients, parts in trial.partitions.items():
        if fingerprint(trial.deal(clients)) != fingerprint(parts):
            raise Unkept(f"{clients} clients get other samples when they are dealt to again")


@promise(
    "deals differently for another seed",
    "where the data alone decide who holds what, all is well; else draw from"
    " np.random.default_rng(seed)",
    binding=False,
)
def follows_the_seed(trial: PartitionTrial) -> None:
    """Several seeds that share a split say less than they seem to."""
    for clients in trial.partitions:
        digests = {fingerprint(trial.deal(clients, seed)) for seed in SEEDS}
        if len(digests) == 1:
            raise Unkept(f"{clients} clients hold the same for the seeds {SEEDS}")


@promise(
    "a sample goes to one client at most",
    "where clients are to share samples all is well, if the docstring says so",
    binding=False,
)
def shares_nothing(trial: PartitionTrial) -> None:
    """Of training samples and test samples alike."""
    for clients, parts in trial.partitions.items():
        indices = np.concatenate([*parts.train, *parts.test, *parts.validation])
        count = len(indices) - len(np.unique(indices))
        if count:
            raise Unkept(
                f"with {clients} clients, samples are dealt {count} times more to another client"
            )


promise(
    "deals the same in another process",
    f"hash() and sets differ between processes; sort what they list. Or {OWN_GENERATOR}",
    slow=True,
)(repeats_elsewhere)
