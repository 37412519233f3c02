"""What sites tell of themselves, and agree on before round 1; neither side believes the other's.

A site tells its name, how many samples it has, their form, the values of its labels, and the exact
sums of its training samples where they are scaled by computed constants. Nothing else of its data
leaves it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpfl.data import Federation, fingerprint
from fedpfl.data.datasets import Raw, Samples
from fedpfl.data.datasets.shared.parts import require_one_spelling
from fedpfl.data.datasets.shared.samples import MAX_CLASSES, check_samples
from fedpfl.data.datasets.shared.sums import FLOAT_BITS, ChannelSums
from fedpfl.data.datasets.shared.tables import name_features
from fedpfl.data.datasets.sites import Columns, Site
from fedpfl.ground.errors import FedpflError
from fedpfl.remote.trust import is_whole_number

MAX_SAMPLES = 2**24  # of a site
MAX_SITES = 2**16
MAX_INPUT = 2**24  # entries of one sample
MAX_AXES = 4
MAX_LENGTH = 200  # of a name
MAX_TEXT = 2**19  # characters of all that is agreed on, which goes with every message
LARGEST_EXPONENT = 128  # of a float32
SAMPLE_TYPES = ("uint8", "float32", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
EXAMPLE_SAMPLES = 64
EXAMPLE_TOKENS = 100

Labels = tuple[Any, ...]
"""Whole numbers, or texts."""


@dataclass(frozen=True)
class SiteForm:
    """What samples of all sites must have in common.

    Attributes:
        dtype: Of the samples, as numpy calls it.
        shape: Of one sample; of a table its number of features, once all categories are known.
        labels: The values of labels, sorted: whole numbers or texts.
        columns: Of a table: names of its columns, and values of categories; None of others.
    """

    dtype: str
    shape: tuple[int, ...]
    labels: Labels
    columns: Columns | None = None


@dataclass(frozen=True)
class SiteFacts:
    """What a site tells of itself.

    Attributes:
        name: Of the site.
        samples: How many it has.
        test_from: Where its test part begins; None where it has none.
        form: Of its samples.
    """

    name: str
    samples: int
    test_from: int | None
    form: SiteForm


@dataclass(frozen=True)
class Agreement:
    """What a federation of sites has agreed on, in the order of the sites' names.

    Attributes:
        names: Of the sites.
        samples: How many each has.
        test_from: Where each test part begins; empty where sites have none.
        form: Of all samples.
        mean: Per channel, where it is computed; empty before, and where the configuration has it.
        std: As mean.
    """

    names: tuple[str, ...]
    samples: tuple[int, ...]
    test_from: tuple[int, ...]
    form: SiteForm
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def digest(self) -> str:
        """Return a hash of all that is agreed on."""
        return fingerprint(json.dumps(asdict(self), sort_keys=True))

    def find_positions(self, client: int) -> Tensor:
        """Return which of all samples are a site's, int64 `[samples]`, ascending."""
        return (self.groups == client).nonzero()[:, 0]

    @property
    def groups(self) -> Tensor:
        """Return each sample's site, int64 `[samples]`: training parts first, then test parts."""
        sizes = torch.tensor(self.samples)
        numbers = torch.arange(len(self.names))
        if not self.test_from:
            return numbers.repeat_interleave(sizes)
        train_sizes = torch.tensor(self.test_from)
        parts = [numbers.repeat_interleave(part) for part in (train_sizes, sizes - train_sizes)]
        return torch.cat(parts)

    def make_samples(self, options: Mapping[str, Any], device: torch.device) -> Samples:
        """Return samples of the agreed form, all of them zeros that take no memory.

        Args:
            options: Those of the data set.
            device: Where they are.

        Raises:
            FedpflError: The configuration does not fit what is agreed on.
        """
        # One sample stands for all: a site that claims millions costs the server nothing.
        zeros = np.zeros((1, *self.form.shape), self.form.dtype)
        samples = self.check_samples(zeros, np.zeros(1, np.int64), options, "the sites")
        total = sum(self.samples)
        return replace(
            samples,
            x=samples.x.to(device).expand(total, *samples.x.shape[1:]),
            y=samples.y.expand(total),
            groups=self.groups,
            group_names=self.names,
            test_from=sum(self.test_from) or None,
            class_names=tuple(map(str, self.form.labels)),
            feature_names=self._name_features(),
            are_elsewhere=True,
        )

    def _name_features(self) -> tuple[str, ...]:
        """Return what the features of tables are called; () of anything else."""
        columns = self.form.columns
        return name_features(columns.names, columns.levels) if columns else ()

    def check_samples(
        self, x: np.ndarray, y: np.ndarray, options: Mapping[str, Any], origin: str
    ) -> Samples:
        """Return samples in their final form, scaled as all are. Raises FedpflError."""
        classes = options["classes"] or len(self.form.labels)
        if classes < max(2, len(self.form.labels)):
            raise FedpflError(
                f"the sites have {len(self.form.labels)} labels, and dataset.classes={classes}; "
                "there must be two classes at least, and one for each label"
            )
        return check_samples(
            name=options["name"],
            raw=Raw(x, y),
            origin=origin,
            mean=options["mean"] or self.mean or None,
            std=options["std"] or self.std or None,
            classes=classes,
            normalize=options.get("normalize", True),
        )

    def number_labels(self, site: Site) -> np.ndarray:
        """Return a site's labels as classes. Raises FedpflError for one that is not agreed on."""
        number_by_value = {value: number for number, value in enumerate(self.form.labels)}
        try:
            classes = [number_by_value[value] for value in site.labels.tolist()]
        except KeyError as value:
            raise FedpflError(
                f"site {site.name} has label {value}, which it had not before"
            ) from None
        return np.array(classes, np.int64)

    def find_change(self, facts: SiteFacts) -> str:
        """Return what is agreed on otherwise than a site has it, "" for nothing."""
        if facts.name not in self.names:
            return f"{facts.name} is no site of this federation: {', '.join(self.names)}"
        client = self.names.index(facts.name)
        agreed_site = SiteFacts(
            facts.name,
            self.samples[client],
            self.test_from[client] if self.test_from else None,
            replace(self.form, shape=() if self.form.columns else self.form.shape),
        )
        if (agreed_site.samples, agreed_site.test_from) != (facts.samples, facts.test_from):
            return (
                f"{facts.name} has {facts.samples} samples, a test part from {facts.test_from}, "
                f"and had {agreed_site.samples}, from {agreed_site.test_from}, as it began"
            )
        return find_difference(facts, agreed_site)


