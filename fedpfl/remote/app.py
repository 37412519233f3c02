"""The two halves of a federation as programs: what the server plays over a grid, and the node that
answers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from fedpfl import __version__, engine
from fedpfl.config import overrides, plugins
from fedpfl.config.messages import one_line
from fedpfl.config.plan import Run, build, check, register
from fedpfl.data import fingerprint
from fedpfl.ground.checks import typed
from fedpfl.ground.errors import FedpflError
from fedpfl.record.callbacks import Callback
from fedpfl.remote import rehearsal
from fedpfl.remote.node import Node
from fedpfl.remote.server import Federate, Grid, Remote
from fedpfl.runner import resume, session
from fedpfl.runner.faults import mended

OWN = "federate."
PLACE = "outputs/federated/${fedpfl.run_subdir:}"
"""Where runs lie: apart from the same runs in one process, whose numbers are the same."""
COLUMNS = (
    "round",
    "counted_down",
    "counted_up",
    "bytes_down",
    "bytes_up",
    "judged_down",
    "judged_up",
    "answers",
)


def composed(words: Sequence[str]) -> tuple[Federate, Any]:
    """Return how the federation is played, and the configuration, as `fedpfl train` takes it.
    Raises FedpflError.
    """
    register()
    given: dict[str, Any] = {}
    for word in (own for own in words if own.startswith(OWN)):
        key, _, text = word.removeprefix(OWN).partition("=")
        try:
            given[key] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise FedpflError(f"{word}: its value cannot be read") from None
    rest = [word for word in words if not word.startswith(OWN)]
    usual = {
        "checkpoint.seconds": "0",
        "hydra.run.dir": PLACE,
    }  # nodes keep the states of two rounds
    rest += [
        f"{key}={value}"
        for key, value in usual.items()
        if not any(word.startswith(f"{key}=") for word in rest)
    ]
    try:
        plugins.load(overrides.chosen(rest, "plugins"))
        return typed(Federate, given, "federate"), overrides.composed_once(rest)
    except overrides.REFUSED as error:
        raise FedpflError(one_line(error)) from None


def shares(run: Run, own: Federate) -> str:
    """Return what leaves clients beyond what is sent, "" if nothing does. Raises FedpflError where
    it may not.
    """
    if run.unseen:
        raise FedpflError("a federation has no newcomers; set unseen=0")
    if run.clock:
        raise FedpflError(
            "a federation's time is real, and clients are late by themselves; set system=none"
        )
    if run.settings.metrics or run.eval.common:
        raise FedpflError(
            "the clients of a federation tell accuracies alone; leave out metrics and eval.common"
        )
    if run.privacy:
        raise FedpflError(
            "nodes would send their uploads before they are clipped and noised; set privacy=none"
        )
    why, name = rehearsal.needs(run), run.config["method"]["name"]
    if not why:
        return ""
    state = ", ".join(run.method.init(run.net.params, run.net.parts)[1]) or "nothing"
    told = f"method={name} needs more than is sent ({why}): clients' states ({state}) would leave them in every round"
    if not own.share_states:
        raise FedpflError(f"{told}; federate.share_states=true allows it")
    return told.replace(" would leave ", " leave ")


def key(run: Run) -> dict[str, str]:
    """Return what server and nodes must have in common."""
    return {
        "configuration": f"{run.identity}-seed{run.settings.seed}",
        "data": run.fingerprint,
        "version": f"{__version__}-{fingerprint(resume.written(run))[:8]}",
    }


def serve(grid: Grid, words: Sequence[str]) -> Path:
    """Play a federation to its end, and return its run directory. Raises FedpflError."""
    own, cfg = composed(words)
    path, made = Path(cfg.hydra.run.dir), list[Remote]()

    def elsewhere(run: Run) -> Remote:
        place = run.federation.clients, run.device, run.state, None
        first = engine.begin(run.method, run.net, *place, run.settings.seed, run.stopping.early)
        made.append(Remote(run.net, run.engine, grid, key(run), first, own, shares(run, own)))
        return made[0]

    with mended(cfg, path):
        session.play(cfg, path, elsewhere=elsewhere, callbacks=[Wire(path, made)])
    return path


def node(
    words: Sequence[str],
    clients: Sequence[int] | None,
    number: int,
    nodes: int,
    folder: Path,
    data: str,
) -> Node:
    """Return the node of some clients, or of each one of so many. Raises FedpflError.

    folder: where their states are kept, apart for each run. data: where the data are, "" for where
    the words say.
    """
    _, cfg = composed([*words, *([f"data_dir={data}"] if data else [])])
    run = build(check(cfg))
    known = key(run)
    own = range(number, run.federation.clients, nodes) if clients is None else clients
    if wrong := [client for client in own if not 0 <= client < run.federation.clients]:
        raise FedpflError(
            f"there is no client {wrong[0]}: the federation has {run.federation.clients}"
        )
    backend = engine.make(run.engine, run.net, run.device)
    place = folder / "-".join(known.values())
    return Node(backend, run.method, run.federation, known, own, run.settings.seed, place)


class Wire(Callback):
    """Write `wire.csv`: by round, the bytes that were counted, those of all messages, and those of
    evaluations.
    """

    def __init__(self, path: Path, made: Sequence[Remote]):
        self._path, self._made = path / "wire.csv", made

    def on_begin(self, run: Any) -> None:
        """Begin the file, or go on with the rounds that are done."""
        lines = (
            self._path.read_text().splitlines() if run.start_round and self._path.is_file() else []
        )
        done = [line for line in lines[1:] if int(line.partition(",")[0]) <= run.start_round]
        self._path.write_text("\n".join([",".join(COLUMNS), *done, ""]))

    def on_round(self, round: Any) -> None:
        """Write a line."""
        (remote,) = self._made
        row, sums = round.row, dict.fromkeys(COLUMNS, 0)
        sums |= {
            "round": row["round"],
            "counted_down": row["bits_down"] / 8,
            "counted_up": row["bits_up"] / 8,
        }
        sums["answers"] = row["participants"]
        for own in remote.carried:
            kind = "bytes" if own.kind == "train" else "judged"
            sums[f"{kind}_down"] += own.down
            sums[f"{kind}_up"] += own.up
        remote.carried.clear()
        with self._path.open("a") as file:
            file.write(",".join(f"{sums[name]:.0f}" for name in COLUMNS) + "\n")
