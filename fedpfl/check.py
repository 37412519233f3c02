"""Check what is yours: `fedpfl check mine.py` tries each choice of a file on its promises.

Exit status: 0 all is kept, 1 something is not, 2 the command or the file is to be mended.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fedpfl.config import plugins
from fedpfl.config.plugins import PLUGIN_KINDS
from fedpfl.ground.errors import FedpflError, did_you_mean, escape_controls, shorten_values
from fedpfl.ground.terminal import Parser, outlive_readers, print_notice
from fedpfl.testing.promises import Untriable
from fedpfl.testing.trials import (
    KIND_TITLES,
    PROMISES_BY_KIND,
    REGISTRIES,
    Choice,
    Command,
    OtherProcess,
    audit_trial,
    choice_names,
    digest_of_trial,
    make_trials,
)


def main(arguments: list[str] | None = None) -> int:
    """Print, for each choice, a line for each promise; return the exit status."""
    options = _make_parser().parse_intermixed_args(arguments)
    threads = torch.get_num_threads()
    try:
        command = read_command(options.what, options.values)
        trials = make_trials(
            command,
            OtherProcess([options.what, *options.values]),
        )
        if options.digests:
            digests = {str(choice): digest_of_trial(trial) for choice, trial in trials.items()}
            print(json.dumps(digests))
            return 0
        statuses = [
            _print_verdicts(choice, trial, options.quick) for choice, trial in trials.items()
        ]
        return max(statuses)
    except FedpflError as error:
        print_notice(error)
        return 2
    finally:
        torch.set_num_threads(threads)


def _make_parser() -> Parser:
    # ---- Step 1: what the command is for.
    parser = Parser(
        prog="fedpfl check",
        description=(
            "Try methods, models, data sets and partitions, your own or built-in ones, for what"
            " they must keep to. A line for each promise: ok, or what is wrong, by how much, and"
            " what to do."
        ),
        epilog=(
            "Examples: fedpfl check mine.py; fedpfl check mine.py partition=equal dataset=stripes;"
            " fedpfl check dataset=npz path=mine.npz"
        ),
    )

    # ---- Step 2: what it takes.
    parser.add_argument(
        "what",
        help=(
            "a Python file (docs/extend.md), or a name of fedpfl's own, where need be as"
            " dataset=NAME"
        ),
    )
    parser.add_argument(
        "values",
        nargs="*",
        metavar="KEY=VALUE",
        help=(
            "options in place of the defaults; method=NAME, model=NAME, dataset=NAME or"
            " partition=NAME try this alone"
        ),
    )
    parser.add_argument(
        "--quick", action="store_true", help="on one of the backends, and in this process alone"
    )
    # The other process of a check is this command; it prints what the first one compares.
    parser.add_argument("--digests", action="store_true", help=argparse.SUPPRESS)
    return parser


# ---- what is tried


def read_command(target: str, values: Sequence[str]) -> Command:
    """Return the choices and settings of the command, plugins loaded. Raises FedpflError.

    Args:
        target: a file or a name.
        values: words KEY=VALUE, of which some choose.
    """
    # ---- Step 1: words that choose, and words that set.
    choices_by_name: list[Choice] = []
    settings: list[str] = []
    for word in values:
        key, sign, text = word.partition("=")
        if not sign:
            raise FedpflError(f"{word} is not KEY=VALUE")
        if key in REGISTRIES:
            choices_by_name.append(Choice(key, text))
        else:
            settings.append(word)

    # ---- Step 2: a file's choices, or the one that is named first.
    plugins.load_plugins([])  # forgets those of an earlier check in this process
    if target.endswith(".npz"):
        raise FedpflError(
            f"{target} is a data set's archive: fedpfl check dataset=npz path={target}"
        )
    choices_of_file: list[Choice] = []
    if _is_file(target):
        choices_of_file = _load_plugin(target)
    else:
        choices_by_name.insert(0, _find_choice(target))
    for choice in choices_by_name:
        names = choice_names(choice.kind)
        if choice.name not in names:
            raise FedpflError(f"{choice} is no choice{did_you_mean(choice.name, names)}")
    choices = choices_by_name or choices_of_file
    return Command(choices, settings, by_name=bool(choices_by_name))


def _load_plugin(file: str) -> list[Choice]:
    """Return the choices that a file adds. Raises FedpflError where it adds none."""
    names_before = {group: {*kind.registry} for group, kind in REGISTRIES.items()}
    plugins.load_plugins([file])
    choices = [
        Choice(group, name)
        for group, kind in REGISTRIES.items()
        for name in kind.registry
        if name not in names_before[group]
    ]
    if not choices:
        raise FedpflError(
            f"{file} has nothing to try; it needs a dictionary {', '.join(PLUGIN_KINDS)} of names"
            " and values"
        )
    return choices


def _is_file(word: str) -> bool:
    kind = word.partition("=")[0]
    if kind in REGISTRIES and "=" in word:
        return False
    # A file named like a choice, say `fedper`, is not what was meant.
    return word.endswith(".py") or os.sep in word or (Path(word).is_file() and not _kinds_of(word))


def _find_choice(word: str) -> Choice:
    """Return the choice of a name, or of `kind=name`. Raises FedpflError."""
    kind, sign, name = word.partition("=")
    if sign and kind in REGISTRIES:
        return Choice(kind, name)
    kinds = _kinds_of(word)
    if not kinds:
        names = {name for group in REGISTRIES for name in choice_names(group)}
        raise FedpflError(
            f"{word} is no file, and no method, model, data set or"
            f" partition{did_you_mean(word, names)}"
        )
    if len(kinds) > 1:
        titles = " and ".join(KIND_TITLES[group] for group in kinds)
        words_to_write = " or ".join(f"{group}={word}" for group in kinds)
        raise FedpflError(f"{word} is {titles}; write {words_to_write}")
    return Choice(kinds[0], word)


def _kinds_of(name: str) -> list[str]:
    return [group for group in REGISTRIES if name in choice_names(group)]


# ---- verdicts


def _print_verdicts(choice: Choice, trial: Any, quick: bool) -> int:
    """Print what is kept and what not; return the exit status."""
    # ---- A line for each promise, as soon as it has been tried.
    print(choice)
    broken_count = 0
    promises = [
        promise for promise in PROMISES_BY_KIND[choice.kind] if not (quick and promise.slow)
    ]
    try:
        for promise, faults, mend in audit_trial(choice, trial, quick):
            word = "ok"
            if faults:
                word = "WRONG" if promise.binding else "note"
            # The next promise may take a minute.
            print(f"  {word:6}{promise.title}", flush=True)
            for fault in faults:
                print(f"        {escape_controls(shorten_values(fault))}")
            if mend:
                print(f"        {mend}")
            if faults and promise.binding:
                broken_count += 1
    except Untriable as error:
        print_notice(f"{choice}: {error}")
        return 2

    # ---- And one for all.
    if broken_count:
        print(f"  {broken_count} of {len(promises)} not kept")
        return 1
    print("  all is kept")
    return 0


if __name__ == "__main__":
    outlive_readers()
    sys.exit(main())
