"""Save a run's progress and restore it.

It begins from the start, from its last checkpoint, or from a shorter run. A run's processes
(torchrun) share it: process 0 has the directory and tells the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from fedpfl import engine
from fedpfl.config import plugins
from fedpfl.config.plan import Plan
from fedpfl.config.run import Run
from fedpfl.data.fingerprint import FINGERPRINTED_PARTS
from fedpfl.engine.backends import ranks
from fedpfl.engine.store import RowStorage
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.files import damaged_error
from fedpfl.ground.identity import identity
from fedpfl.ground.records import Record, Values
from fedpfl.privacy import Secret
from fedpfl.record import environment, rounds, run_files
from fedpfl.record.columns import METRICS
from fedpfl.record.rundir import NullRunDirectory, RunDirectory
from fedpfl.runner.loop import Round

KeepLocal = Callable[[engine.State], engine.State]
"""Returns of a fresh state what is kept in this process."""
STATE_TREES = ("server", "server_buffers", "stopping", "privacy")
"""Trees of a state that a checkpoint holds beside the clients' rows."""


def open_directory(run: Run, path: Path) -> AbstractContextManager[Any]:
    """Open the run's directory; processes beside the first get a stand-in. Raises FedpflError."""
    identity_and_seed = f"{run.identity}-seed{run.settings.seed}"
    code = digest_code(run)
    ranks.require_same_facts(
        configuration=identity_and_seed,
        data=run.fingerprint,
        code=code,
        torch=torch.__version__,
    )
    if not ranks.is_main_process():
        return nullcontext(NullRunDirectory(path))
    return RunDirectory.open(
        path,
        OmegaConf.to_yaml(run.config),
        identity_and_seed,
        run.fingerprint,
        code,
        run.settings.restart,
    )


def digest_code(run: Plan) -> dict[str, str]:
    """Return digests of the code that a run's numbers come from."""
    return environment.source_fingerprint(type(run.method)) | plugins.digest_plugins(
        run.config["plugins"]
    )


def is_finished(directory: RunDirectory | NullRunDirectory) -> bool:
    """Tell if the run is already finished."""
    return ranks.broadcast_value(directory.status) == "finished"


def add_secret(run: Run, progress: Progress, draws_at_nodes: bool = False) -> Run:
    """Return a private run with the secret of its noise and cohorts.

    Args:
        run: the built run.
        progress: has the directory in which the secret is kept.
        draws_at_nodes: whether clients are at nodes, where those draw that hide their samples.

    Raises:
        FedpflError: where it is not the one that the run began with.
    """
    if not run.account:
        return run
    if run.sample_account and draws_at_nodes:
        # The server only draws an example, for the form of answers.
        return replace(run, secret=Secret.of_seed(run.settings.seed))

    def read_key() -> bytes:
        return bytes.fromhex(ranks.broadcast_value(progress.directory.secret()))

    return replace(run, secret=make_secret(run, read_key))


def make_secret(run: Run, read_key: Callable[[], bytes]) -> Secret:
    """Return the secret that a private run draws from.

    Args:
        run: the built run.
        read_key: returns the run's secret key; called only for a promise with noise.
    """
    assert run.privacy
    assert run.account
    if run.privacy.seed is not None:
        secret = Secret.of_seed(run.privacy.seed)
    elif not run.account.noise:  # nothing is promised
        secret = Secret.of_seed(run.settings.seed)
    else:
        secret = Secret(read_key())
    # Equal noise in two runs would cancel in their difference, so noise differs even between runs
    # with the same key.
    code = sorted(digest_code(run).items())
    run_key = (run.identity, run.settings.seed, run.fingerprint, code)
    return secret.bind_to(run_key)


# ---- Begin or go on


