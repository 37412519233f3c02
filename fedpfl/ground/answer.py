"""A command's answer: text for people, or with --json one JSON object (answer.schema.json)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from fedpfl import __version__
from fedpfl.ground.records import Record

_facts: dict[str, list[Any]] = {}
last_error = [""]
"""The last line for the user, which is the answer if the command fails."""


def add_facts(**facts: list[Any]) -> None:
    """Add facts to the answer, behind earlier ones of their names."""
    for name, values in facts.items():
        _facts.setdefault(name, []).extend(values)


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command, and exit if its status is not 0.

    With --json standard output has its answer alone.
    """
    if "--json" not in sys.argv:
        if status := main():
            sys.exit(status)
        return
    sys.argv = [word for word in sys.argv if word != "--json"]
    _facts.clear()
    last_error[:] = ["the facts beside this say what failed"]
    # Text for people, of child processes too, goes to standard error.
    sys.stdout.flush()
    standard_output = os.dup(1)
    os.dup2(2, 1)
    end_status: Any
    try:
        end_status = main() or 0
    except SystemExit as ending:
        end_status = ending.code or 0
    sys.stdout.flush()
    os.dup2(standard_output, 1)
    answer: Record = {"fedpfl": __version__, "status": end_status, **_facts}
    if end_status:
        answer["error"] = {"message": last_error[0], "status": end_status}
    print(json.dumps(make_plain(answer)), flush=True)
    sys.exit(end_status)


def make_plain(value: Any) -> Any:
    """Make a value of what JSON holds: null for numbers that are not finite, texts for paths."""
    text = json.dumps(value, default=lambda one: one.item() if hasattr(one, "item") else str(one))
    return json.loads(text, parse_constant=lambda name: None)
