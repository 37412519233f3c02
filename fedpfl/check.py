"""Check your code: `fedpfl check mine.py` tries each choice of a file on its promises.

Exit status: 0 all is kept, 1 something is not, 2 the command or the file must be fixed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedpfl.config import plugins
from fedpfl.config.plugins import PLUGIN_KINDS
from fedpfl.ground.errors import FedpflError, did_you_mean, escape_controls, shorten_values
from fedpfl.ground.terminal import Parser, outlive_readers, print_notice
from fedpfl.testing.elsewhere import OtherProcess
from fedpfl.testing.promises import Untriable, audit
from fedpfl.testing.trials import (
    PROMISES_BY_KIND,
    REGISTRIES,
    Subject,
    list_names,
    make_trial,
    read_subjects,
)


def main(arguments: list[str] | None = None) -> int:
    """Print, for each choice, a line for each promise; return the exit status."""
    options = _make_parser().parse_intermixed_args(arguments)
    threads = torch.get_num_threads()
    try:
        subjects = find_subjects(options.what, options.values)
        files = [options.what] if _is_file(options.what) else []
        other_process = OtherProcess(files, {str(subject): subject for subject in subjects})
        # Wrong options of any are told before the first is tried.
        trials = [
            make_trial(subject, partial(other_process.ask, str(subject))) for subject in subjects
        ]
        return max(
            _print_verdicts(subject, trial, options.quick)
            for subject, trial in zip(subjects, trials, strict=True)
        )
    except FedpflError as error:
        print_notice(error)
        return 2
    finally:
        torch.set_num_threads(threads)


def _make_parser() -> Parser:
    # ---- Step 1: its purpose.
    parser = Parser(
        prog="fedpfl check",
        description=(
            "Try methods, models, data sets and partitions, your own or built-in ones, on their"
            " promises. A line for each promise: ok, or the fault, by how much, and how to fix it."
        ),
        epilog=(
            "Examples: fedpfl check mine.py; fedpfl check mine.py partition=equal dataset=stripes;"
            " fedpfl check dataset=npz dataset.path=mine.npz"
        ),
    )

    # ---- Step 2: its arguments.
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
            "settings as `fedpfl.train` takes them, such as method.mu=0.1; method=NAME, model=NAME,"
            " dataset=NAME or partition=NAME try this alone"
        ),
    )
    parser.add_argument(
        "--quick", action="store_true", help="on one of the backends, and in this process alone"
    )
    return parser


# ---- subjects of the words


def find_subjects(target: str, words: Sequence[str]) -> list[Subject]:
    """Find the subjects of a command, and load its plugin.

    Args:
        target: A file or a name.
        words: KEY=VALUE, to choose or to set.

    Raises:
        FedpflError: For words that name nothing, or cannot be composed.
    """
    if unfit := next((word for word in words if "=" not in word), None):
        raise FedpflError(f"{unfit} is not KEY=VALUE")
    plugins.load_plugins([])  # forgets those of an earlier check in this process
    pairs = [tuple(word.split("=", 1)) for word in words]
    named = [(key, name) for key, name in pairs if key in REGISTRIES]
    settings = [f"{key}={text}" for key, text in pairs if key not in REGISTRIES]
    added: list[tuple[str, str]] = []
    if _is_file(target):
        added = _load_plugin(target)
    else:
        named.insert(0, _find_choice(target))
    for kind, name in named:
        names = list_names(kind)
        if name not in names:
            raise FedpflError(f"{kind}={name} is no choice{did_you_mean(name, names)}")
    return read_subjects(named or added, settings)


def _load_plugin(file: str) -> list[tuple[str, str]]:
    """Load a file and list the choices that it adds. Raises FedpflError where it adds none."""
    plugins.load_plugins([file])
    choices = [
        (kind, name)
        for kind in REGISTRIES
        for name in REGISTRIES[kind].registry
        if plugins.is_from_plugin(kind, name)
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
    # A file named like a choice, say `fedper`, was not meant.
    return word.endswith(".py") or os.sep in word or (Path(word).is_file() and not _kinds_of(word))


def _find_choice(word: str) -> tuple[str, str]:
    """Find the choice of a name, or of `kind=name`. Raises FedpflError."""
    kind, sign, name = word.partition("=")
    if sign and kind in REGISTRIES:
        return kind, name
    kinds = _kinds_of(word)
    if not kinds:
        names = {name for group in REGISTRIES for name in list_names(group)}
        raise FedpflError(
            f"{word} is no file, and no method, model, data set or"
            f" partition{did_you_mean(word, names)}"
        )
    if len(kinds) > 1:
        words_to_write = " or ".join(f"{group}={word}" for group in kinds)
        raise FedpflError(f"{word} is of several kinds; write {words_to_write}")
    return kinds[0], word


def _kinds_of(name: str) -> list[str]:
    return [group for group in REGISTRIES if name in list_names(group)]


# ---- verdicts


def _print_verdicts(subject: Subject, trial: Any, quick: bool) -> int:
    """Print the verdict on each promise; return the exit status."""
    # ---- A line for each promise, as soon as it has been tried.
    print(subject)
    broken_count = 0
    promises = PROMISES_BY_KIND[subject.kind]
    try:
        for promise, faults, advice in audit(trial, promises, quick):
            word = "ok"
            if faults:
                word = "WRONG" if promise.binding else "note"
            # The next promise may take a minute.
            print(f"  {word:6}{promise.title}", flush=True)
            for fault in faults:
                print(f"        {escape_controls(shorten_values(fault))}")
            if advice:
                print(f"        {advice}")
            if faults and promise.binding:
                broken_count += 1
    except Untriable as error:
        print_notice(f"{subject}: {error}")
        return 2

    # ---- And one for all.
    if broken_count:
        print(f"  {broken_count} not kept")
        return 1
    print("  all is kept")
    return 0


if __name__ == "__main__":
    outlive_readers()
    sys.exit(main())