def describe_site(site: Site, name: str, columns: Columns | None) -> SiteFacts:
    """Return what a site tells of itself."""
    form = SiteForm(
        dtype=str(site.x.dtype),
        shape=() if columns else site.x.shape[1:],
        labels=tuple(np.unique(site.labels).tolist()),
        columns=columns,
    )
    return SiteFacts(name, len(site.labels), site.test_from, form)


def find_difference(site: SiteFacts, reference: SiteFacts) -> str:
    """Return in what a site differs from another one, with both names; "" for nothing."""
    # Of tables the columns are compared, as shapes differ until all categories are known.
    form = site.form
    expected = reference.form
    if (form.columns is None) != (expected.columns is None):
        kinds = ["no table" if one.columns is None else "tables" for one in (form, expected)]
        return f"{site.name}: samples are {kinds[0]}, and those of {reference.name} are {kinds[1]}"
    if (form.dtype, form.shape) != (expected.dtype, expected.shape):
        arrays = [f"{one.dtype} {list(one.shape)}" for one in (form, expected)]
        return (
            f"{site.name}: samples are {arrays[0]}, and those of {reference.name} are {arrays[1]}"
        )
    if form.columns and expected.columns:
        names = {*form.columns.names} ^ {*expected.columns.names}
        if names:
            return f"{site.name} and {reference.name} differ in columns {', '.join(sorted(names))}"
    # Of labels only the kind: what they are is united in `agree_on_sites`.
    if type(form.labels[0]) is not type(expected.labels[0]):
        kinds = ["texts" if _are_texts(one.labels) else "numbers" for one in (form, expected)]
        return f"{site.name}: labels are {kinds[0]}, and those of {reference.name} are {kinds[1]}"
    if (site.test_from is None) != (reference.test_from is None):
        bare, complete = (site, reference) if site.test_from is None else (reference, site)
        return f"{bare.name} has no test part of its own, and {complete.name} has one"
    return ""


def _are_texts(labels: Labels) -> bool:
    return isinstance(labels[0], str)


