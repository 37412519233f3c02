"""Make what tries a method, network, data set or partition, from its name and options."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from fedpfl import models
from fedpfl.config import overrides, plan
from fedpfl.config.choices import list_choices
from fedpfl.config.messages import format_error
from fedpfl.config.plugins import PLUGIN_KINDS
from fedpfl.config.schema import ModelOptions
from fedpfl.data import datasets, partition
from fedpfl.ground.checks import build_dataclass, require_known_keys, without_name
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import METHODS
from fedpfl.testing.dataset_promises import DATASET_PROMISES, DatasetTrial, describe_reading_error
from fedpfl.testing.method_promises import METHOD_PROMISES, MethodAdvice
from fedpfl.testing.network_promises import NETWORK_PROMISES, NetworkTrial
from fedpfl.testing.partition_promises import PARTITION_PROMISES, PartitionTrial, make_samples
from fedpfl.testing.promises import Judge, Promise, Verdict, audit
from fedpfl.testing.toy import MethodTrial

PROMISES_BY_KIND: dict[str, list[Promise]] = {
    "method": METHOD_PROMISES,
    "model": NETWORK_PROMISES,
    "dataset": DATASET_PROMISES,
    "partition": PARTITION_PROMISES,
}
"""What each kind of choice is tried on."""
REGISTRIES = {kind.group: kind for kind in PLUGIN_KINDS.values()}
SHARED_OPTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "model": (ModelOptions,),
    "dataset": (datasets.load_samples,),
}
"""What takes options beside the choice itself."""
TRIAL_KEYS = {"model": ("shape",), "dataset": ("data_dir",), "partition": ("clients",)}
"""Keys that are no options of the choice, but of the trial."""
FIXED_KEYS = {
    "method": (),
    "model": (),
    "dataset": ("name", "data_dir", "options"),
    "partition": ("seed",),
}
KIND_TITLES = {
    "method": "a method",
    "model": "a model",
    "dataset": "a data set",
    "partition": "a partition",
}


class Choice(NamedTuple):
    """Hold what is tried."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}={self.name}"


class Command(NamedTuple):
    """Hold what the words of the command ask for."""

    choices: list[Choice]
    settings: list[str]
    by_name: bool  # whether they are named one by one, and not all that a file has


def choice_names(group: str) -> set[str]:
    """Return all names of a kind: those of files of values, and those that plugins add."""
    return {*list_choices(group), *REGISTRIES[group].registry}


# ---- with which options


def make_trials(command: Command, elsewhere: OtherProcess) -> dict[Choice, Any]:
    """Return what tries each choice, by the options among the command's settings. Raises
    FedpflError.
    """
    values = _share_settings(command)
    trials: dict[Choice, Any] = {}
    for choice in sorted(
        command.choices, key=lambda one: one.kind == "partition"
    ):  # which deal a data set before
        named = [
            trial
            for trial in trials.values()
            if isinstance(trial, DatasetTrial) and command.by_name
        ]
        with _naming_choice(choice):
            trials[choice] = make_trial(choice, values[choice], elsewhere, named)
    return {choice: trials[choice] for choice in command.choices}


def make_trial(
    choice: Choice,
    values: dict[str, str],
    elsewhere: OtherProcess,
    data_sets: Sequence[DatasetTrial],
) -> Any:
    """Return what is tried. Raises FedpflError."""
    clients, data_dir, shape = (values.pop(key, None) for key in ("clients", "data_dir", "shape"))
    config = _compose_choice(choice, values)
    group, read = config[choice.kind], partial(elsewhere.digest, choice)
    if choice.kind == "method":
        return MethodTrial(build_dataclass(METHODS[group["name"]], without_name(group), ""))
    chosen = {**plan.read_options(config, choice.kind)}
    if choice.kind == "model":
        options_of_network = {
            key: value for key, value in chosen.items() if key not in ("name", "overlap")
        }
        build = partial(models.build_network, group["name"], **options_of_network)
        return NetworkTrial(build, METHODS["fedavg"](), _read_shape(shape))
    if choice.kind == "dataset":
        return DatasetTrial(chosen.pop("name"), Path(data_dir or config["data_dir"]), chosen, read)
    chosen.pop("seed", None)
    samples = partial(getattr, data_sets[0], "samples") if data_sets else make_samples
    return PartitionTrial(
        partition.SCHEMES[group["name"]], chosen, _read_clients(clients), samples, read
    )


@contextlib.contextmanager
def _naming_choice(choice: Choice) -> Iterator[None]:
    """Say of what an error is, and call its keys as the command does."""
    try:
        yield
    except FedpflError as error:
        raise FedpflError(f"{choice}: {str(error).replace(f'{choice.kind}.', '')}") from None