def restore_state(
    run: Run,
    checkpoint: Record,
    path: Path | None,
    keep_local: KeepLocal | None = None,
) -> engine.State:
    """Return the state that a checkpoint holds, or a fresh one for {}. Empties `checkpoint`.

    Args:
        run: the built run.
        checkpoint: what `Progress.save` wrote, {} before the first round.
        path: the run directory, None where nothing is stored on disk.
        keep_local: returns the part of a fresh state that this process keeps.

    Raises:
        FedpflError: for a checkpoint of another version or form.
    """
    # ---- Step 1: a fresh state. The checkpoint overwrites its rows.
    file = (path or Path()) / "state.pt"
    storage = RowStorage(store=run.state, folder=path)
    state = engine.make_initial_state(
        method=run.method,
        net=run.net,
        clients=run.federation.clients,
        device=run.device,
        storage=storage,
        seed=run.settings.seed,
        stopping=run.stopping.early,
    )
    state = replace(state, privacy=engine.make_privacy_state(run.account, run.device))
    if keep_local:
        state = keep_local(state)

    # ---- Step 2: client states, block by block.
    blocks = ranks.broadcast_each(checkpoint.pop("rows", []))
    for block in blocks:
        one_client = tree.take(tree.drop(block, ["who"]), 0)
        initial = state.rows.initial_of(int(block["who"][0]))
        if tree.specs(one_client) != tree.specs(initial):
            raise damaged_error(file, "holds client states of another form than the method now has")
        state.rows.load_([block])

    # ---- Step 3: the server's state.
    saved = ranks.broadcast_value({key: checkpoint.pop(key, {}) for key in ("round", *STATE_TREES)})
    if not saved["round"]:
        return state
    trees = {name: tree.clone(tree.to(saved[name], run.device)) for name in STATE_TREES}
    fresh_trees = {name: getattr(state, name) for name in STATE_TREES}
    if tree.specs(trees) != tree.specs(fresh_trees):
        raise damaged_error(file, "holds a server state of another form than the method now has")
    return replace(state, round=saved["round"], **trees)


class Progress:
    """Track and save the progress of a run.

    Attributes:
        run: the built run.
        directory: its run directory; a stand-in in processes beside the first.
        state: what server and clients hold after the last finished round.
        best_row: the evaluated row of the best score.
        last_row: the last evaluated row.
        recorded_engine: the engine that computed rounds before this process.
    """

    def __init__(
        self,
        run: Run,
        directory: Any,
        shorter_run: Record | None,
        started: float,
        keep_local: KeepLocal | None = None,
    ):
        """Restore the progress of a directory's run. Raises FedpflError for a damaged checkpoint.

        Args:
            run: the built run.
            directory: its run directory.
            shorter_run: checkpoint that a run without a checkpoint continues.
            started: when this process began with it, by the monotonic clock.
            keep_local: as in `restore_state`.
        """
        self.run = run
        self.directory = directory
        checkpoint = directory.restore(shorter_run) or {}
        self.state = restore_state(run, checkpoint, directory.path, keep_local)
        empty: Record = {"best": {}, "last": {}, "seconds": 0.0, "engine": {}}
        saved: Record = ranks.broadcast_value(
            {key: checkpoint.get(key, empty[key]) for key in empty}
        )
        self.best_row: Record = saved["best"]
        self.last_row: Record = saved["last"]
        self.recorded_engine: Record = saved["engine"]
        self._started = started - saved["seconds"]
        self._engine_record: Record = {}
        self._saved_at = time.monotonic()
        self._saved_round = self.state.round
        self._save_seconds = 0.0  # that the last checkpoint took
        self._row_writes = self.state.rows.writes

    @property
    def seconds(self) -> float:
        """Return the seconds that the run took so far, in all its processes."""
        return time.monotonic() - self._started

    def count_round(self, played_round: Round, engine_record: Values) -> None:
        """Take in a finished round, and the engine that computed it."""
        self.state = played_round.state
        # Rows are overwritten in place: by this number `save_if_left` knows whether they still are
        # of this round.
        self._row_writes = self.state.rows.writes
        if played_round.is_evaluated:
            self.last_row = dict(played_round.row)  # callbacks may change theirs
            task = self.run.task
            if task.is_better(self.last_row[task.score], self.best_row.get(task.score)):
                self.best_row = self.last_row
        if engine_record != self._engine_record:
            self._engine_record = dict(engine_record)
            self.directory.write_summary(engine=self._engine_record)

    def save_if_due(self, is_last: bool) -> None:
        """Save where it is time to.

        Args:
            is_last: whether this was the run's last round, after which `checkpoint.keep` decides.
        """
        settings = self.run.checkpoint
        if is_last:
            is_due = settings.keep
        else:
            # Checkpoints that take long come less often.
            is_due = settings.is_due(time.monotonic() - self._saved_at, self._save_seconds)
        if ranks.broadcast_value(is_due):
            self.save()

    def save_if_left(self) -> None:
        """Save the last finished round, unless the next has overwritten its client states."""
        rows = self.state.rows
        is_new = self.state.round > self._saved_round
        if is_new and rows.writes == self._row_writes:
            self.save()

    def save(self) -> None:
        """Write a checkpoint."""
        start_time = time.monotonic()
        self.directory.checkpoint(
            {
                "round": self.state.round,
                "rows": self.state.rows.saved(),
                **{name: getattr(self.state, name) for name in STATE_TREES},
                "best": self.best_row,
                "last": self.last_row,
                "seconds": self.seconds,
                "engine": self._engine_record,
            }
        )
        self._saved_at = time.monotonic()
        self._saved_round = self.state.round
        self._save_seconds = self._saved_at - start_time


