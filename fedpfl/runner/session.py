"""A run in its directory: rounds of loop.py are written, shown, saved and judged by a search."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedpfl import engine
from fedpfl.config import plugins
from fedpfl.config.dealing import Share, share_nothing
from fedpfl.config.plan import Plan
from fedpfl.config.run import Run, build_run
from fedpfl.data import fingerprint
from fedpfl.engine.backends import lockstep, ranks
from fedpfl.ground import tree
from fedpfl.ground.records import Record, Values
from fedpfl.record import loggers
from fedpfl.record.callbacks import Callback, Callbacks
from fedpfl.record.run_files import STATES_AT_NODES, require_states_here
from fedpfl.runner import header, resume
from fedpfl.runner.everyone import ClientTable
from fedpfl.runner.faults import Diverged, TrialPruned
from fedpfl.runner.loop import Round, find_trained_clients, train_rounds
from fedpfl.runner.needs import ResourceNeeds, estimate_needs
from fedpfl.runner.trials import SearchTrial
from fedpfl.testing.run_trial import try_plugins

RECORDED_ENGINE_KEYS = ("backend", "graphs", "width")
"""Keys of the engine that engine=auto finds out."""


@dataclass(frozen=True)
class RemoteClients:
    """Reach clients that are in other processes.

    Attributes:
        make_backend: makes the backend that asks them.
        share: as in `build_run`; if the samples are at nodes, it gives their form.
    """

    make_backend: Callable[[Run], engine.Backend]
    share: Share = share_nothing


@dataclass(frozen=True, kw_only=True)
class Session:
    """Begin or resume the run of a plan in its directory.

    Attributes:
        plan: the checked configuration of one run.
        path: its run directory.
        experiment: the experiment that it belongs to, for callbacks.
        is_quiet: whether to print nothing on the terminal.
        callbacks: what hears of the run beside its loggers and plugins.
        trial: the trial of a search that this run is, None for any other run.
        remote: how clients are reached that are not in this process.
    """

    plan: Plan
    path: Path
    experiment: str | None = None
    is_quiet: bool = False
    callbacks: Sequence[Callback] = ()
    trial: SearchTrial | None = None
    remote: RemoteClients | None = None

    def play(self) -> Generator[Round]:
        """Yield rounds as they end; a finished run has none.

        Closed before its end, a session saves the run, which goes on from there when it is asked
        for again.

        Raises:
            FedpflError: for a mistake in the directory, the data or the training.
        """
        # ---- Step 1: read the data and build the run. Under torchrun all share process 0's path.
        started = time.monotonic()
        stage = lockstep.current_stage.get()
        path = Path(ranks.broadcast_value(str(self.path)))
        remote = self.remote
        share = remote.share if remote else share_nothing
        run = build_run(self.plan, stage.share if stage else share)
        needs = estimate_needs(run)
        remote_backend = remote.make_backend(run) if remote else None
        callbacks = [*self.callbacks]
        if ranks.is_main_process():
            callbacks += plugins.make_callbacks(run.settings.plugins)
        shorter_run = resume.load_shorter_run(run)

        admission = stage.admit(needs.states, run.state.on(run.device)) if stage else nullcontext()
        with admission, resume.open_directory(run, path) as directory:
            if resume.is_finished(directory):
                self._report_finished(directory, path)
                return

            # ---- Step 2: restore the last checkpoint, and describe the run in its directory.
            if remote_backend is None:
                require_states_here(path, directory.summary)
            progress = resume.Progress(
                run=run,
                directory=directory,
                shorter_run=shorter_run,
                started=started,
                keep_local=remote_backend.select_local_state if remote_backend else None,
            )
            run = resume.add_secret(run, progress, draws_at_nodes=remote_backend is not None)
            backend = remote_backend or _make_backend(run, stage, progress)
            open_run = _OpenRun(run, path, progress, backend, ClientTable(run), self.trial)
            open_run.describe_run(has_picture=bool(callbacks or run.loggers))

            # ---- Step 3: introduce the run, and play its rounds.
            group = self.experiment or run.federation.name
            run_callbacks = open_run.start_callbacks(group, needs, self.is_quiet, callbacks)
            with run_callbacks, open_run.report_ending(run_callbacks):
                yield from open_run.play_rounds(run_callbacks)

    def _report_finished(self, directory: Any, path: Path) -> None:
        """Tell the user and the search of a run that was finished before."""
        if ranks.is_main_process():
            header.report_finished(directory, self.is_quiet)
        if self.trial:
            self.trial.replay(path, is_finished=True)


@dataclass(frozen=True, eq=False)
class _OpenRun:
    """Play a run with its directory, backend and search.

    Attributes:
        run: the built run.
        path: its run directory.
        progress: how far it has come.
        backend: what computes the clients.
        client_table: of all clients.
        trial: the trial of a search that this run is, None for any other run.
    """

    run: Run
    path: Path
    progress: resume.Progress
    backend: engine.Backend
    client_table: ClientTable
    trial: SearchTrial | None

    def describe_run(self, has_picture: bool) -> None:
        """Write the facts of the run into its directory before the first round."""
        directory = self.progress.directory
        search_facts = {"search": self.trial.study_name} if self.trial else {}
        run_facts = header.make_summary_facts(self.run)
        if getattr(self.backend, "keeps_states_at_nodes", False):
            run_facts["states"] = STATES_AT_NODES
        directory.write_summary(status="running", **run_facts, **search_facts)
        directory.write_partition(self.client_table.make_partition_record(), has_picture)

    def start_callbacks(
        self, group: str, needs: ResourceNeeds, quiet: bool, callbacks: Sequence[Callback]
    ) -> Callbacks:
        """Introduce the run to callbacks, in the first process alone."""
        if not ranks.is_main_process():
            return Callbacks()
        run = self.run
        directory = self.progress.directory
        name = self.backend.name
        info = header.make_run_info(
            run.config,
            directory.path,
            directory.summary,
            group,
            name,
            start_round=self.progress.state.round,
            lines=tuple(header.format_header(run, directory.path, name, needs)),
            notes=(*directory.notes, *header.list_notes(run)),
        )
        return loggers.start_callbacks(run.loggers, info, quiet, callbacks)

    def play_rounds(self, callbacks: Callbacks) -> Iterator[Round]:
        """Play the rounds; write, show and save each, and yield it."""
        progress = self.progress
        trial = self.trial
        # The search also judges the rounds that a resumed trial has played.
        if trial:
            trial.replay(self.path, is_finished=False)
        for played_round in train_rounds(
            self.run, self.backend, progress.state, callbacks.on_evaluation, progress.last_row
        ):
            engine_record = _engine_record(self.run, self.backend)
            _record_round(played_round, progress, self.client_table, engine_record)
            for note in played_round.notes:
                callbacks.on_note(note)
            callbacks.on_round(played_round)
            progress.save_if_due(played_round.is_last)
            yield played_round
            if trial and played_round.is_evaluated and not played_round.is_last:
                trial.judge(played_round.state.round, progress.last_row)

    @contextmanager
    def report_ending(self, callbacks: Callbacks) -> Iterator[None]:
        """Report that a run finished, diverged, was pruned or was left."""
        directory = self.progress.directory
        task = self.run.task
        try:
            yield
        except (GeneratorExit, KeyboardInterrupt):
            # The last finished round is whole: a run that is left goes on from there.
            self.progress.save_if_left()
            raise
        except TrialPruned:
            side = "below" if task.is_higher_better else "above"
            reason = (
                f"given up after round {self.progress.state.round}: "
                f"its validation {task.score_word} is {side} the others' median"
            )
            callbacks.on_end("interrupted", {**directory.summary, "error": reason})
            raise
        except Diverged as error:
            directory.write_summary(status="diverged", error=str(error))
            callbacks.on_end("diverged", directory.summary)
            raise
        self._write_result()
        callbacks.on_end("finished", directory.summary)

    def _write_result(self) -> None:
        """Write the result of a finished run."""
        progress = self.progress
        directory = progress.directory
        if directory.summary.get("states") != STATES_AT_NODES:
            directory.write_masks(self._compare_masks())
        directory.write_summary(
            status="finished",
            best=progress.best_row,
            last=progress.last_row,
            hours=progress.seconds / 3600,
            rounds_played=progress.state.round,
            trained=len(find_trained_clients(progress.state)),
        )
        if not self.run.checkpoint.keep:
            directory.drop_checkpoint()

    def _compare_masks(self) -> Record | None:
        """Compare clients' masks, by their numbers in the partition; None without masks."""
        federation = self.run.federation
        masks = engine.compare_masks(self.run.method, self.progress.state)
        if not masks:
            return None
        clients = masks["clients"]
        numbers = [federation.partition_number(client) for client in clients]
        masks = {**masks, "clients": numbers}
        if clients and federation.client_names:
            masks["names"] = [federation.client_names[client] for client in clients]
        return masks


