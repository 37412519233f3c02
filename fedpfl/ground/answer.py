"""A command's answer: text for people, or with --json one JSON object (answer.schema.json)."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from fedpfl import __version__
from fedpfl.ground.errors import error_text
from fedpfl.ground.records import Record

JSON_OPTION = "--json"
_facts: Record = {}
_errors: list[str] = []


def add_facts(**facts: Any) -> None:
    """Add facts to the answer; lists of one name are joined."""
    for name, value in facts.items():
        if isinstance(value, list):
            _facts.setdefault(name, []).extend(value)
        else:
            _facts[name] = value


def note_error(text: str) -> None:
    """Keep a line that the answer tells if the command fails; the last one counts."""
    _errors[:] = [text]


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command, and exit if its status is not 0; with --json stdout has its answer alone."""
    status: Any
    if JSON_OPTION not in sys.argv:
        status = main()
        if status:
            sys.exit(status)
        return
    sys.argv = [word for word in sys.argv if word != JSON_OPTION]
    _facts.clear()
    _errors.clear()
    # What is printed for people, by child processes too, goes to standard error.
    sys.stdout.flush()
    standard_output = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            status = main() or 0
    except SystemExit as ending:
        status = ending.code or 0
    except BaseException as error:
        traceback.print_exc()
        note_error(error_text(error, with_class=True))
        status = 1
    os.dup2(standard_output, 1)
    os.close(standard_output)
    # Processes of torchrun share one standard output.
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(_make_answer(status), allow_nan=False), flush=True)
    if status:
        sys.exit(status)


def _make_answer(status: int) -> Record:
    answer = {"fedpfl": __version__, "status": status, **make_plain(_facts)}
    if status:
        message = _errors[0] if _errors else "the facts beside this say what failed"
        answer["error"] = {"message": message, "status": status}
    return answer


def make_plain(value: Any) -> Any:
    """Make a value of what JSON holds: null for numbers that are not finite, texts for paths."""
    if isinstance(value, Mapping):
        return {str(key): make_plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [make_plain(part) for part in value]
    # NumPy's numbers become Python's.
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)
