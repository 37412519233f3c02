"""Make a trial of a method, network, data set or partition from words of the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedpfl.config import group_options, overrides
from fedpfl.config.choices import list_choices
from fedpfl.config.dealing import deal_data, share_nothing
from fedpfl.config.messages import format_error
from fedpfl.config.plan import check_config
from fedpfl.config.plugins import PLUGIN_KINDS
from fedpfl.config.resolution import escape_interpolations, resolve_config
from fedpfl.config.schema import ModelOptions, PartitionOptions
from fedpfl.data import Federation, partition
from fedpfl.data.fingerprint import fingerprint
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Record, Values
from fedpfl.models import Net
from fedpfl.testing.dataset_promises import DATASET_PROMISES, DatasetTrial
from fedpfl.testing.method_promises import METHOD_PROMISES
from fedpfl.testing.network_promises import (
    NETWORK_PROMISES,
    USUAL_SAMPLES,
    NetworkTrial,
    Samples,
)
from fedpfl.testing.partition_promises import PARTITION_PROMISES, PartitionTrial
from fedpfl.testing.promises import Promise, Trial, promise_in, repeats_elsewhere
from fedpfl.testing.toy import MethodTrial

DEALING_PROMISES: list[Promise] = []
promise_in(DEALING_PROMISES)(
    "samples and their split are the same in another process",
    "draw from np.random.default_rng(0), in a partition of `seed`, keep nothing between calls, and"
    " sort the names of files and the members of sets",
    for_runs="always",
)(repeats_elsewhere)

PROMISES_BY_KIND: dict[str, list[Promise]] = {
    "method": METHOD_PROMISES,
    "model": NETWORK_PROMISES,
    "dataset": DATASET_PROMISES,
    "partition": PARTITION_PROMISES,
    "dealing": DEALING_PROMISES,
}
"""By kind of subject; `dealing` is a data set with its partition, as a run asks for both."""
REGISTRIES = {kind.group: kind for kind in PLUGIN_KINDS.values()}
TRIAL_KEYS = ("shape", "clients", "data_dir")
"""Keys of trials, which are of no kind."""


@dataclass(frozen=True)
class Subject:
    """Name a method, network, data set or partition to be tried, with its configuration.

    Attributes:
        kind: A key of PROMISES_BY_KIND.
        name: The choice's.
        config: The configuration that `train` would have with it.
        shape: Of samples for a network; None: the first that it takes.
        samples: How many of them a network is tried on.
        clients: For a partition; None: several numbers.
        has_dataset: Whether a partition deals the data set of `config`, and no made-up samples.
    """

    kind: str
    name: str
    config: Values = field(default_factory=dict, hash=False, repr=False)
    shape: tuple[int, ...] | None = None
    samples: Samples = USUAL_SAMPLES
    clients: int | None = None
    has_dataset: bool = False

    def __str__(self) -> str:
        return self.name if self.kind == "dealing" else f"{self.kind}={self.name}"


class DealtTrial(Trial):
    """Samples that are read and dealt.

    Args:
        samples_digest: Of the data set.
        federation: Who holds which samples.
    """

    def __init__(self, samples_digest: str, federation: Federation):
        split = fingerprint(federation.train, federation.test, federation.validation)
        self._digests = {"samples": samples_digest, "split": split}

    def digests(self, is_elsewhere: bool = False) -> dict[str, str]:
        """Return digests of the samples and of their split."""
        return self._digests


def list_names(kind: str) -> set[str]:
    """List all names of a kind: those of YAML files, and those that plugins add."""
    return {*list_choices(kind), *REGISTRIES[kind].registry}


# ---- from words to subjects


def read_subjects(choices: Sequence[tuple[str, str]], settings: Sequence[str]) -> list[Subject]:
    """Compose the configuration of each choice, as `train` would.

    Args:
        choices: Kinds and names.
        settings: Words such as `method.mu=0.1`, `clients=7`.

    Raises:
        FedpflError: For words that cannot be composed.
    """
    values = dict(word.split("=", 1) for word in settings if "=" in word)
    names = dict(choices)
    for key in values:
        group = key.partition(".")[0]
        if group in REGISTRIES and group not in names:
            raise FedpflError(f"{key}: no {group} is tried here; name it by {group}=NAME")
    has_dataset = {"dataset", "partition"} <= names.keys() and len(choices) == len(names)
    subjects = []
    for kind, name in choices:
        words = [f"{kind}={name}"]
        if kind == "partition" and has_dataset:
            words.append(f"dataset={names['dataset']}")
        groups = {word.partition("=")[0] for word in words}
        for key, text in values.items():
            group = key.partition(".")[0]
            if group in groups or (group not in REGISTRIES and key != "shape"):
                words.append(f"{key}={text}")
        subjects.append(
            Subject(
                kind=kind,
                name=name,
                config=compose_choice(f"{kind}={name}", words),
                shape=_parse_numbers(values, "shape", "[3,32,32]"),
                clients=(_parse_numbers(values, "clients", "10") or [None])[0],
                has_dataset=has_dataset,
            )
        )
    return subjects


def compose_choice(choice: str, words: Sequence[str]) -> Record:
    """Compose the configuration of words. Raises FedpflError, which names the choice."""
    for word in words:
        if overrides.is_sweep(word):
            raise FedpflError(f"{word} is several values; give it one, or a list as [a,b]")
    try:
        return resolve_config(overrides.compose_config(words))
    except overrides.HYDRA_ERRORS as error:
        raise FedpflError(f"{choice}: {format_error(error)}") from None
    except FedpflError as error:
        raise FedpflError(f"{choice}: {error}") from None


def _parse_numbers(values: Mapping[str, str], key: str, example: str) -> tuple[int, ...] | None:
    """Parse whole numbers above 0, None without any. Raises FedpflError."""
    if key not in values:
        return None
    texts = values[key].strip("[]() ").split(",")
    if not all(text.strip().isdecimal() and int(text) for text in texts):
        raise FedpflError(f"{key} must be as in {key}={example}, got {values[key]}")
    return tuple(map(int, texts))


# ---- from subjects to trials


def make_trial(subject: Subject, net: Net | None = None) -> Trial:
    """Make the trial of a subject. Raises FedpflError for wrong options.

    Args:
        subject: The subject.
        net: Its network, if it is built already.
    """
    try:
        return _make_trial(subject, net)
    except FedpflError as error:
        raise FedpflError(f"{subject}: {error}") from None


def _make_trial(subject: Subject, net: Net | None) -> Trial:
    config = subject.config
    if subject.kind == "method":
        return MethodTrial(group_options.read_group("method", config["method"]))
    if subject.kind == "model":
        options = group_options.read_group("model", config["model"]).options
        own_options = _without(options, ModelOptions())
        return NetworkTrial(
            subject.name,
            subject.shape,
            head=options["head"],
            options=own_options,
            samples=subject.samples,
            net=net,
            seed=config["seed"],
        )
    if subject.kind == "dataset":
        return _make_dataset_trial(config)
    if subject.kind == "partition":
        choice = group_options.read_group("partition", config["partition"])
        options = _without(choice.options, PartitionOptions())
        scheme = partition.SCHEMES[choice.name]
        if not subject.has_dataset:
            return PartitionTrial(scheme, options, subject.clients)
        data_set = _make_dataset_trial(config)
        return PartitionTrial(scheme, options, subject.clients, lambda: data_set.samples)
    plan = check_config(escape_interpolations({**config, "device": "cpu"}))
    dealt_data = deal_data(plan, share_nothing)
    return DealtTrial(dealt_data.samples_digest, dealt_data.federation)


def _make_dataset_trial(config: Values) -> DatasetTrial:
    options = group_options.read_dataset(config).options
    return DatasetTrial(options.pop("name"), Path(config["data_dir"]), options)


def _without(options: Values, common: Any) -> Record:
    """Return options without those that all choices of the group have in common."""
    return {key: value for key, value in options.items() if key not in vars(common)}
