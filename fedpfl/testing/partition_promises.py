"""What every partition keeps to, as functions that deal samples by it and raise Unkept where it
does not.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from functools import cached_property, wraps
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
from fedpfl.testing.promises import Promise, Unkept, Untriable, promise_in
from fedpfl.testing.surroundings import find_influence

SIZES = (10, 2, 40)  # numbers of clients
SEEDS = (0, 1, 2)
SAMPLES, CLASSES, GROUPS, TESTS = 10_000, 10, 5, 2_000
FEW = 12  # samples that are not enough for what most partitions do
SPLITS = ("train", "test", "validation")


def make_samples(count: int = SAMPLES, classes: int = CLASSES, plain: bool = False) -> Samples:
    """Return samples of one pixel in all classes, in groups and with a test part unless they are
    plain.
    """
    rng = np.random.default_rng(0)
    y = torch.from_numpy(rng.permutation(np.arange(count) % classes))
    x = torch.zeros(count, 1, 1, 1, dtype=torch.uint8)
    if plain:
        return Samples("tried", x, y, classes, None, None)
    groups = torch.from_numpy(rng.permutation(np.arange(count) % GROUPS))
    names = tuple(f"group {number}" for number in range(GROUPS))
    return Samples(
        "tried", x, y, classes, None, None, groups, names, count - count * TESTS // SAMPLES
    )


class PartitionTrial:
    """A partition that deals samples again and again.

    Args:
        scheme: What deals.
        options: The scheme's options.
        clients: The number of clients, None: several.
        read_samples: Answers with the samples to deal, in place of made ones.
        read_elsewhere: Answers with the `digest` of another process.
    """

    def __init__(
        self,
        scheme: Callable[..., Partition],
        options: Mapping[str, Any],
        clients: int | None = None,
        read_samples: Callable[[], Samples] = make_samples,
        read_elsewhere: Callable[[], str] | None = None,
    ):
        self.scheme, self.read_elsewhere, self._read_samples = scheme, read_elsewhere, read_samples
        self.sizes = SIZES if clients is None else (clients,)
        self.options = {**options}
        if path := options.get("path"):
            self.options["path"] = Path(path).expanduser().absolute()
        self.spoilt = ""  # what the scheme has changed of its arguments
        self.drawn: list[str] = []  # the generators of the process that it has drawn from

    @cached_property
    def samples(self) -> Samples:
        """Return the samples that are dealt."""
        return self._read_samples()

    @cached_property
    def dealt(self) -> dict[int, Partition]:
        """Return what clients get, by their number, without numbers of clients that it refuses.

        Raises Unkept, and Untriable where it refuses them all.
        """
        refusals: list[str] = []
        answers: dict[int, Partition] = {}
        for clients in self.sizes:
            try:
                answers[clients] = self.deal(clients)
            except FedpflError as refusal:
                refusals.append(str(refusal))
        if not answers:
            raise Untriable(refusals[0])
        return answers

    @property
    def usual(self) -> int:
        """Return the first number of clients that it takes."""
        return next(iter(self.dealt))

    def deal(self, clients: int, seed: int = SEEDS[0]) -> Partition:
        """Deal anew. Raises FedpflError for what it refuses, Unkept for what is wrong with its
        answer.
        """
        total = len(self.samples.y)
        with seeded_by_key("partition") as list_drawn:
            parts = self._ask(clients, seed)
            self.drawn += [name for name in list_drawn() if name not in self.drawn]
        lengths = {len(split) for name in SPLITS if (split := getattr(parts, name, None))}
        try:
            partition.check_partition(
                parts, clients, total, f"with {clients} clients", self.options.get("path")
            )
        except FedpflError as fault:
            if lengths and lengths != {clients}:  # a file knows for how many it is
                raise
            raise Unkept(str(fault)) from None
        return parts

    def _ask(self, clients: int, seed: int) -> Partition:
        try:
            return partition.call_scheme(self._spying, self.samples, clients, seed, **self.options)
        except (FedpflError, Unkept):
            raise
        except (Exception, SystemExit) as error:
            raise Unkept(f"with {clients} clients it {describe_place(error)}") from error

    @property
    def _spying(self) -> Callable[..., Partition]:
        """Return the scheme as one that notices what it changes."""

        @wraps(self.scheme)
        def spied(y: np.ndarray, *given: Any, **more: Any) -> Partition:
            named = {"labels": y, "groups": more.get("groups")}
            arrays: dict[str, np.ndarray] = {
                name: array for name, array in named.items() if array is not None
            }
            before = {name: array.copy() for name, array in arrays.items()}
            answer = self.scheme(y, *given, **more)
            for name, values in before.items():
                if not np.array_equal(arrays[name], values):
                    changed = np.count_nonzero(arrays[name] != values)
                    self.spoilt = f"changes {changed} of the {len(values)} {name} that it is given"
            return answer

        return spied

    def digest(self) -> str:
        """Return what tells its answer from others."""
        return digest_of(self.dealt[self.usual])


PARTITION_PROMISES: list[Promise] = []
promise = promise_in(PARTITION_PROMISES)

OWN_GENERATOR = "draw from a generator of the seed alone: np.random.default_rng(seed)"


@promise(
    "deals each client whole numbers of samples, none twice and none both to train and to test", ""
)
def has_the_form(trial: PartitionTrial) -> None:
    """Nobody is tested on what anybody trains on, and everybody has a training sample."""
    assert trial.dealt


@promise("deals the same for the same seed", OWN_GENERATOR)
def repeats(trial: PartitionTrial) -> None:
    """For each number of clients, in the same order too."""
    for clients, parts in trial.dealt.items():
        for _ in range(2):
            if fault := compare(parts, trial.deal(clients)):
                raise Unkept(f"{clients} clients dealt to again: {fault}")


@promise(
    "deals otherwise for another seed",
    "where the data alone decide who holds what, all is well; else draw from"
    " np.random.default_rng(seed)",
    binding=False,
)
def follows_the_seed(trial: PartitionTrial) -> None:
    """Several seeds that share a split say less than they seem to."""
    for clients, parts in trial.dealt.items():
        others = [trial.deal(clients, seed) for seed in SEEDS[1:]]
        if all(_held(parts) == _held(other) for other in others):
            raise Unkept(
                f"who of {clients} clients holds what is the same for the seeds"
                f" {', '.join(map(str, SEEDS))}"
            )


@promise("draws from no generator of the process", OWN_GENERATOR)
def draws_nothing_global(trial: PartitionTrial) -> None:
    """Neither torch's, nor NumPy's, nor Python's is drawn from or seeded."""
    assert trial.dealt
    if trial.drawn:
        raise Unkept(
            f"draws from the generators of the process, or seeds them: {', '.join(trial.drawn)}"
        )


