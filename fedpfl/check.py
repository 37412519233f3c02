"""Check what is yours: `fedpfl check mine.py` tries each method, model, data set and partition on
its promises.

Exit status: 0 all is kept, 1 something is not, 2 the command or the file is to be mended.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from fedpfl import models
from fedpfl.config import overrides, plan, plugins
from fedpfl.config.choices import list_choices
from fedpfl.config.messages import format_error
from fedpfl.config.plugins import PLUGIN_KINDS
from fedpfl.config.schema import ModelOptions
from fedpfl.data import datasets, partition
from fedpfl.ground.checks import build_dataclass, require_known_keys, without_name
from fedpfl.ground.errors import FedpflError, did_you_mean, escape_controls, shorten_values
from fedpfl.ground.terminal import Parser, outlive_readers, print_notice
from fedpfl.methods import METHODS
from fedpfl.testing import method_promises as contract
from fedpfl.testing.dataset_promises import DATASET_PROMISES, DatasetTrial, describe_reading_error
from fedpfl.testing.method_promises import METHOD_PROMISES
from fedpfl.testing.network_promises import NETWORK_PROMISES, NetworkTrial
from fedpfl.testing.partition_promises import PARTITION_PROMISES, PartitionTrial, make_samples
from fedpfl.testing.promises import Promise, Untriable, Verdict, audit

PROMISES_BY_KIND: dict[str, list[Promise]] = {
    "method": METHOD_PROMISES,
    "model": NETWORK_PROMISES,
    "dataset": DATASET_PROMISES,
    "partition": PARTITION_PROMISES,
}
"""What each kind of choice is tried on."""
REGISTRIES = {kind.group: kind for kind in PLUGIN_KINDS.values()}
BESIDE: dict[str, tuple[Callable[..., Any], ...]] = {
    "model": (ModelOptions,),
    "dataset": (datasets.load_samples,),
}
"""What takes options beside the choice itself."""
TRIED_WITH = {"model": ("shape",), "dataset": ("data_dir",), "partition": ("clients",)}
"""Keys that are no options of the choice, but of the trial."""
NOT_CHOSEN = {
    "method": (),
    "model": (),
    "dataset": ("name", "data_dir", "options"),
    "partition": ("seed",),
}
WORDS = {
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


def main(words: list[str] | None = None) -> int:
    """Print, for each choice, a line for each promise; return the exit status."""
    parser = Parser(
        prog="fedpfl check",
        description="Try methods, models, data sets and partitions, your own or built-in ones, for what they must keep "
        "to. A line for each promise: ok, or what is wrong, by how much, and what to do.",
        epilog="Examples: fedpfl check mine.py; fedpfl check mine.py partition=equal dataset=stripes; fedpfl check "
        "dataset=npz path=mine.npz",
    )
    parser.add_argument(
        "what",
        help="a Python file (docs/extend.md), or a name of fedpfl's own, where need be as dataset=NAME",
    )
    parser.add_argument(
        "values",
        nargs="*",
        metavar="KEY=VALUE",
        help="options in place of the defaults; method=NAME, model=NAME, dataset=NAME or partition=NAME try this alone",
    )
    parser.add_argument(
        "--quick", action="store_true", help="on one of the backends, and in this process alone"
    )
    parser.add_argument("--digests", action="store_true", help=argparse.SUPPRESS)
    chosen, threads = parser.parse_intermixed_args(words), torch.get_num_threads()
    try:
        command = read_command(chosen.what, chosen.values)
        trials = make_trials(command, OtherProcess([chosen.what, *chosen.values]))
        if chosen.digests:
            print(json.dumps({str(choice): _digest(trial) for choice, trial in trials.items()}))
            return 0
        return max(
            [_print_verdicts(choice, trial, chosen.quick) for choice, trial in trials.items()]
        )
    except FedpflError as error:
        print_notice(error)
        return 2
    finally:
        torch.set_num_threads(threads)


# ---- what is tried


def read_command(what: str, values: Sequence[str]) -> Command:
    """Return what is asked for, plugins loaded. Raises FedpflError."""
    named: list[Choice] = []
    settings: list[str] = []
    for word in values:
        key, sign, text = word.partition("=")
        if not sign:
            raise FedpflError(f"{word} is not KEY=VALUE")
        if key in REGISTRIES:
            named.append(Choice(key, text))
        else:
            settings.append(word)
    plugins.load_plugins([])
    if what.endswith(".npz"):
        raise FedpflError(f"{what} is a data set's archive: fedpfl check dataset=npz path={what}")
    if _is_file(what):
        added = _load_plugin(what)
    else:
        added, named = [], [_find_choice(what), *named]
    for choice in named:
        if choice.name not in (known := _names_of(choice.kind)):
            raise FedpflError(f"{choice} is no choice{did_you_mean(choice.name, known)}")
    return Command(named or added, settings, by_name=bool(named))


def _load_plugin(file: str) -> list[Choice]:
    """Return what a file adds. Raises FedpflError."""
    before = {group: {*kind.registry} for group, kind in REGISTRIES.items()}
    plugins.load_plugins([file])
    added = [Choice(group, name) for group, kind in REGISTRIES.items() for name in kind.registry]
    added = [choice for choice in added if choice.name not in before[choice.kind]]
    if not added:
        needed = ", ".join(PLUGIN_KINDS)
        raise FedpflError(
            f"{file} has nothing to try; it needs a dictionary {needed} of names and values"
        )
    return added


def _is_file(word: str) -> bool:
    kind = word.partition("=")[0]
    if kind in REGISTRIES and "=" in word:
        return False
    return word.endswith(".py") or os.sep in word or (Path(word).is_file() and not _kinds_of(word))


def _find_choice(word: str) -> Choice:
    """Return the choice of the name, `kind=name` where several kinds have it. Raises FedpflError."""
    kind, sign, name = word.partition("=")
    if sign and kind in REGISTRIES:
        return Choice(kind, name)
    kinds = _kinds_of(word)
    if not kinds:
        every = {name for group in REGISTRIES for name in _names_of(group)}
        raise FedpflError(
            f"{word} is no file, and no method, model, data set or partition{did_you_mean(word, every)}"
        )
    if len(kinds) > 1:
        either = " and ".join(WORDS[group] for group in kinds)
        raise FedpflError(
            f"{word} is {either}; write {' or '.join(f'{group}={word}' for group in kinds)}"
        )
    return Choice(kinds[0], word)


def _kinds_of(name: str) -> list[str]:
    return [group for group in REGISTRIES if name in _names_of(group)]


def _names_of(group: str) -> set[str]:
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
        with _about(choice):
            trials[choice] = _make_trial(choice, values[choice], elsewhere, named)
    return {choice: trials[choice] for choice in command.choices}


def _make_trial(
    choice: Choice,
    values: dict[str, str],
    elsewhere: OtherProcess,
    data_sets: Sequence[DatasetTrial],
) -> Any:
    """Return what is tried. Raises FedpflError."""
    clients, data_dir, shape = (values.pop(key, None) for key in ("clients", "data_dir", "shape"))
    config = _compose(choice, values)
    group, read = config[choice.kind], partial(elsewhere.digest, choice)
    if choice.kind == "method":
        return build_dataclass(METHODS[group["name"]], without_name(group), "")
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
def _about(choice: Choice) -> Iterator[None]:
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
    keys = {choice: _keys_of(choice) for choice in command.choices}
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


def _keys_of(choice: Choice) -> list[str]:
    """Return the keys of a choice, of what surrounds its kind, and of its trial."""
    kind, group = REGISTRIES[choice.kind], choice.kind
    named = kind.registry.get(choice.name) or kind.registry[_compose(choice, {})[group]["name"]]
    fixed = {*kind.given, *NOT_CHOSEN[group]}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    keys = [
        name
        for part in (named, *BESIDE.get(group, ()))
        for name, parameter in inspect.signature(part).parameters.items()
        if name not in fixed and parameter.kind not in variable
    ]
    return [*dict.fromkeys([*keys, *TRIED_WITH.get(group, ())])]


def _compose(choice: Choice, values: Mapping[str, str]) -> dict[str, Any]:
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


def _digest(trial: Any) -> str:
    """Return what tells a trial's answer from others; "" where it has none, or fails."""
    with contextlib.suppress(Exception, SystemExit):
        return trial.digest() if hasattr(trial, "digest") else ""
    return ""


