"""What sites tell of themselves, and agree on before round 1; neither side believes the other's.

A site tells its name, its number of samples, their form, the values of its labels, and the exact
sums of its training samples where these are scaled by computed constants. Nothing else of its data
leaves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from math import prod
from typing import Annotated, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedpfl.data import fingerprint
from fedpfl.data.datasets import Raw, Samples
from fedpfl.data.datasets.shared.parts import Part, ReadOptions
from fedpfl.data.datasets.shared.samples import MAX_CLASSES, check_samples
from fedpfl.data.datasets.shared.sums import FLOAT_BITS, ChannelSums
from fedpfl.data.datasets.shared.tables import Columns, name_features
from fedpfl.data.datasets.shared.texts import require_alike, require_one_spelling, sort_texts
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Record, Values
from fedpfl.ground.tasks import CLASSIFICATION, MULTILABEL, TASKS, Task
from fedpfl.remote.messages import (
    Label,
    Message,
    Name,
    read_message,
)

MAX_SAMPLES = 2**24  # of a site
MAX_SITES = 2**16
MAX_INPUT = 2**24  # entries of one sample
MAX_AXES = 4
LARGEST_EXPONENT = 128  # of a float32

SampleCount = Annotated[int, Field(ge=1, le=MAX_SAMPLES)]


def _require(is_right: bool, problem: str) -> None:
    """Raise ValueError, as a model's validator does."""
    if not is_right:
        raise ValueError(problem)


class SiteForm(Message):
    """What samples of all sites must have in common.

    Attributes:
        dtype: Of the samples, as numpy calls it.
        shape: Of one sample; of a table its number of features, once all categories are known.
        labels: The values of labels, sorted; of several labels their names; of numbers nothing.
        columns: Of a table; None of anything else.
    """

    dtype: Literal[
        "uint8", "float32", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"
    ]
    shape: Annotated[list[Annotated[int, Field(ge=1)]], Field(max_length=MAX_AXES)]
    labels: Annotated[list[Label], Field(max_length=MAX_CLASSES)]
    columns: Columns | None = None

    @model_validator(mode="after")
    def _check(self) -> SiteForm:
        _require(prod(self.shape) <= MAX_INPUT, f"more than {MAX_INPUT:,} entries")
        _require(len({*self.labels}) == len(self.labels), "a label that stands twice")
        if self.columns:
            names, levels, empty = self.columns
            for texts in (names, *levels.values(), empty):
                _require(len({*texts}) == len(texts), "a column or category that stands twice")
            _require(bool(names) and levels.keys() <= {*names}, "categories that are no columns")
            _require({*empty} <= {*names} - {*levels}, "empty cells of no column of numbers")
        return self


class SiteEntry(Message):
    """Name a site and its parts.

    Attributes:
        name: Of the site.
        samples: Their number.
        test_from: Where its test part begins; None where it has none.
    """

    name: Name
    samples: SampleCount
    test_from: SampleCount | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        _require((self.test_from or 0) < self.samples, "a test part beyond the samples")
        return self


class SiteFacts(SiteEntry):
    """The facts that a site tells."""

    form: SiteForm

    @property
    def entry(self) -> SiteEntry:
        """Return the facts without the form."""
        return SiteEntry(name=self.name, samples=self.samples, test_from=self.test_from)


class SiteReply(Message):
    """Answer a server that asks for the facts of a site."""

    key: Record
    site: SiteFacts