@promise("changes nothing that it is given", "work on copies: `y = y.copy()`")
def leaves_its_arguments(trial: PartitionTrial) -> None:
    """Labels and groups are the data set's."""
    assert trial.dealt
    if trial.spoilt:
        raise Unkept(trial.spoilt)


@promise("nobody has fewer samples than min_samples", "fill up who has fewer, or raise FedpflError")
def keeps_the_minimum(trial: PartitionTrial) -> None:
    """Where the partition has such an option, of training and test samples together."""
    option = inspect.signature(trial.scheme).parameters.get("min_samples")
    if option is None or trial.options.get("samples_per_client") is not None:
        return
    least = trial.options.get("min_samples", option.default)
    for clients, parts in trial.dealt.items():
        for client, held in enumerate(_held(parts)):
            if (count := sum(map(len, held))) < least:
                raise Unkept(
                    f"client {client} of {clients} has {count} samples, min_samples={least}"
                )


@promise(
    "a sample goes to one client at most",
    "where clients are to share samples all is well, if the docstring says so",
    binding=False,
)
def shares_nothing(trial: PartitionTrial) -> None:
    """Of training samples and test samples alike."""
    for clients, parts in trial.dealt.items():
        every = np.concatenate([index for name in SPLITS for index in getattr(parts, name)])
        if twice := len(every) - len(np.unique(every)):
            raise Unkept(
                f"with {clients} clients, samples are dealt {twice} times more to another client"
            )


