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

from fedpfl.config import group_options, overrides
from fedpfl.config.choices import list_choices
from fedpfl.config.messages import format_error
from fedpfl.config.plugins import PLUGIN_KINDS
from fedpfl.config.resolution import resolve_config
from fedpfl.config.schema import ModelOptions
from fedpfl.config.twins import build_repeatable_network, import_twin
from fedpfl.data import datasets, partition
from fedpfl.ground.checks import VARIADIC, build_dataclass, require_known_keys, without_name
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
    """Name a method, network, data set or partition that is tried."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}={self.name}"


class Command(NamedTuple):
    """Hold what the words of the command ask for.

    Attributes:
        choices: that are tried.
        settings: their options, as words.
        by_name: whether they are named one by one, and not all that a file has.
    """

    choices: list[Choice]
    settings: list[str]
    by_name: bool


def choice_names(group: str) -> set[str]:
    """Return all names of a kind: those of files of values, and those that plugins add."""
    return {*list_choices(group), *REGISTRIES[group].registry}


# ---- with which options


def make_trials(command: Command, elsewhere: OtherProcess) -> dict[Choice, Any]:
    """Return what tries each choice, by the command's settings. Raises FedpflError."""
    values = _share_settings(command)
    trials: dict[Choice, Any] = {}
    data_sets: list[DatasetTrial] = []
    # Partitions come last: they deal the data set that is named beside them.
    for choice in sorted(command.choices, key=lambda choice: choice.kind == "partition"):
        with _prefix_errors(choice):
            trial = make_trial(choice, values[choice], elsewhere, data_sets)
        trials[choice] = trial
        if isinstance(trial, DatasetTrial) and command.by_name:
            data_sets.append(trial)
    return {choice: trials[choice] for choice in command.choices}


def make_trial(
    choice: Choice,
    values: dict[str, str],
    elsewhere: OtherProcess,
    data_sets: Sequence[DatasetTrial],
) -> Any:
    """Return the trial of a choice. Raises FedpflError.

    Args:
        choice: that is tried.
        values: text by key, of its options and of its trial.
        elsewhere: reads or deals the same in another process.
        data_sets: the first of them is what a partition deals; else it deals made samples.
    """
    # ---- Step 1: keys of the trial, then options of the choice.
    clients = values.pop("clients", None)
    data_dir = values.pop("data_dir", None)
    shape = values.pop("shape", None)
    config = _compose_choice(choice, values)
    group = config[choice.kind]
    read_elsewhere = partial(elsewhere.digest, choice)

    # ---- Step 2: the trial of its kind.
    if choice.kind == "method":
        options = without_name(group)
        twin_class = import_twin("METHODS", group["name"])
        return MethodTrial(
            build_dataclass(METHODS[group["name"]], options, ""),
            twin=build_dataclass(twin_class, options, ""),
        )
    options = {**group_options.read_options(config, choice.kind)}
    if choice.kind == "model":
        # These are about weights that a run starts from.
        options.pop("name", None)
        options.pop("overlap", None)
        build = partial(build_repeatable_network, group["name"], **options)
        return NetworkTrial(build, METHODS["fedavg"](), _parse_shape(shape))
    if choice.kind == "dataset":
        name = options.pop("name")
        return DatasetTrial(
            name,
            Path(data_dir or config["data_dir"]),
            options,
            read_elsewhere,
        )
    options.pop("seed", None)
    read_samples = partial(getattr, data_sets[0], "samples") if data_sets else make_samples
    return PartitionTrial(
        scheme=partition.SCHEMES[group["name"]],
        options=options,
        clients=_parse_clients(clients),
        read_samples=read_samples,
        read_elsewhere=read_elsewhere,
    )


@contextlib.contextmanager
def _prefix_errors(choice: Choice) -> Iterator[None]:
    """Name the choice in errors, and its keys as the command does."""
    try:
        yield
    except FedpflError as error:
        # The command's words have keys without their kind, as `q=2` has.
        raise FedpflError(f"{choice}: {str(error).replace(f'{choice.kind}.', '')}") from None


