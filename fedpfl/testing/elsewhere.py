"""Another process, for digests: it hashes texts differently, and asks plugins in another order."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from fedpfl.config import plugins
from fedpfl.ground.errors import error_text
from fedpfl.testing.trials import make_trial


class OtherProcess:
    """A process that imports plugins anew; it is started once, for all subjects.

    Args:
        plugin_files: The plugins.
        subjects: By name, arguments of or objects with their own `make_trial`.
    """

    def __init__(self, plugin_files: Sequence[str], subjects: Mapping[str, Any]):
        self._request = {"plugins": [*map(str, plugin_files)], "subjects": dict(subjects)}

    def ask(self, name: str) -> dict[str, str]:
        """Return a subject's digests by name; `error` has the reason where they are absent."""
        return self._answers.get(name) or {"error": "it has no answer"}

    @cached_property
    def _answers(self) -> dict[str, dict[str, str]]:
        seed = os.environ.get("PYTHONHASHSEED", "")
        # Never the seed of this process, nor 0, which turns hashing by chance off.
        other_seed = 1 + int(seed) % 1000 if seed.isdecimal() else 1
        result = subprocess.run(
            [sys.executable, "-c", f"from {__name__} import answer_request; answer_request()"],
            env={**os.environ, "PYTHONHASHSEED": str(other_seed)},
            input=pickle.dumps(self._request),
            capture_output=True,
        )
        # A plugin may print, too; the digests are in the last line.
        lines = result.stdout.decode().splitlines()
        if result.returncode or not lines:
            error_lines = result.stderr.decode().strip().splitlines() or ["it ended"]
            return {name: {"error": error_lines[-1]} for name in self._request["subjects"]}
        answers: dict[str, dict[str, str]] = json.loads(lines[-1])
        return answers


def answer_request() -> None:
    """Read subjects from the standard input, and print their digests."""
    request = pickle.load(sys.stdin.buffer)
    plugins.load_plugins(request["plugins"])
    answers = {}
    for name, subject in reversed(request["subjects"].items()):
        try:
            make = getattr(subject, "make_trial", None)
            trial = make() if make else make_trial(subject)
            answers[name] = trial.digests(is_elsewhere=True)
        except (Exception, SystemExit) as error:
            answers[name] = {"error": error_text(error, with_class=True)}
    print(f"\n{json.dumps(answers)}")
