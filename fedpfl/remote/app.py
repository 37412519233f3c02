"""Run the two halves of a federation as programs: the server on a grid, and a node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedpfl import engine
from fedpfl.config import overrides, plugins
from fedpfl.config.dealing import Share, share_nothing
from fedpfl.config.messages import format_error
from fedpfl.config.plan import Plan, check_config
from fedpfl.config.run import Run
from fedpfl.config.run_location import register_resolver
from fedpfl.engine.store import RowStorage
from fedpfl.ground import files
from fedpfl.ground.checks import build_dataclass
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tasks import NEXT_TOKEN, SURVIVAL
from fedpfl.methods import SEES
from fedpfl.record.callbacks import Callback
from fedpfl.remote import sites
from fedpfl.remote.agreement import Agreement
from fedpfl.remote.budget import make_run_key
from fedpfl.remote.download import NotSentError
from fedpfl.remote.server import FederateSettings, Grid, RemoteBackend
from fedpfl.runner import session
from fedpfl.runner.faults import user_errors
from fedpfl.testing.run_trial import try_plugins

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
    # ---- Step 1: settings of the federation are not the run's, and are no part of its identity.
    own_words = [word for word in words if word.startswith(SETTINGS_PREFIX)]
    run_words = [word for word in words if not word.startswith(SETTINGS_PREFIX)]
    try:
        lines = [word.removeprefix(SETTINGS_PREFIX).replace("=", ": ", 1) for word in own_words]
        settings = yaml.safe_load("\n".join(lines)) or {}
    except yaml.YAMLError:
        raise FedpflError(f"{' '.join(own_words)}: a value cannot be read") from None

    # ---- Step 2: keys with defaults that fit no federation, unless the user has set them.
    user_keys = {word.partition("=")[0] for word in run_words}
    defaults = dict(DEFAULT_OVERRIDES)
    if "dataset=sites" in run_words and "dataset.path" not in user_keys:
        defaults["dataset.path"] = "null"
        if "clients" not in user_keys:
            raise FedpflError(
                "each node brings its site, so that clients must say how many there are: clients=3"
            )
    run_words += [f"{key}={value}" for key, value in defaults.items() if key not in user_keys]

    # ---- Step 3: Hydra composes the run.
    try:
        plugins.load_plugins(overrides.read_list_value(run_words, "plugins"))
        federate_settings = build_dataclass(FederateSettings, settings, "federate")
        return federate_settings, overrides.compose_single_run(run_words)
    except overrides.HYDRA_ERRORS as error:
        raise FedpflError(format_error(error)) from None


def require_playable(plan: Plan) -> None:
    """Raise FedpflError for a run that no federation can play."""
    settings = plan.settings
    refusals = {
        "no newcomers; set unseen=0 and unseen_groups=[]": settings.newcomers
        or settings.unseen_groups,
        "real time, in which clients are late by themselves; set system=none": plan.system,
        "samples at their nodes; leave out eval.common": plan.eval.common,
        "nodes that play their clients' part honestly; set attack=none": plan.attack,
        "nodes that hold what they hold; leave out shift.at": plan.shift.at,
        f"no task={plan.task.name}, which is for train": plan.task in (SURVIVAL, NEXT_TOKEN),
        "samples that stay at nodes; centralized training is for train": plan.method.pools_samples,
    }
    for problem, is_there in refusals.items():
        if is_there:
            raise FedpflError(f"a federation has {problem}")
    if sites.are_samples_at_nodes(plan.config):
        sites.require_sites_partition(plan)


@contextlib.contextmanager
def _explain_needs(settings: FederateSettings) -> Iterator[None]:
    """Say of a method that reads what does not travel how it can be played."""
    try:
        yield
    except (NotSentError, KeyError) as error:
        if settings.share_states:
            raise
        raise FedpflError(
            f"the method needs more than is sent ({error}): clients' states would leave them in "
            "every round; federate.share_states=true allows it"
        ) from error


def run_server(grid: Grid, words: Sequence[str]) -> Path:
    """Play a federation to its end, and return its run directory. Raises FedpflError."""
    settings, cfg = compose_federation(words)
    path = Path(cfg.hydra.run.dir)
    with user_errors(cfg, path):
        # ---- Step 1: is it a run for nodes, and on which data?
        plan = check_config(cfg)
        require_playable(plan)
        agreement = None
        share: Share = share_nothing
        if sites.are_samples_at_nodes(plan.config):
            agreement = sites.load_agreement(path, plan)
            agreement = agreement or sites.agree_with_nodes(grid, plan, settings)
            share = sites.share_agreement(plan, agreement)

        # ---- Step 2: the run is played as any other, its clients being at nodes.
        wire_log = WireLog(path, agreement)

        def make_remote_backend(run: Run) -> RemoteBackend:
            backend = _make_remote_backend(run, grid, settings, agreement)
            wire_log.backend = backend
            account = run.client_account
            # Without a seed, noise differs at each start: answers must not be averaged out.
            if account and account.noise and account.privacy.seed is None:
                backend.release_folder = path
            return backend

        remote = session.RemoteClients(make_remote_backend, share)
        with _explain_needs(settings):
            server = session.Session(plan=plan, path=path, callbacks=[wire_log], remote=remote)
            for _ in server.play():
                pass
    return path


def _make_remote_backend(
    run: Run, grid: Grid, settings: FederateSettings, agreement: Agreement | None
) -> RemoteBackend:
    """Return the backend that asks nodes. Raises FedpflError for what may not leave them."""
    # ---- Step 1: is the method right, and may it see all that it needs?
    try_plugins(run, has_samples=agreement is None)
    if run.method.server_sees == SEES[-1] and not settings.share_states:
        raise NotSentError("its server looks at clients' states")

    # ---- Step 2: the backend, which knows every client's initial state.
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
        compatibility_key=make_run_key(run),
        initial_state=initial_state,
        settings=settings,
    )
    backend.agreement = agreement.model_dump() if agreement else None
    return backend


class WireLog(Callback):
    """Write `wire.csv`: the bytes of each round, and the agreement of nodes' sites.

    A row has the bytes that are counted, those of all messages, and those of evaluations.

    Attributes:
        backend: The backend with the counted messages; set before the run begins.
    """

    backend: RemoteBackend

    def __init__(self, run_directory: Path, agreement: Agreement | None = None):
        self._path = run_directory / "wire.csv"
        self._agreement = agreement

    def on_begin(self, run: Any) -> None:
        """Begin the file, or keep the rows of the rounds that are done."""
        if self._agreement:
            sites.save_agreement(self._path.parent, run.identity, self._agreement)
        lines = (files.read_if_exists(self._path) or b"").decode().splitlines()
        # A server that was killed may have written rounds after its last checkpoint.
        self._lines = [",".join(WIRE_COLUMNS), *lines[1 : run.start_round + 1]]
        self._write_lines()

    def on_round(self, round: Any) -> None:
        """Add the row of a round."""
        row = round.row
        counted = {"counted_down": row["bits_down"] / 8, "counted_up": row["bits_up"] / 8}
        numbers = {"round": row["round"], "answers": row["participants"]}
        totals: dict[str, float] = {**numbers, **counted, **self.backend.wire_bytes}
        self.backend.wire_bytes.clear()
        self._lines.append(",".join(f"{totals.get(name, 0):.0f}" for name in WIRE_COLUMNS))
        self._write_lines()

    def _write_lines(self) -> None:
        # The whole file, which no link can lead elsewhere.
        with files.durable_write(self._path) as file:
            file.write("\n".join([*self._lines, ""]).encode())
