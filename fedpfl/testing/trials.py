"""Make a trial of a method, network, data set or partition from words of the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedpfl import models
from fedpfl.config import group_options, overrides
from fedpfl.config.choices import list_choices
from fedpfl.config.messages import format_error
from fedpfl.config.plugins import PLUGIN_KINDS
from fedpfl.config.resolution import resolve_config
from fedpfl.config.schema import ModelOptions, PartitionOptions
from fedpfl.data import partition
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import METHODS
from fedpfl.models import Net
from fedpfl.testing.dataset_promises import DATASET_PROMISES, DatasetTrial
from fedpfl.testing.method_promises import METHOD_PROMISES
from fedpfl.testing.network_promises import (
    NETWORK_PROMISES,
    USUAL_SAMPLES,
    NetworkTrial,
    Samples,
)
from fedpfl.testing.partition_promises import PARTITION_PROMISES, PartitionTrial, make_samples
from fedpfl.testing.promises import Promise
from fedpfl.testing.toy import MethodTrial

PROMISES_BY_KIND: dict[str, list[Promise]] = {
    "method": METHOD_PROMISES,
    "model": NETWORK_PROMISES,
    "dataset": DATASET_PROMISES,
    "partition": PARTITION_PROMISES,
}
REGISTRIES = {kind.group: kind for kind in PLUGIN_KINDS.values()}
TRIAL_KEYS = ("shape", "clients", "data_dir")
"""Keys of trials, which are of no kind."""

AskElsewhere = Callable[[], dict[str, str]]


@dataclass(frozen=True)
class Subject:
    """Name a method, network, data set or partition to be tried, with its configuration.

    Attributes:
        kind: A key of REGISTRIES.
        name: The choice's.
        config: The configuration that `train` would have with it.
        shape: Of samples for a network; None: the first that it takes.
        samples: How many of them a network is tried on.
        clients: For a partition; None: several numbers.
        has_dataset: Whether a partition deals the data set of `config`, and no made-up samples.
    """

    kind: str
    name: str
    config: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)
    shape: tuple[int, ...] | None = None
    samples: Samples = USUAL_SAMPLES
    clients: int | None = None
    has_dataset: bool = False

    def __str__(self) -> str:
        return f"{self.kind}={self.name}"


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
                config=_compose_config(f"{kind}={name}", words),
                shape=_parse_shape(values.get("shape")),
                clients=_parse_clients(values.get("clients")),
                has_dataset=has_dataset,
            )
        )
    _require_taken(values, {kind for kind, _ in choices})
    return subjects


def _require_taken(values: Mapping[str, str], kinds: set[str]) -> None:
    """Raise FedpflError for settings of a kind that is not tried."""
    for key in values:
        group = key.partition(".")[0]
        if group in REGISTRIES and group not in kinds:
            raise FedpflError(f"{key}: no {group} is tried here; name it by {group}=NAME")


def _compose_config(choice: str, words: Sequence[str]) -> dict[str, Any]:
    if swept := next(filter(overrides.is_sweep, words), None):
        raise FedpflError(f"{swept} is several values; give it one, or a list as [a,b]")
    try:
        return resolve_config(overrides.compose_config(words))
    except overrides.HYDRA_ERRORS as error:
        raise FedpflError(f"{choice}: {format_error(error)}") from None
    except FedpflError as error:
        raise FedpflError(f"{choice}: {error}") from None


def _parse_shape(text: str | None) -> tuple[int, ...] | None:
    """Parse the shape of a sample, [3,32,32]. Raises FedpflError."""
    if text is None:
        return None
    sizes = text.strip("[]() ").split(",")
    if not all(size.strip().isdecimal() and int(size) for size in sizes):
        raise FedpflError(f"shape must be that of a sample, such as [3,32,32], got {text}")
    return tuple(map(int, sizes))


def _parse_clients(text: str | None) -> int | None:
    """Parse a number of clients. Raises FedpflError."""
    if text is None:
        return None
    if not (text.isdecimal() and int(text)):
        raise FedpflError(f"clients must be a whole number of 1 or more, got {text}")
    return int(text)


# ---- from subjects to trials


def make_trial(subject: Subject, ask_elsewhere: AskElsewhere | None = None) -> Any:
    """Make the trial of a subject. Raises FedpflError for wrong options."""
    try:
        return _make_trial(subject, ask_elsewhere)
    except FedpflError as error:
        raise FedpflError(f"{subject}: {error}") from None


def _make_trial(subject: Subject, ask_elsewhere: AskElsewhere | None) -> Any:
    config = subject.config
    if subject.kind == "method":
        method = group_options.read_group("method", config["method"])
        return MethodTrial(method, ask_elsewhere=ask_elsewhere)
    if subject.kind == "model":
        return make_network_trial(subject, ask_elsewhere)
    if subject.kind == "dataset":
        return make_dataset_trial(config, ask_elsewhere)
    choice = group_options.read_group("partition", config["partition"])
    options = choice.options
    for key in vars(PartitionOptions()):
        options.pop(key, None)
    data_set = make_dataset_trial(config) if subject.has_dataset else None
    return PartitionTrial(
        scheme=partition.SCHEMES[choice.name],
        options=options,
        clients=subject.clients,
        read_samples=partial(getattr, data_set, "samples") if data_set else make_samples,
        ask_elsewhere=ask_elsewhere,
    )


def make_dataset_trial(
    config: Mapping[str, Any], ask_elsewhere: AskElsewhere | None = None
) -> DatasetTrial:
    """Make the trial of a configuration's data set. Raises FedpflError for wrong options."""
    options = group_options.read_dataset(config).options
    name = options.pop("name")
    return DatasetTrial(name, Path(config["data_dir"]), options, ask_elsewhere)


def make_network_trial(
    subject: Subject, ask_elsewhere: AskElsewhere | None = None, net: Net | None = None
) -> NetworkTrial:
    """Make the trial of a network. Raises FedpflError for wrong options.

    Args:
        subject: The network's.
        ask_elsewhere: Returns the digests of another process.
        net: The network, if it is built already.
    """
    choice = group_options.read_group("model", subject.config["model"])
    name, options = choice.name, choice.options
    own_options = {key: value for key, value in options.items() if key not in vars(ModelOptions())}
    return NetworkTrial(
        partial(models.build_network, name, head=options["head"], **own_options),
        METHODS["fedavg"](),
        subject.shape,
        make=partial(models.make_module, name, **own_options),
        samples=subject.samples,
        net=net,
        ask_elsewhere=ask_elsewhere,
    )
