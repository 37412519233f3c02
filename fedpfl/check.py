"""Check your code: each method, model, data set and partition of a file is tried on its promises.

    fedpfl check mine.py
    fedpfl check mine.py partition=equal dataset=stripes
    fedpfl check dataset=npz dataset.path=mine.npz --quick

The first word is a Python file (docs/extend.md), or a built-in choice; KEY=VALUE are settings as
fedpfl.train takes them, such as method.mu=0.1, and method=NAME, model=NAME, dataset=NAME or
partition=NAME try this alone. --quick tries on one of the backends, and in this process alone. There
is a line for each promise: ok, or the fault, by how much, and how to fix it.

Exit status: 0 all is kept, 1 something is not, 2 the command or the file must be fixed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch

from fedpfl.config import plugins
from fedpfl.config.plugins import PLUGIN_KINDS
from fedpfl.ground import answer
from fedpfl.ground.errors import FedpflError, did_you_mean, escape_controls, shorten_values
from fedpfl.ground.records import Record
from fedpfl.ground.terminal import outlive_readers, print_notice
from fedpfl.ground.words import check_words
from fedpfl.runner.faults import run_guarded
from fedpfl.testing.elsewhere import OtherProcess
from fedpfl.testing.promises import Trial, Untriable, audit
from fedpfl.testing.trials import (
    PROMISES_BY_KIND,
    REGISTRIES,
    Subject,
    list_names,
    make_trial,
    read_subjects,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print, for each choice, a line for each promise; return the exit status."""
    return run_guarded(__doc__, sys.argv[1:] if arguments is None else arguments, _print_checks)


def _print_checks(arguments: Sequence[str]) -> int:
    arguments = check_words(arguments, ("--quick",), "fedpfl check --help tells what it takes")
    target, *values = [word for word in arguments if word != "--quick"] or [""]
    threads = torch.get_num_threads()
    try:
        subjects = find_subjects(target, values)
        other_process = OtherProcess([target] if _is_file(target) else [])
        # Wrong options of any are told before the first is tried.
        trials = [make_trial(subject) for subject in subjects]
        for subject, trial in zip(subjects, trials, strict=True):
            other_process.attach(trial, subject)
        is_quick = "--quick" in arguments
        return max(map(_print_verdicts, subjects, trials, [is_quick] * len(trials)))
    finally:
        torch.set_num_threads(threads)


# ---- subjects of the words


def find_subjects(target: str, words: Sequence[str]) -> list[Subject]:
    """Find the subjects of a command, and load its plugin.

    Args:
        target: A file or a name.
        words: KEY=VALUE, to choose or to set.

    Raises:
        FedpflError: For words that name nothing, or cannot be composed.
    """
    plugins.load_plugins([])  # forgets those of an earlier check in this process
    named: list[tuple[str, str]] = []
    settings: list[str] = []
    for word in words:
        key, sign, value = word.partition("=")
        if not sign:
            raise FedpflError(f"{word} is not KEY=VALUE")
        if key in REGISTRIES:
            named.append((key, value))
        else:
            settings.append(word)
    added: list[tuple[str, str]] = []
    if _is_file(target):
        plugins.load_plugins([target])
        added = _list_added_choices()
        if not added:
            raise FedpflError(
                f"{target} has nothing to try; it needs a dictionary {', '.join(PLUGIN_KINDS)} of"
                " names and values"
            )
    else:
        named.insert(0, _find_choice(target))
    for kind, name in named:
        names = list_names(kind)
        if name not in names:
            raise FedpflError(f"{kind}={name} is no choice{did_you_mean(name, names)}")
    return read_subjects(named or added, settings)


def _list_added_choices() -> list[tuple[str, str]]:
    """List the kinds and names that the loaded plugin has added."""
    choices = [(kind, name) for kind in REGISTRIES for name in REGISTRIES[kind].registry]
    return [choice for choice in choices if plugins.is_from_plugin(*choice)]


def _is_file(word: str) -> bool:
    return word.endswith(".py") or (os.sep in word and "=" not in word)


def _find_choice(word: str) -> tuple[str, str]:
    """Find the choice of a name, or of `kind=name`. Raises FedpflError."""
    kind, _, name = word.partition("=")
    if kind in REGISTRIES:
        return kind, name
    names = {name: kind for kind in reversed(REGISTRIES) for name in list_names(kind)}
    if word not in names:
        raise FedpflError(
            f"{word} is no file, and no method, model, data set or"
            f" partition{did_you_mean(word, names)}"
        )
    return names[word], word


# ---- verdicts


def _print_verdicts(subject: Subject, trial: Trial, is_quick: bool) -> int:
    """Print the verdict on each promise; return the exit status."""
    print(subject)
    broken_count = 0
    verdicts: list[Record] = []
    answer.add_facts(subjects=[{"subject": str(subject), "promises": verdicts}])
    try:
        for promise, faults, advice in audit(trial, PROMISES_BY_KIND[subject.kind], is_quick):
            word = "ok"
            if faults:
                word = "WRONG" if promise.binding else "note"
                broken_count += promise.binding
            told_faults = [escape_controls(shorten_values(fault)) for fault in faults]
            verdicts.append({"promise": promise.title, "verdict": word, "faults": told_faults})
            # The next promise may take a minute.
            print(f"  {word:6}{promise.title}", flush=True)
            # A program is told the last one.
            if word == "WRONG":
                answer.last_error[:] = [f"{subject}: {promise.title}: {told_faults[0]}"]
            for fault in told_faults:
                print(f"        {fault}")
            if advice:
                print(f"        {advice}")
    except Untriable as error:
        print_notice(f"{subject}: {error}")
        return 2
    print(f"  {broken_count} not kept" if broken_count else "  all is kept")
    return int(broken_count > 0)


if __name__ == "__main__":
    outlive_readers()
    answer.run_command(main)