def _share_settings(command: Command) -> dict[Choice, dict[str, str]]:
    """Return each choice's own settings; one without its kind is for all that take it. Raises
    FedpflError.
    """
    values: dict[Choice, dict[str, str]] = {choice: {} for choice in command.choices}
    keys = {choice: _choice_keys(choice) for choice in command.choices}
    for word in command.settings:
        key, _, text = word.partition("=")
        kind, _, rest = key.partition(".")
        asked = command.choices
        if kind in REGISTRIES and rest:
            key, asked = rest, [choice for choice in command.choices if choice.kind == kind]
        takers = [choice for choice in asked if key in keys[choice]]
        if not takers:
            known = dict.fromkeys(name for choice in asked for name in keys[choice])
            _refuse_key(key, list(known), asked)
        for choice in takers:
            values[choice][key] = text
    return values


def _refuse_key(key: str, known: list[str], asked: list[Choice]) -> NoReturn:
    alone = f"{asked[0]}: " if len(asked) == 1 else ""
    try:
        require_known_keys({key: ""}, known, "")
    except FedpflError as error:
        raise FedpflError(f"{alone}{error}") from None
    raise AssertionError(key)


def _choice_keys(choice: Choice) -> list[str]:
    """Return the keys of a choice, of what surrounds its kind, and of its trial."""
    kind, group = REGISTRIES[choice.kind], choice.kind
    named = (
        kind.registry.get(choice.name) or kind.registry[_compose_choice(choice, {})[group]["name"]]
    )
    fixed = {*kind.given, *FIXED_KEYS[group]}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    keys = [
        name
        for part in (named, *SHARED_OPTIONS.get(group, ()))
        for name, parameter in inspect.signature(part).parameters.items()
        if name not in fixed and parameter.kind not in variable
    ]
    return [*dict.fromkeys([*keys, *TRIAL_KEYS.get(group, ())])]


def _compose_choice(choice: Choice, values: Mapping[str, str]) -> dict[str, Any]:
    """Return the configuration in which `train` would have the choice and these values. Raises
    FedpflError.
    """
    for key, text in values.items():
        try:
            parsed = OverridesParser.create().parse_override(f"{key}={text}")
        except HydraException:
            raise FedpflError(
                f"{key}={text} cannot be read; quote what is no number or word"
            ) from None
        if parsed.is_sweep_override():
            raise FedpflError(
                f"{key}={text} is several values; give it one, or a list as {key}=[a,b]"
            )
    words = [f"++{choice.kind}.{key}={text}" for key, text in values.items()]
    try:
        return plan.resolve_config(overrides.compose_config([str(choice), *words]))
    except overrides.HYDRA_ERRORS as error:
        raise FedpflError(format_error(error)) from None


def _read_shape(text: str | None) -> tuple[int, ...] | None:
    """Return the shape of a sample as [3,32,32] says it. Raises FedpflError."""
    if text is None:
        return None
    sizes = text.strip("[]() ").split(",")
    if not all(size.strip().isdecimal() and int(size) for size in sizes):
        raise FedpflError(f"shape must be that of a sample, such as [3,32,32], got {text}")
    return tuple(map(int, sizes))


def _read_clients(text: str | None) -> int | None:
    if text is not None and not (text.isdecimal() and int(text)):
        raise FedpflError(f"clients must be a whole number of 1 or more, got {text}")
    return None if text is None else int(text)


# ---- another process


class OtherProcess:
    """The same command in another process, which hashes otherwise; one answers for all choices."""

    def __init__(self, words: Sequence[str]):
        self._words = words

    def digest(self, choice: Choice) -> str:
        """Return the digest of a choice as it is there, "" where it fails."""
        return self._digests.get(str(choice), "")

    @cached_property
    def _digests(self) -> dict[str, str]:
        seed = os.environ.get("PYTHONHASHSEED", "")
        environment = {
            **os.environ,
            "PYTHONHASHSEED": str(1 + int(seed) % 1000 if seed.isdecimal() else 1),
        }
        command = [sys.executable, "-m", "fedpfl.check", "--digests", "--", *self._words]
        printed = subprocess.run(
            command, env=environment, capture_output=True, text=True
        ).stdout.splitlines()
        with contextlib.suppress(ValueError):
            return json.loads(printed[-1]) if printed else {}
        return {}


def digest_of_trial(trial: Any) -> str:
    """Return what tells a trial's answer from others; "" where it has none, or fails."""
    with contextlib.suppress(Exception, SystemExit):
        return trial.digest() if hasattr(trial, "digest") else ""
    return ""


# ---- verdicts


def make_judge(kind: str, trial: Any) -> Judge:
    """Return how errors of this kind of trial are described, and how its faults are mended."""
    if kind == "method":
        advice = MethodAdvice(trial.method)
        return Judge(advice.describe_error, advice.advise)
    if kind == "dataset":
        return Judge(describe_reading_error)
    return Judge()


def audit_trial(choice: Choice, trial: Any, quick: bool) -> Iterator[Verdict]:
    """Yield the verdict on each promise of the choice's kind."""
    promises = PROMISES_BY_KIND[choice.kind]
    yield from audit(trial, promises, quick, make_judge(choice.kind, trial))