@promise(
    "deals few samples and odd ones too, or says in one line why not",
    "raise fedpfl.ground.errors.FedpflError",
)
def refuses_in_one_line(trial: PartitionTrial) -> None:
    """A sample for each client, one class alone, no groups and no test part."""
    tried = {
        f"{FEW} clients of {FEW} samples": (make_samples(FEW, 3), FEW),
        f"{FEW // 2} clients of {FEW} samples without groups": (
            make_samples(FEW, 3, plain=True),
            FEW // 2,
        ),
        "10 clients of one class": (make_samples(1000, 1), 10),
        "10 clients of samples without groups or test part": (make_samples(plain=True), 10),
        "1 client": (make_samples(), 1),
    }
    for words, (samples, clients) in tried.items():
        try:
            with seeded_by_key("partition"):
                partition.deal_samples(trial.scheme, samples, clients, SEEDS[0], **trial.options)
        except FedpflError as refusal:
            if "mend its code" in str(refusal):
                raise Unkept(f"{words}: {refusal}") from None
        except (Exception, SystemExit) as error:
            raise Unkept(f"{words}: it {describe_place(error)}") from error


@promise(
    "does not depend on the working directory, the order of listings, the locale or threads",
    "use whole paths, and sort what folders list",
)
def ignores_surroundings(trial: PartitionTrial) -> None:
    """Runs go on elsewhere, and are compared with runs of other machines."""

    def compare_anew() -> str:
        try:
            return compare(trial.dealt[trial.usual], trial.deal(trial.usual))
        except (Unkept, FedpflError) as error:
            return str(error)

    if fault := find_influence(compare_anew):
        raise Unkept(fault)


@promise(
    "deals the same in another process",
    "hash() and sets differ between processes; sort what they list",
    slow=True,
)
def repeats_in_another_process(trial: PartitionTrial) -> None:
    """A run that goes on deals in another process than it began in."""
    if trial.read_elsewhere is None:
        raise Untriable("another process needs the name of the choice and its plugin file")
    digest = trial.read_elsewhere()
    if not digest:
        raise Unkept("another process fails to deal")
    if digest != trial.digest():
        raise Unkept(f"another process deals otherwise to {trial.usual} clients")


# ---- comparisons


def compare(one: Partition, other: Partition) -> str:
    """Return the first split in which two answers differ; "" if there is none."""
    for name in SPLITS:
        for client, (a, b) in enumerate(zip(getattr(one, name), getattr(other, name), strict=True)):
            if not np.array_equal(a, b):
                return f"client {client} has other {name} samples, or in another order"
    return ""


def digest_of(parts: Partition) -> str:
    """Return what tells an answer from others."""
    splits = [
        [torch.from_numpy(index.astype(np.int64)) for index in getattr(parts, name)]
        for name in SPLITS
    ]
    return fingerprint(*splits)


def describe_place(error: BaseException) -> str:
    """Say what was raised, and in which line of which file."""
    frames = traceback.extract_tb(original_error(error).__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"raised {error_text(original_error(error), with_class=True)}{place}"


def _held(parts: Partition) -> list[tuple[tuple[int, ...], ...]]:
    """Return what each client holds, in no order."""
    splits = [getattr(parts, name) for name in SPLITS if getattr(parts, name)]
    return [
        tuple(tuple(np.sort(index).tolist()) for index in client)
        for client in zip(*splits, strict=True)
    ]
