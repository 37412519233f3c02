"""Federate: `python -m fedpfl.federate method=fedper dataset=digits clients=4` plays a run on
Flower, on this machine.

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
    interrupts.answer(interrupts.importing)
    terminal.outlive_readers()

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from fedpfl.config import overrides
from fedpfl.config.plan import build, check
from fedpfl.ground import files
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.terminal import tell
from fedpfl.ground.words import check_words, replaced_words
from fedpfl.remote import app, local

STATUS = {"finished": 0, "failed": 1, "diverged": 3}


def federate(words: Sequence[str]) -> int:
    """Play a run; return the exit status. Raises FedpflError for what is refused before anything is
    started.
    """
    words = check_words(words, {}, "python -m fedpfl.federate --help tells what it takes")
    own, cfg = app.composed(words)
    if note := replaced_words(words):
        tell(note)
    if importlib.util.find_spec("flwr") is None:
        raise FedpflError("fedpfl federate needs Flower; pip install 'fedpfl[flower]'")
    run = build(check(cfg))
    told, path = app.shares(run, own), Path(cfg.hydra.run.dir).resolve()
    if told:
        print(told)
    beside = path.with_name(f"{path.name}.nodes")
    with files.writing(beside):
        beside.mkdir(parents=True, exist_ok=True)
    words = [word for word in words if not word.startswith("hydra.run.dir=")]
    words += overrides.words("hydra.run.dir", str(path))
    local.play(words, min(own.nodes, run.settings.clients), beside, beside / "flower.log")
    return ended(path, beside / "flower.log")


def ended(path: Path, log: Path) -> int:
    """Tell how the run in a directory has ended; return the exit status. log: where Flower says
    more.
    """
    file = path / "summary.json"
    summary = json.loads(file.read_text()) if file.is_file() else {}
    status = summary.get("status", "not begun")
    if status == "finished":
        print(f"finished: {path}")
    else:
        tell(f"{status}: {summary.get('error') or log}")
    return STATUS.get(status, 2)


def main(words: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    words = sys.argv[1:] if words is None else words
    if not words or {"-h", "--help"} & {*words}:
        print(__doc__)
        return 0
    try:
        return federate(words)
    except FedpflError as error:
        tell(error)
        return 2
    except KeyboardInterrupt as error:
        interrupts.ended(error, tell)


if __name__ == "__main__":
    interrupts.answer(interrupts.playing)
    raise SystemExit(main())