def agree_on_sites(sites: Sequence[SiteFacts]) -> Agreement:
    """Return what sites have in common: the union of labels, and the first one's columns.

    Raises:
        FedpflError: It is too much, or a text is written in two ways.
    """
    # ---- Step 1: labels are the union of all sites' labels.
    # Sorted by name, so that the order in which nodes came does not matter.
    sites = sorted(sites, key=lambda site: site.name)
    form = sites[0].form
    values = sorted({value for site in sites for value in site.form.labels})
    if len(values) > MAX_CLASSES:
        raise FedpflError(f"the sites have {len(values):,} labels, {MAX_CLASSES:,} are the most")
    if _are_texts(form.labels):
        require_one_spelling({site.name: map(str, site.form.labels) for site in sites}, "label")

    # ---- Step 2: categories of a table are the union, too, and a feature each.
    shape = form.shape
    columns = form.columns
    if columns:
        for name in columns.levels:
            levels_by_site = {site.name: _levels_of(site, name) for site in sites}
            require_one_spelling(levels_by_site, f"{name} =")
        levels = {
            name: sorted({text for site in sites for text in _levels_of(site, name)})
            for name in columns.levels
        }
        columns = Columns(columns.names, levels)
        shape = (sum(len(levels.get(name, [name])) for name in columns.names),)

    # ---- Step 3: what all have agreed on.
    test_parts = [site.test_from for site in sites if site.test_from is not None]
    agreement = Agreement(
        names=tuple(site.name for site in sites),
        samples=tuple(site.samples for site in sites),
        test_from=tuple(test_parts),
        form=SiteForm(form.dtype, shape, tuple(values), columns),
    )
    # It goes with every message, as a node's process may live for one message alone.
    length = len(json.dumps(asdict(agreement)))
    if length > MAX_TEXT:
        raise FedpflError(
            f"labels, columns and names of the sites are {length:,} characters, {MAX_TEXT:,} are "
            "the most; number the labels"
        )
    return agreement


def _levels_of(site: SiteFacts, name: str) -> list[str]:
    return site.form.columns.levels.get(name, []) if site.form.columns else []


def make_example_federation(federation: Federation) -> Federation:
    """Return a small federation of made-up samples, by which the form of answers is known."""
    # ---- Step 1: samples of the agreed form.
    # Zeros would hide what a method does with numbers, and real samples are not here.
    generator = torch.Generator().manual_seed(0)
    count = 3 * EXAMPLE_SAMPLES
    size = [count, *federation.shape]
    if federation.x.dtype == torch.uint8:
        x = torch.randint(0, 256, size, generator=generator).to(torch.uint8)
    elif federation.x.dtype == torch.int32:
        x = torch.randint(0, EXAMPLE_TOKENS, size, generator=generator).to(torch.int32)
    else:
        x = torch.randn(size, generator=generator)
        if federation.mean:
            channel_axes = (-1, *[1] * (len(size) - 2))
            mean = torch.tensor(federation.mean).view(channel_axes)
            std = torch.tensor(federation.std).view(channel_axes)
            x = x * std + mean
    y = torch.randint(0, federation.classes, (count,), generator=generator)

    # ---- Step 2: every client has the same few, and none of them in two of its parts.
    def shorten(splits: tuple[Tensor, ...], start: int) -> tuple[Tensor, ...]:
        indices = torch.arange(start, start + EXAMPLE_SAMPLES)
        return tuple(indices[: len(samples)] for samples in splits)

    return replace(
        federation,
        x=x.to(federation.x.device),
        y=y.to(federation.y.device),
        train=shorten(federation.train, 0),
        test=shorten(federation.test, EXAMPLE_SAMPLES),
        validation=shorten(federation.validation, 2 * EXAMPLE_SAMPLES),
    )


# ---- What is told is checked before anything is made of it


def read_facts(fields: Any) -> SiteFacts:
    """Return what a site tells. Raises FedpflError for what no site can be."""
    values = _require_keys(fields, ("name", "samples", "test_from", "form"), "a site")
    samples = values["samples"]
    test_from = values["test_from"]
    _require_count(samples, 1, MAX_SAMPLES, "samples")
    if test_from is not None:
        _require_count(test_from, 1, samples - 1, "a test part from")
    return SiteFacts(read_name(values["name"]), samples, test_from, _read_form(values["form"]))


def read_agreement(fields: Any) -> Agreement:
    """Return what is agreed on. Raises FedpflError for what nobody can have agreed on."""
    keys = ("names", "samples", "test_from", "form", "mean", "std")
    values = _require_keys(fields, keys, "an agreement")
    names = tuple(read_name(name) for name in _require_list(values["names"], MAX_SITES, "sites"))
    if list(names) != sorted({*names}):
        raise FedpflError("an agreement whose sites are not in order")
    samples = _require_list(values["samples"], len(names), "sizes")
    test_from = _require_list(values["test_from"], len(names), "test parts")
    if len(samples) != len(names) or len(test_from) not in (0, len(names)):
        raise FedpflError("an agreement of other sites")
    for count in samples:
        _require_count(count, 1, MAX_SAMPLES, "samples")
    for start, count in zip(test_from, samples, strict=False):
        _require_count(start, 1, count - 1, "a test part from")
    form = _read_form(values["form"])
    mean, std = (_read_scale(values[key], key, MAX_INPUT) for key in ("mean", "std"))
    if len(mean) != len(std) or any(value <= 0 for value in std):
        raise FedpflError("an agreement whose std are no deviations")
    return Agreement(names, tuple(samples), tuple(test_from), form, mean, std)


