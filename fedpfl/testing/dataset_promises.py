"""Promises of every data set, which load it; each raises Unkept where it is broken."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedpfl.data import datasets
from fedpfl.data.datasets import Samples
from fedpfl.data.datasets.shared.source import AbsentFiles, without_cache
from fedpfl.data.fingerprint import fingerprint
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.seeding import seeded_by_key
from fedpfl.ground.tasks import CLASSIFICATION, find_task
from fedpfl.testing.promises import Promise, Unkept, Untriable, promise_in, repeats_elsewhere

FIELDS = ("x", "y", "groups", "group_names", "test_from", "classes", "mean", "std")
MOSTLY = 0.5  # share of the test part from which on a leak is no coincidence
CHUNK = 2**12  # samples that are looked at together


class DatasetTrial:
    """A data set that is loaded again and again.

    Args:
        name: The data set's name.
        data_dir: Where its files are looked for.
        options: What `datasets.load_samples` is given besides.
        ask_elsewhere: Returns the digests of another process.
    """

    def __init__(
        self,
        name: str,
        data_dir: Path,
        options: Mapping[str, Any],
        ask_elsewhere: Callable[[], dict[str, str]] | None = None,
    ):
        self.name = name
        self.data_dir = data_dir.expanduser().absolute()
        self.ask_elsewhere = ask_elsewhere
        self.options = {**options}
        if path := options.get("path"):
            self.options["path"] = Path(path).expanduser().absolute()

    def load(self, cached: bool = True) -> Samples:
        """Load it, perhaps from its files alone.

        Raises:
            Unkept: where it is refused.
            Untriable: where its files are absent.
        """
        try:
            with nullcontext() if cached else without_cache():
                return self._load(self.data_dir)
        except AbsentFiles as error:
            raise Untriable(str(error)) from None
        except FedpflError as error:
            raise Unkept(str(error)) from None

    def _load(self, data_dir: Path, **extra_options: Any) -> Samples:
        # Draws from the process's generators are the same each time, as in a run.
        with seeded_by_key("dataset"):
            return datasets.load_samples(self.name, data_dir, **{**self.options, **extra_options})

    @cached_property
    def samples(self) -> Samples:
        """Return the first reading."""
        return self.load()

    @cached_property
    def first_digest(self) -> str:
        """Return the digest of the first load as it was then."""
        return fingerprint(self.samples)

    def digests(self, is_elsewhere: bool = False) -> dict[str, str]:
        """Return the digest of its samples, there of a second reading."""
        return {"samples": fingerprint(self.load()) if is_elsewhere else self.first_digest}

    def find_difference(self, samples: Samples) -> str:
        """Describe the difference of another reading from the first; "" if there is none."""
        if fault := compare(self.samples, samples):
            return fault
        # Where both are one array, only the digest remembers.
        if fingerprint(samples) != self.first_digest:
            return "its samples are others than at first"
        return ""


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
    assert trial.first_digest


@promise("is the same bit for bit when it is read again", f"{OWN_GENERATOR}; {SORTED}")
def repeats(trial: DatasetTrial) -> None:
    """Neither unseeded generators nor traces of an earlier reading play a part."""
    if fault := trial.find_difference(trial.load(cached=False)):
        raise Unkept(f"read again: {fault}")


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
    twins = count_leaks(samples)
    test_size = len(samples.y) - samples.test_from
    if twins > MOSTLY * test_size:
        raise Unkept(f"{twins} of {test_size} test samples are training samples too")


@promise(
    "every class has samples, to train on too",
    "set `classes` to how many there are; where one is empty on purpose all is well",
    binding=False,
)
def has_all_classes(trial: DatasetTrial) -> None:
    """What no client has ever seen, none can learn."""
    samples = trial.samples
    if find_task(samples.y) is not CLASSIFICATION:
        return
    counts = torch.bincount(samples.y, minlength=samples.classes)
    if empty := (counts == 0).nonzero().flatten().tolist():
        raise Unkept(f"{len(empty)} of {samples.classes} classes have no sample: {_shorten(empty)}")
    trained = torch.bincount(samples.y[: samples.test_from], minlength=samples.classes)
    if missing := (trained == 0).nonzero().flatten().tolist():
        raise Unkept(
            f"{len(missing)} of {samples.classes} classes are in the test part alone:"
            f" {_shorten(missing)}"
        )


# ---- comparisons


def compare(earlier: Samples, later: Samples) -> str:
    """Describe the first difference of two readings; "" without one."""
    for field in FIELDS:
        a = getattr(earlier, field)
        b = getattr(later, field)
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if a is not b and a != b:
                return f"{field} is {_describe(b)}, {_describe(a)} before"
        elif a.dtype != b.dtype or a.shape != b.shape:
            return f"{field} is {_describe(b)}, {_describe(a)} before"
        elif not torch.equal(a, b):
            count = int((a != b).view(len(a), -1).any(1).sum())
            return f"{field} differs in {count} of {len(a)} samples"
    return ""


def hash_rows(x: Tensor) -> list[bytes]:
    """Return a digest of each sample."""
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in x.numpy()]


def count_leaks(samples: Samples) -> int:
    """Count the samples of the test part that are in the training part too."""
    rows = hash_rows(samples.x)
    training = set(rows[: samples.test_from])
    return sum(row in training for row in rows[samples.test_from :])


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return _shorten(value)


def _shorten(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    if len(text) <= 60:
        return text
    return f"{text[:60]} ..."
