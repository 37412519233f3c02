"""Run the two halves of a federation as programs: the server on a grid, and a node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from fedpfl import __version__, engine
from fedpfl.config import overrides, plugins
from fedpfl.config.messages import format_error
from fedpfl.config.plan import Run, build_run, check_config, register_resolver
from fedpfl.data import fingerprint
from fedpfl.engine.store import RowStorage
from fedpfl.ground.checks import build_dataclass
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tasks import require_classification
from fedpfl.record.callbacks import Callback
from fedpfl.remote import rehearsal
from fedpfl.remote.node import Node, NodeSettings
from fedpfl.remote.server import FederateSettings, Grid, RemoteBackend
from fedpfl.runner import resume, session
from fedpfl.runner.faults import user_errors

SETTINGS_PREFIX = "federate."
RUN_DIRECTORY = "outputs/federated/${fedpfl.run_subdir:}"
"""Apart from the same run in one process, which has the same numbers."""
DEFAULT_OVERRIDES = {
    # Nodes store the states of two rounds: a server may go back by one round, not further.
    "checkpoint.seconds": "0",
    "hydra.run.dir": RUN_DIRECTORY,
}
WIRE_COLUMNS = (
    "round",
    "counted_down",
    "counted_up",
    "bytes_down",
    "bytes_up",
    "judged_down",
    "judged_up",
    "answers",
)


def compose_federation(words: Sequence[str]) -> tuple[FederateSettings, Any]:
    """Return the settings `federate.*` and the configuration of a command line.

    Raises:
        FedpflError: for what Hydra or the settings refuse.
    """
    register_resolver()
    settings: dict[str, Any] = {}
    run_words: list[str] = []
    for word in words:
        if not word.startswith(SETTINGS_PREFIX):
            run_words.append(word)
            continue
        key, _, text = word.removeprefix(SETTINGS_PREFIX).partition("=")
        try:
            settings[key] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise FedpflError(f"{word}: its value cannot be read") from None

    user_keys = {word.partition("=")[0] for word in run_words}
    for key, value in DEFAULT_OVERRIDES.items():
        if key not in user_keys:
            run_words.append(f"{key}={value}")
    try:
        plugins.load_plugins(overrides.read_list_value(run_words, "plugins"))
        federate_settings = build_dataclass(FederateSettings, settings, "federate")
        return federate_settings, overrides.compose_single_run(run_words)
    except overrides.HYDRA_ERRORS as error:
        raise FedpflError(format_error(error)) from None


def find_disclosure(run: Run, settings: FederateSettings) -> str:
    """Return which states leave clients beyond what is sent, "" if none do.

    Raises:
        FedpflError: if the settings do not allow it, or for a run that no federation can play.
    """
    # ---- What no federation can play
    if run.newcomers:
        raise FedpflError("a federation has no newcomers; set unseen=0 and unseen_groups=[]")
    if run.clock:
        raise FedpflError(
            "a federation's time is real, and clients are late by themselves; set system=none"
        )
    require_classification(run.task, "a federation", "its clients tell accuracies alone")
    if run.settings.metrics or run.eval.common:
        raise FedpflError(
            "the clients of a federation tell accuracies alone; leave out metrics and eval.common"
        )
    if run.privacy:
        raise FedpflError(
            "nodes would send their uploads before they are clipped and noised; set privacy=none"
        )
    if run.attack:
        raise FedpflError(
            "nodes play their clients' part honestly, and nobody tells who would attack; set"
            " attack=none"
        )
    if run.shift.at:
        raise FedpflError("a federation's nodes hold what they hold; leave out shift.at")

    # ---- What the method reads at the server
    method_name = run.config["method"]["name"]
    unsent_needs = rehearsal.find_unsent_needs(run)
    if not unsent_needs:
        return ""
    _, client_state = run.method.init(run.net.params, run.net.parts)
    entries = ", ".join(client_state) or "nothing"
    opening = f"method={method_name} needs more than is sent ({unsent_needs}): "
    if not settings.share_states:
        raise FedpflError(
            f"{opening}clients' states ({entries}) would leave them in every round; "
            "federate.share_states=true allows it"
        )
    return f"{opening}clients' states ({entries}) leave them in every round"


def compatibility_key(run: Run) -> dict[str, str]:
    """Return what server and nodes must have in common, by name."""
    return {
        "configuration": f"{run.identity}-seed{run.settings.seed}",
        "data": run.fingerprint,
        "version": f"{__version__}-{fingerprint(resume.digest_code(run))[:8]}",
    }


def run_server(grid: Grid, words: Sequence[str]) -> Path:
    """Play a federation to its end, and return its run directory. Raises FedpflError."""
    settings, cfg = compose_federation(words)
    path = Path(cfg.hydra.run.dir)
    wire_log = WireLog(path)

    def make_remote_backend(run: Run) -> RemoteBackend:
        initial_state = engine.make_initial_state(
            method=run.method,
            net=run.net,
            clients=run.federation.clients,
            device=run.device,
            storage=RowStorage(store=run.state),
            seed=run.settings.seed,
            stopping=run.stopping.early,
        )
        backend = RemoteBackend(
            net=run.net,
            engine=run.engine,
            grid=grid,
            compatibility_key=compatibility_key(run),
            initial_state=initial_state,
            settings=settings,
            disclosure=find_disclosure(run, settings),
        )
        wire_log.backend = backend
        return backend

    with user_errors(cfg, path):
        for _ in session.play_session(
            cfg, path, make_remote_backend=make_remote_backend, callbacks=[wire_log]
        ):
            pass
    return path


def make_node(
    words: Sequence[str],
    clients: Sequence[int] | None,
    node_number: int,
    node_count: int,
    folder: Path,
    data_dir: str,
    share_states: bool = False,
) -> Node:
    """Return the node that holds some clients.

    Args:
        words: The command line of the federation.
        clients: Which clients; None for every `node_count`-th from `node_number` on.
        node_number: The node's number, from 0.
        node_count: How many nodes there are.
        folder: Where clients' states are stored, in a folder for each run.
        data_dir: Where the data are; "" for where the words say.
        share_states: Whether clients' states may leave the node, whatever the words say.

    Raises:
        FedpflError: for a configuration that is refused, or a client that does not exist.
    """
    node_words = [*words, f"data_dir={data_dir}"] if data_dir else [*words]
    _, cfg = compose_federation(node_words)
    run = build_run(check_config(cfg))
    client_count = run.federation.clients
    if clients is None:
        clients = range(node_number, client_count, node_count)
    for client in clients:
        if not 0 <= client < client_count:
            raise FedpflError(f"there is no client {client}: the federation has {client_count}")
    key = compatibility_key(run)
    return Node(
        backend=engine.make_backend(run.engine, run.net, run.device),
        method=run.method,
        federation=run.in_round(1).federation,
        compatibility_key=key,
        seed=run.settings.seed,
        settings=NodeSettings(clients, folder / "-".join(key.values()), share_states),
    )


class WireLog(Callback):
    """Write `wire.csv`: the bytes of each round.

    A row has the bytes that are counted, those of all messages, and those of evaluations.

    Attributes:
        backend: Whose messages are counted; set before the run begins.
    """

    backend: RemoteBackend

    def __init__(self, run_directory: Path):
        self._path = run_directory / "wire.csv"

    def on_begin(self, run: Any) -> None:
        """Begin the file, or keep the rows of the rounds that are done."""
        rows: list[str] = []
        if run.start_round and self._path.is_file():
            for line in self._path.read_text().splitlines()[1:]:
                if int(line.partition(",")[0]) <= run.start_round:
                    rows.append(line)
        self._path.write_text("\n".join([",".join(WIRE_COLUMNS), *rows, ""]))

    def on_round(self, round: Any) -> None:
        """Add the row of a round."""
        totals: dict[str, float] = dict.fromkeys(WIRE_COLUMNS, 0)
        totals["round"] = round.row["round"]
        totals["counted_down"] = round.row["bits_down"] / 8
        totals["counted_up"] = round.row["bits_up"] / 8
        totals["answers"] = round.row["participants"]
        for message in self.backend.answered_messages:
            column = "bytes" if message.kind == "train" else "judged"
            totals[f"{column}_down"] += message.bytes_down
            totals[f"{column}_up"] += message.bytes_up
        self.backend.answered_messages.clear()
        cells = [f"{totals[name]:.0f}" for name in WIRE_COLUMNS]
        with self._path.open("a") as file:
            file.write(",".join(cells) + "\n")
