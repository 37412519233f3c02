"""Promises of every data set, which load it; each raises Unkept where it is broken."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path

import torch

from fedpfl.data import datasets
from fedpfl.data.datasets import Samples
from fedpfl.data.datasets.shared.source import AbsentFiles, without_cache
from fedpfl.data.fingerprint import fingerprint
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Record, Values
from fedpfl.ground.seeding import seeded_by_key
from fedpfl.ground.tasks import CLASSIFICATION, find_task
from fedpfl.testing.promises import (
    Promise,
    Trial,
    Unkept,
    Untriable,
    promise_in,
    repeats_elsewhere,
)

MOSTLY = 0.5  # share of the test part from which on a leak is no coincidence


class DatasetTrial(Trial):
    """A data set that is loaded again and again.

    Args:
        name: The data set's name.
        data_dir: Where its files are looked for.
        options: The arguments of `datasets.load_samples` besides.
    """

    def __init__(self, name: str, data_dir: Path, options: Values):
        self.name = name
        self.data_dir = data_dir.expanduser().absolute()
        self.options = absolute_path(options)

    def load(self, cached: bool = True) -> Samples:
        """Load it, perhaps from its files alone.

        Raises:
            Unkept: where it is refused.
            Untriable: where its files are absent.
        """
        # Draws from the process's generators are the same each time, as in a run.
        with nullcontext() if cached else without_cache(), seeded_by_key("dataset"):
            try:
                return datasets.load_samples(self.name, self.data_dir, **self.options)
            except AbsentFiles as error:
                raise Untriable(str(error)) from None
            except FedpflError as error:
                raise Unkept(str(error)) from None

    @cached_property
    def samples(self) -> Samples:
        """Return the first reading."""
        return self.load()

    @cached_property
    def first_digests(self) -> dict[str, str]:
        """Return the digests of the first reading as it was then."""
        return digest_samples(self.samples)

    def digests(self, is_elsewhere: bool = False) -> dict[str, str]:
        """Return digests of its samples by name."""
        return self.first_digests


def absolute_path(options: Values) -> Record:
    """Return options with an absolute `path`, if they have one."""
    if not options.get("path"):
        return {**options}
    return {**options, "path": Path(options["path"]).expanduser().absolute()}


def digest_samples(samples: Samples) -> dict[str, str]:
    """Return digests of the fields of samples by name."""
    return {name: fingerprint(value) for name, value in vars(samples).items()}


DATASET_PROMISES: list[Promise] = []
promise = promise_in(DATASET_PROMISES)

SORTED = (
    "sort what folders, sets and dictionaries of files list, and give `open` an encoding and whole"
    " paths"
)
OWN_GENERATOR = "draw from a generator that the reader makes: np.random.default_rng(0)"


@promise("is read, in the form that docs/data.md has", "")
def has_the_form(trial: DatasetTrial) -> None:
    """Samples, labels, groups and test_from have agreed types, lengths and finite values."""
    assert trial.first_digests


@promise("is the same bit for bit when it is read again", f"{OWN_GENERATOR}; {SORTED}")
def repeats(trial: DatasetTrial) -> None:
    """Neither unseeded generators nor traces of an earlier reading play a part."""
    for name, digest in digest_samples(trial.load(cached=False)).items():
        if digest != trial.first_digests[name]:
            raise Unkept(f"read again: {name} differs")


promise(
    "is the same in another process",
    f"hash() and sets differ between processes; {SORTED}",
    slow=True,
)(repeats_elsewhere)


@promise(
    "its test part is not its training part",
    "`test_from` is where the original test part begins: training samples come first, each sample"
    " once",
)
def tests_on_other_samples(trial: DatasetTrial) -> None:
    """A wrong test_from or a part read twice makes most of them the same."""
    samples = trial.samples
    if samples.test_from is None:
        return
    rows = [hashlib.blake2b(row.tobytes()).digest() for row in samples.x.numpy()]
    training_rows = set(rows[: samples.test_from])
    test_rows = rows[samples.test_from :]
    leaks = sum(row in training_rows for row in test_rows)
    if leaks > MOSTLY * len(test_rows):
        raise Unkept(f"{leaks} of {len(test_rows)} test samples are training samples too")


@promise(
    "every class has training samples",
    "set `classes` to how many there are; where one is empty on purpose all is well",
    binding=False,
)
def has_all_classes(trial: DatasetTrial) -> None:
    """Without them no client can learn a class."""
    samples = trial.samples
    if find_task(samples.y) is not CLASSIFICATION:
        return
    counts = torch.bincount(samples.y[: samples.test_from], minlength=samples.classes)
    absent = (counts == 0).nonzero().flatten().tolist()
    if absent:
        raise Unkept(f"{len(absent)} of {samples.classes} classes have none: {absent}")
