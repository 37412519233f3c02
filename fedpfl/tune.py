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

from fedpfl.ground import interrupts, terminal

if __name__ == "__main__":
    interrupts.install_handler(interrupts.exit_during_import)
    terminal.outlive_readers()

from collections.abc import Sequence
from pathlib import Path

from fedpfl import train
from fedpfl.config import overrides, plugins
from fedpfl.config.messages import format_error
from fedpfl.config.run_location import register_resolver
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.terminal import print_notice
from fedpfl.ground.words import check_words
from fedpfl.methods import METHODS
from fedpfl.report.render import render, terminal_width
from fedpfl.runner.tuning import TuningRequest, tune_methods

DEFAULT_COUNTS = {"trials": 20, "seeds": 5}


def parse_request(arguments: Sequence[str]) -> TuningRequest:
    """Read the command line. Raises FedpflError."""
    # ---- Step 1: the words of this command; the rest are fedpfl.train's.
    counts = dict(DEFAULT_COUNTS)
    methods: list[str] = []
    metric = ""
    folder = Path("outputs/tune")
    shared_words: list[str] = []
    for word in overrides.replace_config_dir_option(arguments):
        key, _, value = word.partition("=")
        if key in counts:
            if not value.isdecimal() or int(value) < 1:
                raise FedpflError(f"{key} must be a whole number from 1 on, got {value!r}")
            counts[key] = int(value)
        elif key == "method":
            methods = value.split(",")
        elif key == "metric":
            metric = value
        elif key == "hydra.sweep.dir":
            # Hydra takes the quotes away, and fills interpolations in.
            folder = Path(str(overrides.compose_config([word]).hydra.sweep.dir))
        elif word not in ("-m", "--multirun"):
            shared_words.append(word)

    # ---- Step 2: what can be refused before anything runs.
    _require_searchable(methods, shared_words)
    return TuningRequest(
        methods=list(dict.fromkeys(methods)),
        trials=counts["trials"],
        seeds=counts["seeds"],
        folder=folder,
        shared_words=shared_words,
        metric=metric,
    )


def _require_searchable(methods: Sequence[str], shared_words: Sequence[str]) -> None:
    """Refuse unknown methods, and words that are the search's to say. Raises FedpflError."""
    if not methods:
        raise FedpflError("name the methods to tune: method=fedobp,fedavg")
    plugins.load_plugins(overrides.read_list_value(shared_words, "plugins"))
    for method in methods:
        if method not in METHODS:
            raise FedpflError(
                f"method.name must be one of {', '.join(sorted(METHODS))}, got {method!r}"
            )
    for word in shared_words:
        if word.startswith(("hydra/sweeper=", "hydra.sweeper.metric=", "hydra.mode=")):
            raise FedpflError(f"{word}: tune sweeps by itself; leave it out")


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


def main() -> None:
    """Run the command: faults of the user's making are one line and a non-zero exit."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & {*arguments} or not arguments:
        print(__doc__)
        return
    interrupts.install_handler(interrupts.raise_interrupt)
    try:
        register_resolver()

        # ---- Step 1: the request.
        checked_arguments = check_words(
            arguments,
            overrides.MULTIRUN_OPTIONS,
            "python -m fedpfl.tune --help tells what it takes",
        )
        request = parse_request(checked_arguments)

        # ---- Step 2: search, and run the chosen values.
        with overrides.composing_once():
            table = tune_methods(request, run_or_exit)

        # ---- Step 3: the table.
        (request.folder / "tuned.md").write_text(render(table, "markdown") + "\n")
        (request.folder / "tuned.csv").write_text(render(table, "csv"))
        (request.folder / "tuned.tex").write_text(render(table, "latex"))
        print(render(table, width=terminal_width()))
    except (FedpflError, *overrides.HYDRA_ERRORS) as error:
        print_notice(format_error(error))
        sys.exit(2)
    except KeyboardInterrupt as error:
        interrupts.exit_interrupted(error, print_notice)


if __name__ == "__main__":
    main()