def _share_settings(command: Command) -> dict[Choice, dict[str, str]]:
    """Return each choice's settings; one without a kind is for all that take it.

    Raises:
        FedpflError: for a key that no choice takes.
    """
    values: dict[Choice, dict[str, str]] = {choice: {} for choice in command.choices}
    keys = {choice: _list_keys(choice) for choice in command.choices}
    for word in command.settings:
        key, _, text = word.partition("=")
        kind, _, key_of_kind = key.partition(".")
        candidates = command.choices
        # `method.q=...` is for the method alone, `q=...` for whatever has a q.
        if kind in REGISTRIES and key_of_kind:
            key = key_of_kind
            candidates = [choice for choice in command.choices if choice.kind == kind]
        takers = [choice for choice in candidates if key in keys[choice]]
        if not takers:
            key_names = dict.fromkeys(name for choice in candidates for name in keys[choice])
            _refuse_key(key, list(key_names), candidates)
        for choice in takers:
            values[choice][key] = text
    return values


def _refuse_key(key: str, key_names: list[str], choices: list[Choice]) -> NoReturn:
    """Raise FedpflError for a key that is none of these names."""
    choice_text = f"{choices[0]}: " if len(choices) == 1 else ""
    try:
        require_known_keys({key: ""}, key_names, "")
    except FedpflError as error:
        raise FedpflError(f"{choice_text}{error}") from None
    raise AssertionError(key)


def _list_keys(choice: Choice) -> list[str]:
    """Return the keys of a choice, of what surrounds its kind, and of its trial."""
    kind = REGISTRIES[choice.kind]
    target = kind.registry.get(choice.name)
    if not target:
        # A YAML file may have another name than the class that it configures.
        target = kind.registry[_compose_choice(choice, {})[choice.kind]["name"]]
    fixed_keys = {*kind.supplied, *FIXED_KEYS[choice.kind]}
    keys: list[str] = []
    for part in (target, *SHARED_OPTIONS.get(choice.kind, ())):
        for name, parameter in inspect.signature(part).parameters.items():
            if name not in fixed_keys and parameter.kind not in VARIADIC:
                keys.append(name)
    keys += TRIAL_KEYS.get(choice.kind, ())
    return list(dict.fromkeys(keys))


def _compose_choice(choice: Choice, values: Mapping[str, str]) -> dict[str, Any]:
    """Return the configuration in which `train` would have the choice and these values.

    Raises:
        FedpflError: for values that cannot be read, or not be composed.
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
    # ++: an option may be absent from the YAML file, whose default then holds.
    value_words = [f"++{choice.kind}.{key}={text}" for key, text in values.items()]
    try:
        return resolve_config(overrides.compose_config([str(choice), *value_words]))
    except overrides.HYDRA_ERRORS as error:
        raise FedpflError(format_error(error)) from None


def _parse_shape(text: str | None) -> tuple[int, ...] | None:
    """Return the shape of a sample as [3,32,32] says it. Raises FedpflError."""
    if text is None:
        return None
    sizes = text.strip("[]() ").split(",")
    if not all(size.strip().isdecimal() and int(size) for size in sizes):
        raise FedpflError(f"shape must be that of a sample, such as [3,32,32], got {text}")
    return tuple(map(int, sizes))


def _parse_clients(text: str | None) -> int | None:
    """Return a number of clients. Raises FedpflError."""
    if text is None:
        return None
    if not (text.isdecimal() and int(text)):
        raise FedpflError(f"clients must be a whole number of 1 or more, got {text}")
    return int(text)


# ---- another process


class OtherProcess:
    """The same command in another process, which hashes otherwise; one answers for all choices."""

    def __init__(self, check_words: Sequence[str]):
        self._check_words = check_words

    def digest(self, choice: Choice) -> str:
        """Return the digest of a choice as it is there, "" where it fails."""
        return self._digests.get(str(choice), "")

    @cached_property
    def _digests(self) -> dict[str, str]:
        seed = os.environ.get("PYTHONHASHSEED", "")
        # Never the seed of this process, nor 0, which turns hashing by chance off.
        other_seed = 1 + int(seed) % 1000 if seed.isdecimal() else 1
        environment = {**os.environ, "PYTHONHASHSEED": str(other_seed)}
        command = [sys.executable, "-m", "fedpfl.check", "--digests", "--", *self._check_words]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        lines = result.stdout.splitlines()
        # A plugin may print, too; the digests are in the last line.
        with contextlib.suppress(ValueError):
            return json.loads(lines[-1]) if lines else {}
        return {}


def digest_of_trial(trial: Any) -> str:
    """Return the digest of a trial's answer; "" where it has none, or fails."""
    with contextlib.suppress(Exception, SystemExit):
        return trial.digest() if hasattr(trial, "digest") else ""
    return ""


# ---- verdicts


def make_judge(kind: str, trial: Any) -> Judge:
    """Return how errors of this kind of trial are described and mended."""
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