# ---- verdicts


def _find_verdicts(choice: Choice, trial: Any, quick: bool) -> Iterable[Verdict]:
    if choice.kind == "method":
        return contract.audit(trial, quick)
    promises = PROMISES_BY_KIND[choice.kind]
    if choice.kind == "dataset":
        return audit(trial, promises, quick, describe_reading_error)
    return audit(trial, promises, quick)


def _print_verdicts(choice: Choice, trial: Any, quick: bool) -> int:
    """Print what is kept and what not; return the exit status."""
    print(choice)
    wrong = 0
    promises = [
        promise for promise in PROMISES_BY_KIND[choice.kind] if not (quick and promise.slow)
    ]
    try:
        for promise, faults, mend in _find_verdicts(choice, trial, quick):
            word = "ok" if not faults else "WRONG" if promise.binding else "note"
            print(f"  {word:6}{promise.words}", flush=True)
            for fault in faults:
                print(f"        {escape_controls(shorten_values(fault))}")
            if mend:
                print(f"        {mend}")
            wrong += bool(faults) and promise.binding
    except Untriable as error:
        print_notice(f"{choice}: {error}")
        return 2
    print(f"  {wrong} of {len(promises)} not kept" if wrong else "  all is kept")
    return int(wrong > 0)


if __name__ == "__main__":
    outlive_readers()
    sys.exit(main())