def _record_round(
    played_round: Round,
    progress: resume.Progress,
    client_table: ClientTable,
    engine_record: Values,
) -> None:
    """Write the measurements of a round to the run directory."""
    directory = progress.directory
    if played_round.is_evaluated:
        columns = {**played_round.clients, **_spent_privacy(played_round)}
        directory.write_clients(client_table.make_rows(columns))
    elif played_round.is_last:  # no client has made a step
        directory.write_clients(client_table.make_rows({progress.run.task.score: {}}))
    if played_round.matrix:
        directory.write_clients(client_table.make_matrix_rows(played_round.matrix), "common.csv")
    # Last: a row says that all else of its round is written.
    directory.row(played_round.row)
    progress.count_round(played_round, engine_record)


def _spent_privacy(played_round: Round) -> dict[str, dict[int, float]]:
    """Return the column of each client's epsilon; {} where clients have none."""
    run = played_round.run
    account = run.sample_account
    if account is None or not account.noise:
        return {}
    epsilons = {}
    for client in range(run.federation.clients):
        number = run.federation.partition_number(client)
        epsilons[number] = account.client_epsilon(client, played_round.state.round)
    return {"epsilon": epsilons}


def _make_backend(
    run: Run, stage: lockstep.LockstepStage | None, progress: resume.Progress
) -> engine.Backend:
    """Return the backend that computes a run's clients.

    In a lockstep sweep, all runs with the same network and engine share one.

    Args:
        run: the built run.
        stage: of the lockstep sweep, None without any.
        progress: has the `_engine_record` of the part of the run that is done. On the same type of
            device the rest goes on by it, so that results are bit for bit the same.

    Raises:
        FedpflError: for a plugin's method with wrong numbers.
    """
    # ---- The choice before an interruption holds on the same type of device.
    recorded_engine = progress.recorded_engine
    resumed_engine: Record = {}
    if recorded_engine.get("device") == run.device.type:
        resumed_engine = tree.select(recorded_engine, RECORDED_ENGINE_KEYS)
    make = partial(
        engine.choose_backend,
        run.engine,
        run.net,
        run.device,
        resumed_engine,
        partial(ranks.distribute_backend, device=run.device),
    )
    # ---- In lockstep, runs share a backend if they share all its parts.
    if stage:
        networks = []
        for net in run.net.nets:
            # A user's network may have drawn more by the seed than its weights.
            unused = ["seed"] if net.traits.trusted else []
            facts = tree.drop(net.facts, unused)
            networks.append((str(tree.specs(net.params)), str(facts), net.fixed))
        key = (
            "backend",
            str(run.config["model"]),
            str(run.config.get("adapter")),
            fingerprint(networks),
            run.federation.shape,
            run.federation.classes,
            run.engine,
            run.device,
            *resumed_engine.values(),
        )
        backend: engine.Backend = lockstep.LockstepBackend(stage, stage.share(key, make))
    else:
        backend = make()
    try_plugins(run, backend, progress.state.round)
    return backend


def _engine_record(run: Run, backend: engine.Backend) -> Record:
    """Return the engine settings in use and the device type."""
    settings = {name: getattr(backend.engine, name) for name in RECORDED_ENGINE_KEYS}
    return {"device": run.device.type, **settings}
