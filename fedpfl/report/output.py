"""What the commands share: their numbers, and where tables go, to the terminal or to files."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable

from fedpfl.report.load import to_stderr
from fedpfl.report.tables import FORMATS


def positive(text: str) -> int:
    """A whole number of at least 1, from the command line."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def write(name: str, rendered: Callable[[str, int | None], str], options: argparse.Namespace) -> None:
    """Print a table, or write it below `options.out` in `options.format`, by default in all but the terminal's.

    rendered: the table as text, given a form and the width of the terminal.
    """
    # A window of this width folds long cells; a file or pipe gets whole lines.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if options.format in (None, "terminal") or not options.out:
        print(rendered(options.format or "terminal", width), end="")
    if not options.out:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for form in [options.format] if options.format else [form for form in FORMATS if form != "terminal"]:
        target = options.out / f"{name}{FORMATS[form]}"
        target.write_text(rendered(form, None), encoding="utf-8")
        to_stderr(f"wrote {target}")
