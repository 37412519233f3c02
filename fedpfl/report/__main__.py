"""Tables and figures from run directories: `python -m fedpfl.report [tables|figures] [ROOT ...]`; see `--help`."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fedpfl.errors import FedpflError
from fedpfl.report.load import Run, runs, to_stderr
from fedpfl.report.output import positive, write
from fedpfl.report.tables import FORMATS, SELECTIONS, Table, accuracy_table, curve_table, render

COMMANDS = ("tables", "figures")
OWN = {"paper": "paper", "compare": "compare", "html": "html", "ls": "listing", "clean": "cleaning"}
"""Commands with a module of their own, which has a `main`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, or 2 for a mistake of the user's."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] in OWN:
            return importlib.import_module(f"fedpfl.report.{OWN[words[0]]}").main(words[1:])
        return _tables_and_figures(words)
    except FedpflError as error:
        to_stderr(f"error: {error}")
        return 2


def _tables_and_figures(words: list[str]) -> int:
    wanted = (words.pop(0),) if words and words[0] in COMMANDS else COMMANDS
    options = _parser().parse_args(words)
    found = runs(*options.roots)
    if not found:
        raise FedpflError(
            f"no runs found below {', '.join(map(str, options.roots))}; "
            "run `python -m fedpfl.train` first or name another folder"
        )
    if "tables" in wanted:
        _tables(found, options)
    if "figures" in wanted:
        _figures(found, options)
    if options.paper:
        from fedpfl.report import paper

        only = ("--only", *wanted) if len(wanted) == 1 else ()
        every = options.every if options.every > 1 else None  # else the paper's own
        names = {"--format": options.format, "--out": options.out, "--select": options.select, "--every": every}
        given = [str(word) for name, value in names.items() if value is not None for word in (name, value)]
        paper.show([*map(str, options.roots), *only, *given], found)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fedpfl.report",
        usage="%(prog)s [tables|figures] [ROOT ...] [options]",
        description="Tables and figures from run directories. Without a word of what: both.",
    )
    parser.add_argument(
        "roots", nargs="*", metavar="ROOT", type=Path, default=[Path("outputs")], help="default: outputs"
    )
    parser.add_argument("--format", choices=FORMATS, help="of tables; default: terminal, with --out all others")
    parser.add_argument(
        "--select",
        choices=SELECTIONS,
        default="last",
        help="which evaluation is judged; best-checkpoint looks at test data, as the published tables do",
    )
    parser.add_argument(
        "--every",
        type=positive,
        default=1,
        metavar="N",
        help="best-checkpoint: of every N rounds only (published: 100)",
    )
    parser.add_argument(
        "--reference", type=Path, metavar="CSV", help="published curves (method,round,accuracy_before,accuracy_after)"
    )
    parser.add_argument("--paper", action="store_true", help="also the FedOBP paper's, as far as there are runs")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write there; figures default to ROOT/figures")
    return parser


def _tables(found: list[Run], options: argparse.Namespace) -> None:
    tables: dict[str, Table] = {"accuracy": accuracy_table(found, options.select, options.every)}
    if options.reference:
        tables["curves"] = curve_table(found, options.reference)
    for name, table in tables.items():
        write(name, partial(render, table), options)


def _figures(found: list[Run], options: argparse.Namespace) -> None:
    from fedpfl.report.figures import accuracy_figure, curves  # matplotlib is slow to load

    folder = options.out or options.roots[0] / "figures"
    settings: dict[str, list[Run]] = {}
    for run in found:
        settings.setdefault(_slug(f"{run.dataset}_{run.partition}"), []).append(run)
    for name, members in settings.items():
        written = accuracy_figure(members, folder / f"accuracy_{name}")
        if options.reference:
            written += curves(members, options.reference, folder / f"curves_{name}")
        for target in written:
            to_stderr(f"wrote {target}")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "_", text.lower()).strip("_")[:100]


if __name__ == "__main__":
    raise SystemExit(main())