def read_sums(fields: Any, channels: int, count: int, is_image: bool) -> list[ChannelSums]:
    """Return the sums that a site tells of `count` values per channel.

    Raises:
        FedpflError: No values add up to them.
    """
    pairs = _require_list(fields, channels, "sums")
    if len(pairs) != channels:
        raise FedpflError(f"sums of {len(pairs)} channels, where there are {channels}")
    largest = 255 if is_image else 2 ** (LARGEST_EXPONENT + FLOAT_BITS)
    sums = []
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not all(map(is_whole_number, pair)):
            raise FedpflError("sums that are no whole numbers")
        channel = ChannelSums(pair[0], pair[1])
        smallest = 0 if is_image else -largest
        is_in_range = count * smallest <= channel.values <= count * largest
        # Cauchy and Schwarz: no values have a smaller sum of squares.
        is_possible = channel.values**2 <= count * channel.squares <= (count * largest) ** 2
        if not (is_in_range and is_possible):
            raise FedpflError(f"sums that {count} values cannot have")
        sums.append(channel)
    return sums


def read_name(value: Any) -> str:
    """Return a site's name. Raises FedpflError for one that cannot be shown in a line."""
    if not isinstance(value, str) or not value.isprintable() or not value.strip():
        raise FedpflError(f"a site called {str(value)[:MAX_LENGTH]!r}: names are to be printable")
    if len(value) > MAX_LENGTH:
        raise FedpflError(f"a site whose name has {len(value)} characters; give it a shorter one")
    return value


def _read_form(fields: Any) -> SiteForm:
    values = _require_keys(fields, ("dtype", "shape", "labels", "columns"), "a form")
    if values["dtype"] not in SAMPLE_TYPES:
        raise FedpflError(f"samples of type {str(values['dtype'])[:MAX_LENGTH]!r}")
    shape = _require_list(values["shape"], MAX_AXES, "axes")
    for size in shape:
        _require_count(size, 1, MAX_INPUT, "entries on an axis")
    if prod(shape) > MAX_INPUT:
        raise FedpflError(f"samples of {prod(shape):,} entries, {MAX_INPUT:,} are the most")
    labels = _require_list(values["labels"], MAX_CLASSES, "labels")
    are_numbers = all(map(is_whole_number, labels))
    if not labels or not (are_numbers or all(isinstance(value, str) for value in labels)):
        raise FedpflError("labels that are neither whole numbers nor texts")
    if labels != sorted({*labels}) or (are_numbers and max(map(abs, labels)) >= 2**63):
        raise FedpflError("labels that are not in order, or too large")
    for value in labels:
        if not are_numbers and not value.isprintable():
            raise FedpflError(f"a label {value[:MAX_LENGTH]!r}: labels are to be printable")
    return SiteForm(values["dtype"], tuple(shape), tuple(labels), _read_columns(values["columns"]))


def _read_columns(fields: Any) -> Columns | None:
    if fields is None:
        return None
    if not isinstance(fields, list) or len(fields) != 2 or not isinstance(fields[1], dict):
        raise FedpflError("columns that are none")
    names = _require_list(fields[0], MAX_CLASSES, "columns")
    levels = {
        name: _require_list(values, MAX_CLASSES, "values of a category")
        for name, values in fields[1].items()
    }
    for texts in (names, *levels.values()):
        if not all(isinstance(text, str) for text in texts) or len({*texts}) < len(texts):
            raise FedpflError("columns, or values of a category, that are no different texts")
    if not names or not levels.keys() <= {*names}:
        raise FedpflError("categories that are no columns")
    return Columns(names, levels)


def _read_scale(values: Any, key: str, limit: int) -> tuple[float, ...]:
    numbers = _require_list(values, limit, key)
    if not all(isinstance(value, float) and abs(value) < float("inf") for value in numbers):
        raise FedpflError(f"an agreement whose {key} are no finite numbers")
    return tuple(numbers)


def _require_keys(fields: Any, keys: Sequence[str], subject: str) -> dict[str, Any]:
    if not isinstance(fields, dict) or fields.keys() != {*keys}:
        raise FedpflError(f"a message that tells nothing of {subject}")
    return fields


def _require_list(value: Any, limit: int, subject: str) -> list[Any]:
    if not isinstance(value, list):
        raise FedpflError(f"a message without a list of {subject}")
    if len(value) > limit:
        raise FedpflError(f"a message of {len(value):,} {subject}, {limit:,} are the most")
    return value


def _require_count(value: Any, minimum: int, limit: int, subject: str) -> None:
    if not is_whole_number(value) or not minimum <= value <= limit:
        raise FedpflError(f"{str(value)[:MAX_LENGTH]} {subject}, not from {minimum} to {limit:,}")
