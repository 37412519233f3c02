"""Print the card of a method in Markdown, or as facts with --json.

    fedpfl card fedobp
    fedpfl card mine.py outputs     # of each method of a plugin, with its runs below these folders

A card has paper, equations and departures as the class has them, hooks, the server's view, traffic,
promises kept, the difference to public code, cost, harm, rows of the board and own runs
with their commands.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment

from fedpfl.board import read_harms
from fedpfl.check import find_subjects
from fedpfl.ground import answer, tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Record
from fedpfl.ground.terminal import outlive_readers
from fedpfl.ground.words import check_words
from fedpfl.methods import METHODS, Method
from fedpfl.methods.shared.method import hook_names
from fedpfl.report import groups, runs
from fedpfl.report.commands import find_words
from fedpfl.report.fairness import compare_with_baselines
from fedpfl.report.load import no_runs_error
from fedpfl.report.names import METHOD_TITLES
from fedpfl.report.tables import accuracy_table
from fedpfl.runner.faults import run_guarded
from fedpfl.testing.method_promises import METHOD_PROMISES
from fedpfl.testing.promises import audit
from fedpfl.testing.toy import COHORTS
from fedpfl.testing.trials import Subject, make_trial

RESULTS = Path(__file__).with_name("results")
"""A link to docs/results; an installed package has the files that cards read."""


def main() -> int:
    """Run the command; return the exit status."""
    return run_guarded(__doc__, sys.argv[1:], _print_cards)


def _print_cards(arguments: Sequence[str]) -> int:
    """Print the card of each method that the first word names."""
    target, *roots = check_words(arguments, (), "fedpfl card --help tells what it takes")
    subjects = [subject for subject in find_subjects(target, []) if subject.kind == "method"]
    if not subjects:
        raise FedpflError(f"{target} has no method; fedpfl check tries other choices")
    jinja = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    template = jinja.from_string(Path(__file__).with_suffix(".md").read_text(encoding="utf-8"))
    for subject in subjects:
        card = make_card(subject, roots)
        answer.add_facts(cards=[card])
        print(template.render(card), end="")
    return 0


def make_card(subject: Subject, roots: Sequence[str] = ()) -> Record:
    """Gather the facts about a method. Raises FedpflError if there are folders without its runs."""
    # ---- Step 1: what its class says, and does on the tiny federation.
    method_name, method = subject.name, METHODS[subject.name]
    # A plugin needs neither data nor runs for this.
    trial: Any = make_trial(subject)
    title = METHOD_TITLES.get(method_name) or method.title or method.__name__
    hooks = [name for name in hook_names() if getattr(method, name) is not getattr(Method, name)]
    verdicts = audit(trial, METHOD_PROMISES, quick=True)
    promises = {one.promise.title: "; ".join(one.faults) or "kept" for one in verdicts}
    states, outcomes = trial.play_cohorts("loop")
    network = tree.size(trial.net().params)
    traffic = outcomes[-1].traffic

    # ---- Step 2: measurements of it.
    card = {
        "method": method_name,
        "title": title,
        "description": inspect.getdoc(method) or "",
        "hooks": hooks,
        "server_sees": trial.method.server_sees,
        "promises": promises,
        "down": traffic.values_down / len(COHORTS[-1]) / network,
        "up": traffic.values_up / len(COHORTS[-1]) / network,
        "kept": tree.size(states[0].rows.initial["client"]) / network,
        "costs": read_results("methods.csv", method_name),
        "oracles": read_results("oracles.csv", method_name),
        "board": read_results("board_small.csv", title),
        "runs": list_runs(method_name, roots) if roots else [],
    }
    return answer.make_plain(card)


def read_results(file_name: str, name: str) -> list[Record]:
    """Return a method's rows of a file of results."""
    # Small files, read anew for each card.
    rows = pd.read_csv(RESULTS / file_name)
    return rows[rows["method"] == name].to_dict("records")


def list_runs(name: str, roots: Sequence[str]) -> list[Record]:
    """Describe a method's configurations in folders of runs, beside the baselines there."""
    found_runs = runs(*map(Path, roots))
    # The baselines' runs alone make no card.
    if name not in [run.method_name for run in found_runs]:
        raise no_runs_error([*map(Path, roots)])
    run_groups = groups(found_runs)
    measured_rows = accuracy_table(found_runs).frame.to_dict("records")
    comparisons, _ = compare_with_baselines(run_groups)
    rows = []
    for group, measured, comparison in zip(run_groups, measured_rows, comparisons, strict=True):
        run = group.runs[0]
        if run.method_name == name:
            words = [*find_words(run.config), f"seed={measured['seed_list'].replace(' ', ',')}"]
            own = {"setting": group.setting, "command": " ".join(["fedpfl train -m", *words])}
            rows.append({**measured, **read_harms(comparison), **own})
    return rows


if __name__ == "__main__":
    outlive_readers()
    answer.run_command(main)
