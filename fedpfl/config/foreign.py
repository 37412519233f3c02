"""Commands that somebody else wrote, such as a row of a board has: nothing of them is executed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException

from fedpfl.config.choices import OPTIONAL_GROUPS, list_choices
from fedpfl.ground.errors import FedpflError

PREFIX = ["python", "-m", "fedpfl.train", "-m"]
"""How the command of a row begins."""
SETTINGS = (
    *("rounds", "clients", "participation", "metrics"),
    *("validation", "unseen", "unseen_groups"),
)
"""Settings of a run that a row may give a value; others say where a run lies and what it may do."""
CHOSEN = (
    "dataset",
    "partition",
    "model",
    "adapter",
    "method",
    "privacy",
    "attack",
    "defence",
    "system",
    "shift",
    *OPTIONAL_GROUPS,
)
"""Groups of which a row may choose what comes along with the package."""
WITH_KEYS = (*CHOSEN, "local", "eval", "stopping", "augment", "engine", "checkpoint")
PATHS = re.compile(
    r"(^|_)(path|file|files|weights|folder|root|dir|directory|download|secret|hooks?|target)($|_)"
)
"""Keys that name a file of this machine, or code."""
KEY = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][A-Za-z0-9_]*)*")
NAMES = ("name", "title", "groups", "table")
"""Keys that come with a choice, and that nobody sets."""
TEXT = re.compile(r"[\w+-]+", re.ASCII)
"""No dot, with which a name could be a file's, as in `system.profile=devices.csv`."""
LARGEST = {"rounds": 10_000, "clients": 100_000}
"""What a row may ask of this machine at most."""
LARGEST_NUMBER = 1_000_000
MOST_SEEDS = 100


class ForeignRuns(NamedTuple):
    """Hold the words of a stranger's runs, which differ by seed."""

    run_words: list[str]
    seeds: list[int]


def read_untrusted_command(command: str) -> ForeignRuns:
    """Return the words and seeds of `python -m fedpfl.train -m KEY=VALUE ... seed=1,2`.

    Raises:
        FedpflError: for anything but known keys and groups with plain values: what Hydra itself or
            a plugin would execute, files of this machine, sweeps, interpolations, and more than a
            run of a board can want.
    """
    try:
        command_words = shlex.split(command)
    except ValueError:
        raise FedpflError("the row's command cannot be split into words") from None
    if command_words[:4] != PREFIX or not command_words[4:]:
        raise FedpflError(f"the row's command is not {' '.join(PREFIX)} KEY=VALUE ... seed=...")
    *run_words, seed_word = command_words[4:]
    return ForeignRuns(check_words(run_words), _read_seeds(seed_word))


def check_words(run_words: Sequence[str]) -> list[str]:
    """Return words of a run that are nothing but known keys with plain values.

    Raises:
        FedpflError: for other words.
    """
    keys: set[str] = set()
    for word in run_words:
        key = _check_word(word)
        if key in keys:
            raise _refusal(word, "gives its key a second time")
        keys.add(key)
    return list(run_words)


def _check_word(word: str) -> str:
    """Return the key of a word. Raises FedpflError."""
    key = word.partition("=")[0]
    group = key.partition(".")[0]
    if not KEY.fullmatch(key):
        raise _refusal(word, "is no plain key")
    if "." in key and key.rpartition(".")[2] in NAMES:
        raise _refusal(word, "comes with the choice of its group")
    # A row could otherwise read or overwrite files here, or have code imported (`_target_`).
    if PATHS.search(key.rpartition(".")[2]):
        raise _refusal(word, "names a file or an address")
    allowed = WITH_KEYS if "." in key else (*SETTINGS, *CHOSEN, "engine")
    # Other keys of `checkpoint` decide what is written on this machine, and how often.
    if group not in allowed or (group == "checkpoint" and key != "checkpoint.keep"):
        raise _refusal(word, "is no key of a board's run")
    value = _parse_value(word)
    if key in CHOSEN and value not in list_choices(key):
        raise _refusal(word, f"chooses what fedpfl has not brought along in {key}")
    if not _is_plain(value):
        raise _refusal(word, "has no plain value")
    largest = LARGEST.get(key)
    if largest and not (isinstance(value, int) and value <= largest):
        raise _refusal(word, f"is more than {largest:,}")
    return key


def _parse_value(word: str) -> object:
    """Return the value of a word as Hydra reads it. Raises FedpflError for a sweep."""
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:
        raise _refusal(word, "cannot be read") from None
    if override.type is not OverrideType.CHANGE or override.is_sweep_override():
        raise _refusal(word, "is more than one value of a key")
    return override.value()


def _is_plain(value: object) -> bool:
    """Return whether a value is a number, bool, null, name, or list of such."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, str):
        return TEXT.fullmatch(value) is not None
    if isinstance(value, int | float):  # a bool is one
        return abs(value) <= LARGEST_NUMBER
    return value is None


def _read_seeds(word: str) -> list[int]:
    key, _, text = word.partition("=")
    seeds = text.split(",")
    # Nine digits stay below 2**32, the largest seed.
    are_numbers = all(re.fullmatch(r"\d{1,9}", seed) for seed in seeds)
    if key != "seed" or not are_numbers or len(seeds) > MOST_SEEDS:
        raise FedpflError(
            f"the row's command must end in seed=NUMBER,NUMBER,... (at most {MOST_SEEDS}), got"
            f" {word!r}"
        )
    return [int(seed) for seed in seeds]


def _refusal(word: str, reason: str) -> FedpflError:
    return FedpflError(
        f"the row's command is not run: {word!r} {reason}; a row may hold known keys and groups"
        " with plain values alone"
    )
