"""Another process, for digests: it hashes texts differently, and asks plugins in another order."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property

from fedpfl.config import plugins
from fedpfl.ground.errors import error_text
from fedpfl.testing.promises import Trial, Unkept
from fedpfl.testing.trials import Subject, make_trial


class OtherProcess:
    """A process that imports plugins anew; it is started once, for all subjects.

    Args:
        plugin_files: The plugins.
    """

    def __init__(self, plugin_files: Sequence[str]):
        self._plugin_files = [*map(str, plugin_files)]
        self._subjects: list[Subject] = []

    def attach(self, trial: Trial, subject: Subject) -> None:
        """Have a trial of a subject ask this process."""
        number = len(self._subjects)
        trial.ask_elsewhere = lambda: self._subject_digests[number]
        self._subjects.append(subject)

    @cached_property
    def _subject_digests(self) -> list[dict[str, str]]:
        """Each subject's digests by name; `error` has the reason where they are absent."""
        seed = os.environ.get("PYTHONHASHSEED", "")
        # Never the seed of this process, nor 0, which turns hashing by chance off.
        other_seed = 1 + int(seed) % 1000 if seed.isdecimal() else 1
        result = subprocess.run(
            [sys.executable, "-c", f"from {__name__} import answer_request; answer_request()"],
            env={**os.environ, "PYTHONHASHSEED": str(other_seed)},
            input=pickle.dumps([self._plugin_files, self._subjects]),
            capture_output=True,
        )
        # A plugin may print, too; the digests are in the last line.
        lines = result.stdout.decode().splitlines()
        if result.returncode or not lines:
            reason = (result.stderr.decode().strip().splitlines() or ["it ended"])[-1]
            return [{"error": reason}] * len(self._subjects)
        answers: list[dict[str, str]] = json.loads(lines[-1])
        return answers


def answer_request() -> None:
    """Read subjects from the standard input, and print their digests."""
    plugin_files, subjects = pickle.load(sys.stdin.buffer)
    plugins.load_plugins(plugin_files)
    answers = []
    for subject in reversed(subjects):
        try:
            answers.append(make_trial(subject).digests(is_elsewhere=True))
        except (Exception, SystemExit) as error:
            answers.append({"error": error_text(error, with_class=True)})
    print(f"\n{json.dumps(answers[::-1])}")


def require_equal_to_class(what: str, against: str, *words: str) -> None:
    """Raise Unkept where a method parts from the class that it was ported from.

    Args:
        what: A plugin's file, or the name of a method.
        against: Checkout and class, `PFLlib:FedX`.
        words: Further ones of `fedpfl oracle`.
    """
    command = [sys.executable, "-m", "fedpfl.oracle", what, "--against", against, *words]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise Unkept((result.stdout or result.stderr).strip())