class Agreement(Message):
    """The facts that all sites agree on.

    Attributes:
        sites: In the order of their names.
        form: Of all samples.
        mean: Per channel, where it is computed; empty before, and where the configuration has it.
        std: As mean.
    """

    sites: Annotated[list[SiteEntry], Field(min_length=1, max_length=MAX_SITES)]
    form: SiteForm
    mean: list[float]
    std: list[float]

    @model_validator(mode="after")
    def _check(self) -> Agreement:
        _require(self.names == sorted({*self.names}), "sites that are not in order")
        have_tests = {site.test_from is not None for site in self.sites}
        _require(len(have_tests) == 1, "test parts of some sites")
        _require(len(self.mean) == len(self.std), "another number of std than of mean")
        _require(all(value > 0 for value in self.std), "std that are no deviations")
        return self

    @property
    def names(self) -> list[str]:
        """Return the names of the sites."""
        return [site.name for site in self.sites]

    @property
    def digest(self) -> str:
        """Hash all that is agreed on."""
        return fingerprint(self.model_dump_json())

    @property
    def groups(self) -> Tensor:
        """Return each sample's site, int64 `[samples]`: training parts first, then test parts."""
        numbers = torch.arange(len(self.sites))
        ends = [site.test_from or site.samples for site in self.sites]
        train_sizes = torch.tensor(ends)
        sizes = torch.tensor([site.samples for site in self.sites])
        parts = [numbers.repeat_interleave(part) for part in (train_sizes, sizes - train_sizes)]
        return torch.cat(parts)

    def make_samples(self, options: Values, device: torch.device) -> Samples:
        """Return samples of the agreed form, all of them zeros that take no memory.

        Args:
            options: Those of the data set.
            device: Where they are.

        Raises:
            FedpflError: The configuration does not fit the agreement.
        """
        # One sample stands for all: a site that claims millions costs the server nothing.
        zeros = np.zeros((1, *self.form.shape), self.form.dtype)
        task = TASKS[options["task"]]
        labels = np.zeros((1, len(self.form.labels)) if task is MULTILABEL else 1, np.int64)
        samples = self.check_samples(zeros, labels, options, "the sites")
        total = sum(site.samples for site in self.sites)
        return replace(
            samples,
            x=samples.x.to(device).expand(total, *samples.x.shape[1:]),
            y=samples.y.expand(total, *samples.y.shape[1:]),
            groups=self.groups,
            group_names=tuple(self.names),
            test_from=sum(site.test_from or 0 for site in self.sites) or None,
            class_names=tuple(self.form.labels),
            feature_names=name_features(self.form.columns) if self.form.columns else (),
            are_elsewhere=True,
        )

    def check_samples(self, x: np.ndarray, y: np.ndarray, options: Values, origin: str) -> Samples:
        """Return samples in their final form, scaled as all are. Raises FedpflError."""
        task, classes = TASKS[options["task"]], options["classes"]
        if task is CLASSIFICATION:
            classes = classes or len(self.form.labels)
        if task is CLASSIFICATION and classes < max(2, len(self.form.labels)):
            raise FedpflError(
                f"the sites have {len(self.form.labels)} labels, and dataset.classes={classes}; "
                "there must be two classes at least, and one for each label"
            )
        return check_samples(
            name=options["name"],
            raw=Raw(x, y, missing="" if options["missing"] == "refuse" else options["missing"]),
            origin=origin,
            mean=options["mean"] or tuple(self.mean) or None,
            std=options["std"] or tuple(self.std) or None,
            classes=classes,
            normalize=options.get("normalize", True),
            task=task,
        )

    def number_labels(self, site: Part, task: Task) -> np.ndarray:
        """Return a site's labels as classes. Raises FedpflError for one that is not agreed on."""
        if task is not CLASSIFICATION:
            return site.y
        number_by_value = {value: number for number, value in enumerate(self.form.labels)}
        try:
            classes = [number_by_value[value] for value in site.y.tolist()]
        except KeyError as value:
            raise FedpflError(
                f"site {site.name} has label {value}, which it had not before"
            ) from None
        return np.array(classes, np.int64)

    def find_change(self, facts: SiteFacts) -> str:
        """Return a site's difference from the agreed facts, "" for none."""
        if facts.name not in self.names:
            return f"{facts.name} is no site of this federation: {', '.join(self.names)}"
        agreed = self.sites[self.names.index(facts.name)]
        if agreed != facts.entry:
            return (
                f"{facts.name} has {facts.samples} samples, a test part from {facts.test_from}, "
                f"and had {agreed.samples}, from {agreed.test_from}, as it began"
            )
        return find_difference(facts, SiteFacts(**dict(agreed), form=self.form))


def describe_site(
    site: Part, name: str, columns: Columns | None, options: ReadOptions
) -> SiteFacts:
    """Return the facts that a site tells. Raises FedpflError for what no site can tell."""
    labels: list[str] = []
    if options.task is CLASSIFICATION:
        labels = sort_texts(np.unique(site.y).tolist())
    elif options.task is MULTILABEL:
        labels = [*(options.labels or map(str, range(site.y.shape[1])))]
    form = {
        "dtype": str(site.x.dtype),
        "shape": [] if columns else list(site.x.shape[1:]),
        "labels": labels,
        "columns": columns,
    }
    facts = {"name": name, "samples": len(site.y), "test_from": site.test_from, "form": form}
    return read_message(SiteFacts, facts)


