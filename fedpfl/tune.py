"""Tune methods on equal terms, and judge the chosen values by fresh seeds.

    python -m fedpfl.tune method=fedobp,fedper dataset=digits trials=20 seeds=5

Every method gets as many trials, of as many rounds, in its own search space (conf/tune.yaml), and is
chosen by its accuracy on held-out samples (validation=0.1 unless it is set), or by another
validation column: `metric=val_ft_accuracy` is after fine-tuning. The values chosen are then run
with `seeds` seeds that the search has not seen. Other words are those of fedpfl.train, for all
methods alike, `method.mu=...` for those that have it; `key=choice(...)` and `key=interval(...)` are
searched too, and a fixed key is not. The same command goes on where it was stopped.
"""

from __future__ import annotations

import sys

from fedpfl.ground import answer, interrupts

if __name__ == "__main__":
    interrupts.begin_imports()

from collections.abc import Sequence
from pathlib import Path

from fedpfl import train
from fedpfl.config import overrides, plugins
from fedpfl.ground.errors import FedpflError, choices_text
from fedpfl.ground.words import check_words
from fedpfl.methods import METHODS
from fedpfl.report.render import render, show_tables
from fedpfl.runner.faults import run_guarded
from fedpfl.runner.tuning import TuningRequest, tune_methods

DEFAULT_COUNTS = {"trials": "20", "seeds": "5"}


def parse_request(arguments: Sequence[str]) -> TuningRequest:
    """Read the command line. Raises FedpflError."""
    # ---- Step 1: the words of this command; the rest are fedpfl.train's.
    values = {**DEFAULT_COUNTS, "method": "", "metric": "", "hydra.sweep.dir": ""}
    words = overrides.replace_config_dir_option(arguments)
    shared_words: list[str] = []
    for word in words:
        key, _, value = word.partition("=")
        if key in values:
            values[key] = value
        elif word not in ("-m", "--multirun"):
            shared_words.append(word)
    # As Hydra reads it, without quotes.
    folder = overrides.read_text_value(words, "hydra.sweep.dir") or "outputs/tune"

    # ---- Step 2: what can be refused before anything runs.
    for key in DEFAULT_COUNTS:
        if not values[key].isdecimal() or int(values[key]) < 1:
            raise FedpflError(f"{key} must be a whole number from 1 on, got {values[key]!r}")
    plugins.load_plugins(overrides.read_list_value(shared_words, "plugins"))
    methods = values["method"].split(",")
    for method in methods:
        if method not in METHODS:
            raise FedpflError(f"method: {choices_text(sorted(METHODS), method)}")
    for word in shared_words:
        if word.startswith(("hydra/sweeper=", "hydra.sweeper.metric=", "hydra.mode=")):
            raise FedpflError(f"{word}: tune sweeps by itself; leave it out")
    return TuningRequest(
        methods=list(dict.fromkeys(methods)),
        trials=int(values["trials"]),
        seeds=int(values["seeds"]),
        folder=Path(folder),
        shared_words=shared_words,
        metric=values["metric"],
    )


def run_or_exit(options: Sequence[str], run_words: Sequence[str], accepted_status: int = 0) -> None:
    """Do as fedpfl.train's command line, and end the process where that failed.

    Args:
        options: those that Hydra takes before words.
        run_words: keys and values.
        accepted_status: exit status beside 0 that is no failure here.
    """
    status = train.run_command([*options, *run_words])
    if status not in (0, accepted_status):
        sys.exit(status)


def main() -> int:
    """Run the command; return the exit status."""
    interrupts.end_imports()
    return run_guarded(__doc__, sys.argv[1:], _tune_and_print)


def _tune_and_print(arguments: Sequence[str]) -> int:
    """Search, run the chosen values, and print and write the table."""
    advice = "python -m fedpfl.tune --help tells what it takes"
    request = parse_request(check_words(arguments, overrides.MULTIRUN_OPTIONS, advice))
    # Hundreds of configurations differ in few words.
    with overrides.composing_once():
        table = tune_methods(request, run_or_exit)
    (request.folder / "tuned.md").write_text(render(table, "markdown") + "\n")
    (request.folder / "tuned.csv").write_text(render(table, "csv"))
    (request.folder / "tuned.tex").write_text(render(table, "latex"))
    show_tables(table)
    return 0


if __name__ == "__main__":
    answer.run_command(main)
