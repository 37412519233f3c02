"""Tune methods on equal terms, and judge what was chosen by fresh seeds.

    python -m fedpfl.tune method=fedobp,fedper dataset=digits trials=20 seeds=5

Every method gets as many trials, of as many rounds, in its own search space (conf/tune/), and is
chosen by its accuracy on held-out samples (validation=0.1 unless it is set). The values chosen are
then run with `seeds` seeds that the search has not seen. Other words are those of fedpfl.train, for
all methods alike, `method.mu=...` for those that have it; `key=choice(...)` and `key=interval(...)`
are searched too, and a fixed key is not. The same command goes on where it was stopped.
"""

from __future__ import annotations

import sys

from fedpfl.ground import interrupts, terminal

if __name__ == "__main__":
    interrupts.install_handler(interrupts.exit_during_import)
    terminal.outlive_readers()
    from fedpfl.config import early

    early.exit_if_refused(
        ["-m", *(word for word in sys.argv[1:] if not word.startswith(("trials=", "seeds=")))]
    )

from collections.abc import Sequence
from pathlib import Path

from fedpfl import train
from fedpfl.config import overrides, plugins
from fedpfl.config.messages import format_error
from fedpfl.config.plan import register_resolver
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.terminal import print_notice
from fedpfl.ground.words import check_words, replaced_words
from fedpfl.methods import METHODS
from fedpfl.report.render import render, terminal_width
from fedpfl.runner.tuning import TuningRequest, tune_methods

NUMBERS = {"trials": 20, "seeds": 5}


def parse_request(words: Sequence[str]) -> TuningRequest:
    """Read the command line. Raises FedpflError."""
    numbers, methods, folder, rest = dict(NUMBERS), list[str](), Path("outputs/tune"), list[str]()
    for word in overrides.replace_config_dir_option(words):
        key, _, value = word.partition("=")
        if key in numbers:
            if not value.isdecimal() or int(value) < 1:
                raise FedpflError(f"{key} must be a whole number from 1 on, got {value!r}")
            numbers[key] = int(value)
        elif key == "method":
            methods = value.split(",")
        elif key == "hydra.sweep.dir":
            folder = Path(str(overrides.compose_config([word]).hydra.sweep.dir))
        elif word not in ("-m", "--multirun"):
            rest.append(word)
    if not methods:
        raise FedpflError("name the methods to tune: method=fedobp,fedavg")
    plugins.load_plugins(overrides.read_list_value(rest, "plugins"))
    if unknown := [method for method in methods if method not in METHODS]:
        raise FedpflError(
            f"method.name must be one of {', '.join(sorted(METHODS))}, got {unknown[0]!r}"
        )
    if own := next(
        (word for word in rest if word.startswith(("hydra/sweeper=", "hydra.mode="))), None
    ):
        raise FedpflError(f"{own}: tune sweeps by itself; leave it out")
    if bad := next(
        (word for word in rest if word.startswith("seed=") and overrides.is_sweep(word)), None
    ):
        raise FedpflError(
            f"{bad}: tune searches with one seed, and takes the next ones to judge by"
        )
    return TuningRequest(
        list(dict.fromkeys(methods)), numbers["trials"], numbers["seeds"], folder, rest
    )


def run_or_exit(options: Sequence[str], words: Sequence[str], bears: int = 0) -> None:
    """Do as fedpfl.train's command line; ends the process where that failed, but with status
    `bears`.
    """
    status = train.run_command([*options, *words])
    if status not in (0, bears):
        sys.exit(status)


def main() -> None:
    """Run the command: faults of the user's making are one line and a non-zero exit."""
    words = sys.argv[1:]
    if {"-h", "--help"} & {*words} or not words:
        print(__doc__)
        return
    interrupts.install_handler(interrupts.raise_interrupt)
    try:
        register_resolver()
        asked = parse_request(
            check_words(
                words,
                overrides.MULTIRUN_OPTIONS,
                "python -m fedpfl.tune --help tells what it takes",
            )
        )
        if note := replaced_words(words):
            print_notice(note)
        table = tune_methods(asked, run_or_exit)
        (asked.folder / "tuned.md").write_text(render(table, "markdown") + "\n")
        (asked.folder / "tuned.csv").write_text(render(table, "csv"))
        print(render(table, width=terminal_width()))
    except (FedpflError, *overrides.HYDRA_ERRORS) as error:
        print_notice(format_error(error))
        sys.exit(2)
    except KeyboardInterrupt as error:
        interrupts.exit_interrupted(error, print_notice)


if __name__ == "__main__":
    main()
