"""A method's card: `fedpfl card fedobp`, or `fedpfl card mine.py outputs` with its runs.

It says in Markdown (with --json as facts): paper, equations and departures as the class has them,
hooks, what the server sees and what travels, promises kept, the difference to public code, cost,
harm, rows of the board and own runs with their commands.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment

from fedpfl.board import read_harms
from fedpfl.check import find_subjects
from fedpfl.ground import answer, tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Record, Values
from fedpfl.ground.terminal import Parser, outlive_readers, print_notice
from fedpfl.methods import METHODS, Method
from fedpfl.report.commands import find_words
from fedpfl.report.fairness import compare_with_baselines
from fedpfl.report.grouping import groups
from fedpfl.report.load import no_runs_error, runs
from fedpfl.report.names import METHOD_TITLES
from fedpfl.report.tables import accuracy_table
from fedpfl.testing.method_promises import METHOD_PROMISES
from fedpfl.testing.promises import audit
from fedpfl.testing.toy import COHORTS, MethodTrial
from fedpfl.testing.trials import Subject, make_trial

TEMPLATE = Path(__file__).with_suffix(".md")
RESULTS = Path(__file__).with_name("results")
"""A link to docs/results; an installed package has the files that cards read."""
SHOWN = ("accuracy", "ft_accuracy", "harmed_fedavg", "bits_down", "bits_up", "seeds", "command")
"""Columns of rows in the Markdown."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the card of a method, or of each method of a plugin; return the exit status."""
    parser = Parser(prog="fedpfl card", description=__doc__)
    parser.add_argument("method", help="a method's name, or a plugin's file")
    parser.add_argument(
        "roots", nargs="*", type=Path, help="folders of runs, for rows of their own"
    )
    options = parser.parse_intermixed_args(arguments)
    try:
        subjects = [one for one in find_subjects(options.method, []) if one.kind == "method"]
        if not subjects:
            raise FedpflError(f"{options.method} has no method; fedpfl check tries other choices")
        cards = [make_card(subject, options.roots) for subject in subjects]
    except FedpflError as error:
        print_notice(error)
        return 2
    answer.add_facts(cards=cards)
    print(*map(format_card, cards), sep="\n", end="")
    return 0


def make_card(subject: Subject, roots: Sequence[Path] = ()) -> Record:
    """Gather the facts about a method. Raises FedpflError if folders have no runs of it."""
    # ---- Step 1: what the class says.
    method = METHODS[subject.name]
    trial = make_trial(subject)
    assert isinstance(trial, MethodTrial)
    title = METHOD_TITLES.get(subject.name) or method.title or method.__name__
    card: Record = {
        "method": subject.name,
        "title": title,
        "description": inspect.getdoc(method) or "",
        "keys": {key: value for key, value in subject.config["method"].items() if key != "name"},
        "hooks": list_hooks(method),
        "server_sees": trial.method.server_sees,
    }

    # ---- Step 2: what it does on the tiny federation.
    verdicts = audit(trial, METHOD_PROMISES, quick=True)
    card["promises"] = {one.promise.title: "; ".join(one.faults) or "kept" for one in verdicts}
    states, outcomes = trial.play_cohorts("loop")
    network = tree.size(trial.net().params)
    shares = {
        "down": outcomes[-1].traffic.values_down / len(COHORTS[-1]),
        "up": outcomes[-1].traffic.values_up / len(COHORTS[-1]),
        "kept": tree.size(states[0].rows.initial["client"]),
    }
    card["values_by_network"] = {name: count / network for name, count in shares.items()}

    # ---- Step 3: what was measured of it, and own runs.
    card["costs"] = (read_results("methods.csv", "method", subject.name) or [{}])[0]
    card["oracles"] = read_results("oracles.csv", "method", subject.name)
    card["board"] = read_results("board_small.csv", "method", title)
    card["runs"] = list_runs(subject.name, roots) if roots else []
    return card


def list_hooks(method: type[Method]) -> list[str]:
    """List the hooks that a method answers itself."""
    hooks = [name for name, value in vars(Method).items() if inspect.isfunction(value)]
    return [
        hook
        for hook in hooks
        if not hook.startswith("_") and getattr(method, hook) is not getattr(Method, hook)
    ]


def read_results(file_name: str, column: str, value: str) -> list[Record]:
    """Return the rows of a file of results with a value in a column."""
    rows = pd.read_csv(RESULTS / file_name)
    return rows[rows[column] == value].to_dict("records")


def list_runs(name: str, roots: Sequence[Path]) -> list[Record]:
    """Describe a method's configurations in folders of runs, beside the baselines there."""
    found_runs = runs(*roots)
    if name not in [run.method_name for run in found_runs]:
        raise no_runs_error([*roots])
    found_groups = groups(found_runs)
    measured_rows = accuracy_table(found_runs).frame
    comparisons, _ = compare_with_baselines(found_groups)
    rows = []
    for group, measured, comparison in zip(
        found_groups, measured_rows.to_dict("records"), comparisons, strict=True
    ):
        run = group.runs[0]
        if run.method_name == name:
            seeds = ",".join(str(one.seed) for one in group.runs)
            command = f"python -m fedpfl.train -m {' '.join(find_words(run.config))} seed={seeds}"
            harms = read_harms(comparison)
            rows.append({**measured, **harms, "setting": group.setting, "command": command})
    return rows


def format_card(card: Values) -> str:
    """Write a card as Markdown."""
    jinja = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    jinja.filters["cell"] = format_cell
    return jinja.from_string(TEMPLATE.read_text(encoding="utf-8")).render(card, shown=SHOWN)


def format_cell(value: Any) -> str:
    """Write a value for a cell of a table."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4g}"
    return str(value)


if __name__ == "__main__":
    outlive_readers()
    answer.run_command(main)
