"""Play a run on Flower, on this machine.

    python -m fedpfl.federate method=fedper dataset=digits clients=4

Words are those of fedpfl.train, and
  federate.nodes=4            processes that hold the clients' data and states
  federate.timeout=600        seconds for the answers to a round
  federate.minimum=1          answers without which a round is given up
  federate.share_states=true  for methods that need more than what is sent

One SuperLink and the nodes are started on 127.0.0.1 and ended with the run. `<run directory>.nodes`
has the nodes' states and, in `flower.log`, what Flower says. The same command goes on where it was
stopped. `fedpfl export --flower` writes the app for a SuperLink of your own.

Exit status: as of fedpfl.train.
"""

from __future__ import annotations

import sys

from fedpfl.ground import interrupts, terminal

if __name__ == "__main__":
    interrupts.install_handler(interrupts.exit_during_import)
    terminal.outlive_readers()

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from fedpfl.config import overrides
from fedpfl.config.plan import build_run, check_config
from fedpfl.ground import files
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.terminal import print_notice
from fedpfl.ground.words import check_words, replaced_words
from fedpfl.remote import app, local

EXIT_STATUS = {"finished": 0, "failed": 1, "diverged": 3}
REFUSED_STATUS = 2


def play_federation(words: Sequence[str]) -> int:
    """Play a run; return the exit status.

    Raises:
        FedpflError: for what is refused before anything is started.
    """
    # ---- Check the command and the method before any process starts
    words = check_words(words, {}, "python -m fedpfl.federate --help tells what it takes")
    settings, cfg = app.compose_federation(words)
    note = replaced_words(words)
    if note:
        print_notice(note)
    if importlib.util.find_spec("flwr") is None:
        raise FedpflError("fedpfl federate needs Flower; pip install 'fedpfl[flower]'")
    run = build_run(check_config(cfg))
    disclosure = app.find_disclosure(run, settings)
    if disclosure:
        print(disclosure)

    # ---- Play it in processes that are ended with it
    run_directory = Path(cfg.hydra.run.dir).resolve()
    nodes_folder = run_directory.with_name(f"{run_directory.name}.nodes")
    with files.explain_write_errors(nodes_folder):
        nodes_folder.mkdir(parents=True, exist_ok=True)
    # The app runs in a folder of its own, so it is given the whole path.
    app_words = [word for word in words if not word.startswith("hydra.run.dir=")]
    app_words += overrides.format_words("hydra.run.dir", str(run_directory))
    log = nodes_folder / "flower.log"
    local.play_locally(
        words=app_words,
        node_count=min(settings.nodes, run.settings.clients),
        states_folder=nodes_folder,
        log=log,
        share_states=settings.share_states,
    )
    return report_end(run_directory, log)


def report_end(run_directory: Path, log: Path) -> int:
    """Print how a run has ended, and return the exit status. `log` is where Flower says more."""
    summary_file = run_directory / "summary.json"
    summary = json.loads(summary_file.read_text()) if summary_file.is_file() else {}
    status = summary.get("status", "not begun")
    if status == "finished":
        print(f"finished: {run_directory}")
    else:
        print_notice(f"{status}: {summary.get('error') or log}")
    return EXIT_STATUS.get(status, REFUSED_STATUS)


def main(words: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    if words is None:
        words = sys.argv[1:]
    if not words or {"-h", "--help"} & {*words}:
        print(__doc__)
        return 0
    try:
        return play_federation(words)
    except FedpflError as error:
        print_notice(error)
        return REFUSED_STATUS
    except KeyboardInterrupt as error:
        interrupts.exit_interrupted(error, print_notice)


if __name__ == "__main__":
    interrupts.install_handler(interrupts.raise_interrupt)
    raise SystemExit(main())