# ---- Extend a shorter run


def load_shorter_run(run: Run) -> Record | None:
    """Return the checkpoint of the run that `extend` names, as this run would have it.

    None without `extend`, and in processes beside the first.

    Raises:
        FedpflError: where it is no shorter run of the same settings, seed, data and method.
    """
    settings = run.settings
    if not settings.extend or not ranks.is_main_process():
        return None
    path = Path(settings.extend).expanduser()
    summary, checkpoint = run_files.read_finished_run(path)
    rounds_done = checkpoint["round"]

    # ---- Settings that depend on the number of rounds would have made another run
    obstacles = {
        "local.decay=cosine, whose learning rates depend": run.local.decay == "cosine",
        "privacy.epsilon, whose noise depends": run.privacy and run.privacy.epsilon is not None,
        f"method={run.config['method']['name']}, which depends": _depends_on_rounds(
            run, rounds_done
        ),
    }
    for setting, is_obstacle in obstacles.items():
        if is_obstacle:
            raise FedpflError(f"extend is not for {setting} on the number of rounds; run it anew")

    # ---- The same settings, seed and data
    shorter_config = {**run.config, "rounds": rounds_done}
    shorter_identity = f"{identity(shorter_config)}-seed{settings.seed}"
    if summary["identity"] != shorter_identity or rounds_done >= settings.rounds:
        differences = run_files.differences_from(path, shorter_config)
        differences_text = f" ({differences})" if differences else ""
        raise FedpflError(
            f"extend: {path} holds no run of these settings, seed {settings.seed} and fewer "
            f"rounds than {settings.rounds}{differences_text}; set rounds to more than it has, "
            "and all else as it was"
        )
    if summary.get("data") != run.fingerprint:
        raise FedpflError(f"extend: {path} was run on other data ({FINGERPRINTED_PARTS})")
    return {**checkpoint, **_drop_final_evaluation(run, rounds_done, checkpoint["files"])}


def _depends_on_rounds(run: Run, shorter_rounds: int) -> bool:
    """Compare the method's initial states for both numbers of rounds."""

    def initial_leaves(rounds_planned: int) -> list[Tensor]:
        parts = replace(run.net.parts, rounds=rounds_planned)
        server, client = run.method.init(run.net.params, parts)
        return tree.leaves({"server": server, "client": client})

    pairs = zip(
        initial_leaves(shorter_rounds),
        initial_leaves(run.settings.rounds),
        strict=True,
    )
    return not all(torch.equal(shorter, longer) for shorter, longer in pairs)


def _drop_final_evaluation(run: Run, rounds_done: int, files: dict[str, str]) -> Record:
    """Return a shorter run's rows, best and last, without what only its last round evaluated."""
    rows = rounds.read_rows(files["rounds.csv"])
    is_evaluated = rounds_done % run.eval.every == 0
    is_finetuned = rounds_done % (run.eval.finetune_every or 1) == 0
    for name in METRICS.keys() & rows[-1].keys():
        metric = METRICS[name]
        is_of_evaluation = metric.is_evaluated or name in ("eval_seconds", "evaluated")
        if (metric.fine_tuned and not is_finetuned) or (is_of_evaluation and not is_evaluated):
            rows[-1][name] = None
    text = "".join(map(rounds.format_row, (rows[0], *(row.values() for row in rows))))
    score = run.task.score
    rows = [row for row in rows if row[score] is not None]
    find_best = max if run.task.is_higher_better else min
    return {
        "best": find_best(rows, key=itemgetter(score), default={}),
        "last": rows[-1] if rows else {},
        "files": {**files, "rounds.csv": text},
    }
