"""The FedOBP paper's tables and figures: `python -m fedpfl.report paper [NAME ...] [ROOT ...]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fedpfl.errors import FedpflError
from fedpfl.report.grid import render
from fedpfl.report.load import Group, Run, groups, runs, to_stderr
from fedpfl.report.output import positive, write
from fedpfl.report.paper_figures import FIGURES
from fedpfl.report.paper_tables import LARGE, PLANS, SMALL, Rule, fill, one_each
from fedpfl.report.tables import ACCURACIES, FORMATS, SELECTIONS, accuracy_table
from fedpfl.report.tables import render as render_table

EVERY = "all_methods"
"""The table that the paper lacks: every method before and after fine-tuning, with its cost."""

KNOWN = (*PLANS, EVERY, *FIGURES)
"""What may be asked for by name."""


def main(words: Sequence[str]) -> int:
    """Print or write the paper's tables and figures. Raises FedpflError."""
    show(words)
    return 0


def show(words: Sequence[str], found: Sequence[Run] | None = None) -> None:
    """As `main`; found: the runs below the roots, where they have been read."""
    options = _parser().parse_args(words)
    names = [word for word in options.words if word in KNOWN]
    roots = [Path(word) for word in options.words if word not in KNOWN] or [Path("outputs")]
    if absent := [root for root in roots if not root.is_dir()]:
        raise FedpflError(f"{absent[0]} is neither a folder nor a table or figure; there are {', '.join(KNOWN)}")
    gathered = groups(runs(*roots) if found is None else found)
    if options.dataset:
        gathered = [group for group in gathered if _dataset(group) in options.dataset]
    chosen = names or [name for name in KNOWN if _has_runs(name, gathered)]
    if options.only:
        chosen = [name for name in chosen if (name in FIGURES) == (options.only == "figures")]
    if not chosen:
        to_stderr(
            f"nothing of the paper's can be filled from the runs below {', '.join(map(str, roots))}; name a table "
            f"({', '.join(PLANS)}) to see the commands that fill it"
        )
    rule = Rule(options.accuracy, options.select, options.every)
    for name in chosen:
        if name in FIGURES:
            for target in FIGURES[name].draw(gathered, (options.out or roots[0] / "figures") / name, rule):
                to_stderr(f"wrote {target}")
        elif name == EVERY:
            members = [run for group in one_each(gathered) for run in group.runs]
            write(name, partial(render_table, accuracy_table(members, rule.select, rule.every)), options)
        else:
            grid = fill(name, gathered, rule, options.dataset or (), options.test or "")
            write(name, partial(render, grid), options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fedpfl.report paper",
        description="The FedOBP paper's tables and figures from own runs; without a NAME, all of which there are runs.",
    )
    parser.add_argument(
        "words", nargs="*", metavar="NAME|ROOT", help="table2 to table5, figure2 to figure7, ...; folders of runs"
    )
    parser.add_argument("--only", choices=("tables", "figures"), help="of what there are runs")
    parser.add_argument("--dataset", type=lambda text: text.split(","), metavar="A,B", help="only these data sets")
    parser.add_argument("--accuracy", choices=ACCURACIES, default="accuracy", help="which; default: mean over clients")
    parser.add_argument("--select", choices=SELECTIONS, default="last", help="which evaluation is judged")
    parser.add_argument(
        "--every", type=positive, default=100, metavar="N", help="best-checkpoint: of every N rounds only"
    )
    parser.add_argument("--test", choices=("t", "wilcoxon"), help="mark what differs from FedOBP, paired over seeds")
    parser.add_argument("--format", choices=FORMATS, help="of tables; default: terminal, with --out all others")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write there; figures default to ROOT/figures")
    return parser


def _has_runs(name: str, gathered: Sequence[Group]) -> bool:
    """Whether there is something to show of what was not asked for by name: the paper's own data sets alone."""
    own = [group for group in gathered if _dataset(group) in (*LARGE, *SMALL)]
    if name in FIGURES:
        return bool(FIGURES[name].of(own))
    if name == EVERY:
        return bool(own)
    return bool(own) and any(cell.values for cell in fill(name, own).cells.values())


def _dataset(group: Group) -> str:
    return str(group.runs[0].config["dataset"]["name"])
