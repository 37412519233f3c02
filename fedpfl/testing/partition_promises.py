"""Promises of every partition, which deal samples; each raises Unkept where it is broken."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedpfl.data import partition
from fedpfl.data.datasets import Samples
from fedpfl.data.fingerprint import fingerprint
from fedpfl.data.partition import Partition
from fedpfl.ground.errors import FedpflError, error_text, original_error
from fedpfl.ground.seeding import seeded_by_key
from fedpfl.testing.promises import Promise, Unkept, Untriable, promise_in, repeats_elsewhere

SIZES = (10, 2, 40)  # numbers of clients
SEEDS = (0, 1, 2)
SAMPLES = 10_000
CLASSES = 10
GROUPS = 5
TESTS = 2_000
SPLITS = ("train", "test", "validation")


def make_samples(
    count: int = SAMPLES, classes: int = CLASSES, has_groups_and_test: bool = True
) -> Samples:
    """Return samples of one pixel, with or without groups and a test part."""
    rng = np.random.default_rng(0)
    # Equally many samples of each class, in a random order.
    y = torch.from_numpy(rng.permutation(np.arange(count) % classes))
    samples = Samples(
        name="tried",
        x=torch.zeros(count, 1, 1, 1, dtype=torch.uint8),
        y=y,
        classes=classes,
        mean=None,
        std=None,
    )
    if not has_groups_and_test:
        return samples
    return replace(
        samples,
        groups=torch.from_numpy(rng.permutation(np.arange(count) % GROUPS)),
        group_names=tuple(f"group {number}" for number in range(GROUPS)),
        test_from=count - count * TESTS // SAMPLES,
    )


class PartitionTrial:
    """A partition that deals samples again and again.

    Args:
        scheme: What deals.
        options: The scheme's options.
        clients: The number of clients, None: several.
        read_samples: Answers with the samples to deal, in place of made ones.
        ask_elsewhere: Returns the digests of another process.
    """

    def __init__(
        self,
        scheme: Callable[..., Partition],
        options: Mapping[str, Any],
        clients: int | None = None,
        read_samples: Callable[[], Samples] = make_samples,
        ask_elsewhere: Callable[[], dict[str, str]] | None = None,
    ):
        self.scheme = scheme
        self.ask_elsewhere = ask_elsewhere
        self._read_samples = read_samples
        self.sizes = SIZES if clients is None else (clients,)
        self.options = {**options}
        if path := options.get("path"):
            self.options["path"] = Path(path).expanduser().absolute()

    @cached_property
    def samples(self) -> Samples:
        """Return the samples that are dealt."""
        return self._read_samples()

    @cached_property
    def partitions(self) -> dict[int, Partition]:
        """Return partitions by their number of clients, without those that it refuses.

        Raises:
            Unkept: where one is wrong.
            Untriable: where it refuses all numbers of clients.
        """
        refusals: list[str] = []
        partitions: dict[int, Partition] = {}
        for clients in self.sizes:
            try:
                partitions[clients] = self.deal(clients)
            except FedpflError as refusal:
                refusals.append(str(refusal))
        if not partitions:
            raise Untriable(refusals[0])
        return partitions

    @property
    def default_size(self) -> int:
        """Return the first number of clients that it takes."""
        return next(iter(self.partitions))

    def deal(self, clients: int, seed: int = SEEDS[0]) -> Partition:
        """Deal anew.

        Raises:
            FedpflError: The scheme refuses.
            Unkept: Its answer is wrong.
        """
        with seeded_by_key("partition", seed):
            parts = self._call_scheme(clients, seed)
        splits = [getattr(parts, name, None) for name in SPLITS]
        lengths = {len(split) for split in splits if split}
        label = f"with {clients} clients"
        try:
            partition.check_partition(
                parts, clients, len(self.samples.y), label, self.options.get("path")
            )
        except FedpflError as fault:
            if lengths and lengths != {clients}:  # a file knows for how many it is
                raise
            raise Unkept(str(fault)) from None
        return parts

    def _call_scheme(self, clients: int, seed: int) -> Partition:
        try:
            return partition.call_scheme(self.scheme, self.samples, clients, seed, **self.options)
        except (FedpflError, Unkept):
            raise
        except (Exception, SystemExit) as error:
            raise Unkept(f"with {clients} clients it {describe_failure(error)}") from error

    def digests(self, is_elsewhere: bool = False) -> dict[str, str]:
        """Return the digest of its answer to the default number of clients."""
        return {"split": fingerprint(self.partitions[self.default_size])}


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
        for _ in range(2):
            # Twice: traces of the first call would show in the second.
            if fault := compare(parts, trial.deal(clients)):
                raise Unkept(f"{clients} clients dealt to again: {fault}")


@promise(
    "deals differently for another seed",
    "where the data alone decide who holds what, all is well; else draw from"
    " np.random.default_rng(seed)",
    binding=False,
)
def follows_the_seed(trial: PartitionTrial) -> None:
    """Several seeds that share a split say less than they seem to."""
    for clients, parts in trial.partitions.items():
        holdings = _list_holdings(parts)
        partitions_of_other_seeds = [trial.deal(clients, seed) for seed in SEEDS[1:]]
        # Who holds which samples counts, not their order: a permutation alone is no other split.
        if all(_list_holdings(reseeded) == holdings for reseeded in partitions_of_other_seeds):
            raise Unkept(
                f"who of {clients} clients holds what is the same for the seeds"
                f" {', '.join(map(str, SEEDS))}"
            )


@promise(
    "a sample goes to one client at most",
    "where clients are to share samples all is well, if the docstring says so",
    binding=False,
)
def shares_nothing(trial: PartitionTrial) -> None:
    """Of training samples and test samples alike."""
    for clients, parts in trial.partitions.items():
        indices = np.concatenate([index for name in SPLITS for index in getattr(parts, name)])
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


# ---- comparisons


def compare(earlier: Partition, later: Partition) -> str:
    """Find the first split in which two answers differ; "" without one."""
    for name in SPLITS:
        pairs = zip(
            getattr(earlier, name),
            getattr(later, name),
            strict=True,
        )
        for client, (indices, later_indices) in enumerate(pairs):
            if not np.array_equal(indices, later_indices):
                return f"client {client} has other {name} samples, or in another order"
    return ""


def describe_failure(error: BaseException) -> str:
    """Describe an error, with its file and line."""
    frames = traceback.extract_tb(original_error(error).__traceback__)
    line_text = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"raised {error_text(original_error(error), with_class=True)}{line_text}"


def _list_holdings(parts: Partition) -> list[list[list[int]]]:
    """List each client's sorted samples of each split."""
    holdings: list[list[list[int]]] = [[] for _ in parts.train]
    for name in SPLITS:
        split = getattr(parts, name)
        for client, indices in enumerate(split):
            holdings[client].append(np.sort(indices).tolist())
    return holdings