def find_difference(site: SiteFacts, reference: SiteFacts) -> str:
    """Return a site's difference from a reference, with both names; "" without any."""
    own = _describe_site(site)
    other = _describe_site(reference)
    if own != other:
        return f"{site.name}: samples are {own}, and {reference.name}: {other}"
    if site.form.columns and reference.form.columns:
        differing = {*site.form.columns.names} ^ {*reference.form.columns.names}
        if differing:
            columns = ", ".join(sorted(differing))
            return f"{site.name} and {reference.name} differ in columns {columns}"
    return ""


def _describe_site(site: SiteFacts) -> str:
    """Return in words what all sites must have in common; `agree_on_sites` unites labels."""
    form = site.form
    # The shape of a table is known once all categories are.
    kind = "tables" if form.columns else f"{form.dtype} {form.shape}"
    return kind if site.test_from is None else f"{kind} with a test part"


def agree_on_sites(sites: Sequence[SiteFacts], task: Task = CLASSIFICATION) -> Agreement:
    """Unite the facts of sites: the union of classes, and the first one's columns.

    Raises:
        FedpflError: They differ, or a text is written in two ways.
    """
    # ---- Step 1: all are of one form. Sorted by name, as nodes come in any order.
    sites = sorted(sites, key=lambda site: site.name)
    for site, following in pairwise(sites):
        if site.name == following.name:
            raise FedpflError(f"two nodes call their site {site.name}; give one another name")
        if difference := find_difference(following, sites[0]):
            raise FedpflError(f"{difference}; all sites are to be of one form")
    form = sites[0].form

    # ---- Step 2: labels are the union of all sites' labels.
    labels_by_site = {site.name: site.form.labels for site in sites}
    values = form.labels
    if task is CLASSIFICATION:
        values = sort_texts(value for site in sites for value in site.form.labels)
        require_one_spelling(labels_by_site, "label")
        require_alike(labels_by_site)
    for name, labels in labels_by_site.items():
        if task is not CLASSIFICATION and labels != values:
            raise FedpflError(f"{name} has {len(labels)} labels, and {sites[0].name} {len(values)}")

    # ---- Step 3: categories of a table are the union, too, and a feature each.
    changes: Record = {"labels": values}
    tables = {site.name: site.form.columns for site in sites if site.form.columns}
    if form.columns:
        names = form.columns.names
        levels: dict[str, list[str]] = {}
        for column in form.columns.levels:
            levels_by_site = {site: table.levels.get(column, []) for site, table in tables.items()}
            require_one_spelling(levels_by_site, f"{column} =")
            levels[column] = sorted({*chain(*levels_by_site.values())})
        # In the order of the columns, as one table of all would have them.
        found = {*chain(*(table.empty for table in tables.values()))}
        columns = Columns(names, levels, [name for name in names if name in found])
        changes |= {"columns": columns, "shape": [len(name_features(columns))]}

    # ---- Step 4: what all have agreed on.
    facts = {
        "sites": [site.entry for site in sites],
        "form": {**dict(form), **changes},
        "mean": [],
        "std": [],
    }
    return read_message(Agreement, facts)


class SiteSums(Message):
    """The exact sums of a site's training samples and squares by channel."""

    key: Record
    sums: list[Annotated[list[int], Field(min_length=3, max_length=3)]]

    def check(self, channels: int, counts: range, is_image: bool) -> list[ChannelSums]:
        """Return the sums by channel. Raises FedpflError for impossible ones.

        Args:
            channels: Their number.
            counts: How many values a channel may have.
            is_image: Whether they are pixels.
        """
        if len(self.sums) != channels:
            raise FedpflError(f"sums of {len(self.sums)} channels, where there are {channels}")
        largest = 255 if is_image else 2 ** (LARGEST_EXPONENT + FLOAT_BITS)
        for values, squares, count in self.sums:
            # Cauchy and Schwarz: no values have a smaller sum of squares.
            is_possible = values**2 <= count * squares <= (count * largest) ** 2
            if count not in counts or not is_possible:
                raise FedpflError(f"sums that {count} values cannot have")
        return [ChannelSums(*channel) for channel in self.sums]
