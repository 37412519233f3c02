"""The command `fedpfl`: `fedpfl train ...` is `python -m fedpfl.train ...`, and so on."""

from __future__ import annotations

import os
import runpy
import sys

from fedpfl import __version__
from fedpfl.ground import answer
from fedpfl.ground.errors import did_you_mean
from fedpfl.ground.terminal import outlive_readers, print_notice

COMMANDS = {
    "train": "train, resume or sweep: fedpfl train method=fedobp dataset=digits",
    "check": "try your methods, models, data sets and partitions: fedpfl check mine.py",
    "card": "what is known of a method: fedpfl card fedobp, fedpfl card mine.py outputs",
    "oracle": "hold a method beside its old class: fedpfl oracle mine.py --against DIR:FedX",
    "report": "tables, figures and pages of runs; fedpfl report ls lists them",
    "export": "write the personal models of a run, or send its record to loggers",
    "federate": "train on Flower, clients' data and states at nodes of their own",
    "board": "tune every method on a suite of settings and tabulate; verify runs a row again",
    "arena": "judge a submitted method by a contract; verify repeats each line of a ledger",
    "dashboard": "save a view of runs in Weights & Biases",
    "tune": "tune methods on equal terms: fedpfl tune method=fedobp,fedper trials=20",
}
USAGE = f"""fedpfl {__version__}: experiments in personalized federated learning

{"".join(f"  fedpfl {name:10}{text}{chr(10)}" for name, text in COMMANDS.items())}
Each has its own --help, and with --json its answer is one JSON object on standard output (AGENTS.md).
Tab completion: eval "$(fedpfl -sc install=bash)", or zsh; fedpfl -sc install=fish | source"""


def main() -> None:
    """Run the command that the first word names, as `python -m` would.

    The exit status is the command's.
    """
    outlive_readers()
    answer.run_command(_run_named)


def _run_named() -> None:
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help", "--version"):
        print(f"fedpfl {__version__}" if name == "--version" else USAGE)
    elif name in ("-sc", "--shell-completion"):
        _complete(rest)
    elif name in COMMANDS:
        sys.argv[1:] = rest
        # Each command has a guard that runs before its imports, which only `__main__` passes.
        runpy.run_module(f"fedpfl.{name}", run_name="__main__", alter_sys=True)
    else:
        _refuse(
            f"{name or 'an empty word'} is no command; there are"
            f" {', '.join(COMMANDS)}{did_you_mean(name, COMMANDS)}"
        )


def _complete(words: list[str]) -> None:
    """Answer a shell; Hydra knows the words of `train`."""
    from fedpfl.config import overrides

    if len(words) != 1:
        _refuse("-sc takes one of install=, uninstall= and query= with bash, zsh or fish")
    typed = os.environ.get("COMP_LINE", "").lstrip().partition(" ")[2].lstrip()
    name, space, more = typed.partition(" ")
    # Hydra looks for words behind the program's name; it is told of `fedpfl` and those of `train`.
    if not words[0].startswith("query=") or (space and name == "train"):
        overrides.print_completion(words[0], f"fedpfl {more}")
    elif not space:
        print("\n".join(command for command in COMMANDS if command.startswith(name)))


def _refuse(text: str) -> None:
    print_notice(text)
    sys.exit(2)


if __name__ == "__main__":
    main()
