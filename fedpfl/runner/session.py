"""A run in its directory: each round of loop.py is written, shown, saved, and judged by a search,
in that order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from fedpfl import engine
from fedpfl.config import plugins
from fedpfl.config.plan import Run, build_run, check_config, share_nothing
from fedpfl.data import fingerprint
from fedpfl.engine.backends import lockstep, ranks
from fedpfl.ground import tree
from fedpfl.record import loggers
from fedpfl.record.callbacks import Callback, Callbacks
from fedpfl.runner import header, resume, timing
from fedpfl.runner.attendance import find_trained_clients
from fedpfl.runner.everyone import ClientTable
from fedpfl.runner.faults import Diverged, TrialPruned
from fedpfl.runner.loop import Round, train_rounds
from fedpfl.runner.needs import estimate_needs
from fedpfl.runner.trials import ShouldPrune, replay_evaluations

CHOSEN = ("backend", "graphs", "width")
"""What engine=auto finds out, of the engine's keys."""


def play_session(
    cfg: DictConfig,
    path: Path,
    experiment: str | None = None,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
    watch: ShouldPrune = lambda number, row: False,
    elsewhere: Callable[[Run], engine.Backend] | None = None,
    search: str = "",
) -> Iterator[Round]:
    """Run (or resume, or recognise as finished) what `cfg` says in run directory `path`; yields
    rounds as they end.

    Closed before its end it saves the run, which goes on from there when it is asked for again.
    quiet: nothing on the
    terminal. watch: asked at the beginning and after evaluations whether to give up. elsewhere:
    makes a backend in the place of the engine's, whose clients are not in this process. search:
    that it is a trial of, which the summary then says to who makes tables. Raises FedpflError.
    """
    started, stage = time.monotonic(), lockstep.stage.get()
    path = Path(ranks.share(str(path)))
    run = build_run(check_config(cfg), stage.share if stage else share_nothing)
    needs, remote = estimate_needs(run), elsewhere(run) if elsewhere else None
    added = plugins.make_callbacks(run.config["plugins"]) if ranks.leads() else []
    earlier = resume.load_shorter_run(run)
    with resume.open_directory(run, path) as directory:
        if resume.is_finished(directory):
            if ranks.leads():
                header.report_finished(directory, quiet)
            if search and replay_evaluations(path, watch, finished=True):
                raise TrialPruned("given up")
            return
        progress = resume.Progress.of(
            run, directory, earlier, started, remote.select_local_state if remote else None
        )
        run = resume.add_secret(run, progress)
        backend, everyone = remote or _backend(run, stage, progress.known), ClientTable(run)
        mark = {"search": search} if search else {}
        directory.write_summary(status="running", **header.make_summary_facts(run), **mark)
        everyone.write_partition(directory)
        heard = Callbacks()
        if ranks.leads():
            group = experiment or run.federation.name
            # In lockstep and at nodes it depends on others.
            timed = not (stage or remote) and timing.is_worth_timing(run, progress.state.round)
            forecast = timing.forecast_run(run, progress.state) if timed else None
            about = directory, group, backend, progress.state, everyone.counts, needs
            info = header.introduce_run(run, *about, forecast=forecast)
            heard = loggers.start_callbacks(run.config["logger"], info, quiet, [*callbacks, *added])
        with heard, _ending(progress, heard):
            if search and replay_evaluations(path, watch, finished=False):
                raise TrialPruned("given up")
            yield from _recorded(run, progress, backend, everyone, heard, watch)


def _recorded(
    run: Run,
    progress: resume.Progress,
    backend: engine.Backend,
    everyone: ClientTable,
    callbacks: Callbacks,
    watch: ShouldPrune,
) -> Iterator[Round]:
    """Yield each round when all is done that there is to do with it."""
    directory = progress.directory
    if watch(progress.state.round, None):
        raise TrialPruned("given up")
    for round in train_rounds(run, backend, progress.state, callbacks.on_evaluation):
        # ---- run directory
        if round.judged:
            directory.write_clients(everyone.rows(round.clients))
        elif round.last:
            directory.write_clients(everyone.rows({"accuracy": {}}))  # nobody has made a step
        if round.matrix:
            directory.write_clients(everyone.matrix(round.matrix), "common.csv")
        directory.row(round.row)
        progress.count(round, _used(run, backend))

        # ---- callbacks
        for note in round.notes:
            callbacks.on_note(note)
        callbacks.on_round(round)

        # ---- checkpoint
        progress.save_if_due(round.last)

        # ---- whoever asked for rounds
        yield round

        # ---- search
        if round.judged and not round.last and watch(round.state.round, progress.last):
            raise TrialPruned("given up")


@contextmanager
def _ending(progress: resume.Progress, callbacks: Callbacks) -> Iterator[None]:
    """Write and tell how a run ends: finished, diverged, given up, or left. Of failures others take
    care.
    """
    run, directory = progress.run, progress.directory
    try:
        yield
    except (GeneratorExit, KeyboardInterrupt):
        progress.save_if_left()
        raise
    except TrialPruned:
        done = progress.state.round
        why = f"given up after round {done}: its validation accuracy is below the others' median"
        callbacks.on_end("interrupted", {**directory.summary, "error": why})
        raise
    except Diverged as error:
        directory.write_summary(status="diverged", error=str(error))
        callbacks.on_end("diverged", directory.summary)
        raise
    trained = len(find_trained_clients(progress.state))
    masks = engine.compare_masks(run.method, progress.state)
    directory.write_masks(
        masks and {**masks, "clients": [run.federation.number(one) for one in masks["clients"]]}
    )
    ended = {"best": progress.best, "last": progress.last, "hours": progress.spent / 3600}
    directory.write_summary(
        status="finished", **ended, rounds_played=progress.state.round, trained=trained
    )
    if not run.checkpoint.keep:
        directory.drop_checkpoint()
    callbacks.on_end("finished", directory.summary)


def play(cfg: DictConfig, path: Path, **more: Any) -> None:
    """Play a `session` to its end. Raises FedpflError."""
    for _ in play_session(cfg, path, **more):
        pass


def _backend(run: Run, stage: lockstep.Stage | None, known: dict[str, Any]) -> engine.Backend:
    """Return that of the run's processes, or in a lockstep sweep of all runs with such a network
    and engine.

    known: `_used` by the part of the run that is done; on the same kind of device the rest goes on
    by it, bit for bit.
    """
    taken = tree.select(known, CHOSEN) if known.get("device") == run.device.type else {}
    over = partial(ranks.over, device=run.device)
    make = partial(engine.choose, run.engine, run.net, run.device, taken, over, ranks.share)
    if stage is None:
        return make()
    network = str(run.config["model"]), str(run.config.get("adapter")), fingerprint(run.net.frozen)
    shape = (*network, run.federation.shape, run.federation.classes)
    key = ("backend", *shape, run.engine, run.device, *taken.values())
    return lockstep.Shared(stage, stage.share(key, make))


def _used(run: Run, backend: engine.Backend) -> dict[str, Any]:
    """Return what answers, on what, and the seconds of each that was tried."""
    chosen = {name: getattr(backend.engine, name) for name in CHOSEN}
    return {"device": run.device.type, **chosen, "seconds": getattr(backend, "seconds", {})}
