"""Train by fedpfl itself: FedOBP on one of the backends, with the time of each part of a round."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import CLIENTS, CORES, LOCAL, SEED, Task
from fedpfl import engine
from fedpfl.engine.backends import loop
from fedpfl.engine.backends.loop import LoopBackend
from fedpfl.engine.calls import EvalCall, TrainCall
from fedpfl.engine.keys import Draws
from fedpfl.engine.store import RowStorage
from fedpfl.ground import tree
from fedpfl.methods import Method
from fedpfl.methods.fedavg import FedAvg
from fedpfl.methods.fedobp import FedOBP
from fedpfl.record import rundir

HOOKS = ("prepare", "start", "download", "metrics", "finish", "aggregate")
METHOD = FedOBP(q=0.99993)


def run_rounds(
    task: Task, device: torch.device, engine_settings: engine.Engine, store: str = "auto"
) -> dict[str, float]:
    """Train rounds of FedOBP, and record each.

    Shares of a round's parts are those of the loop backend, whose parts have an end.
    """
    # ---- Train
    federation = task.federation().to(device)
    net = task.net(federation)
    backend = engine.make_backend(engine_settings, net, device)
    clock = PartClock()
    clock.time_backend(backend)
    method = clock.time_hooks(METHOD)
    cohorts = task.cohorts()
    all_clients = list(range(federation.clients))
    with tempfile.TemporaryDirectory() as folder:
        settings = engine.Store(store)  # type: ignore[arg-type]
        storage = RowStorage(store=settings, folder=Path(folder))
        state = engine.make_initial_state(method, net, federation.clients, device, storage)
        with rundir.RunDirectory.open(Path(folder) / "run", "", "benchmark") as directory:
            directory.restore()
            # The first round warms up.
            state, _ = engine.play_round(
                engine.RoundSetup(backend, method, federation, LOCAL, SEED), state, cohorts[-1]
            )
            clock.seconds.clear()
            start_time = time.perf_counter()
            for number, cohort in enumerate(cohorts[: task.rounds], 1):
                state, outcome = engine.play_round(
                    engine.RoundSetup(backend, method, federation, LOCAL, SEED), state, cohort
                )
                with clock.measure("log"):
                    row = {"round": number, "bits_up": outcome.traffic.bits_up, **outcome.metrics}
                    directory.row(row)
            seconds = time.perf_counter() - start_time

    # ---- Times of hooks add up over threads, but for those at the server
    threads = CORES if isinstance(backend, LoopBackend) and device.type == "cpu" else 1
    part_seconds = {
        part: clock.seconds.get(part, 0.0) / threads for part in ("train", "evaluate", "hooks")
    }
    part_seconds["hooks"] += clock.seconds.get("aggregate", 0.0)
    part_seconds["log"] = clock.seconds["log"]

    # ---- Evaluate all clients
    initial_state = engine.make_initial_state(FedAvg(), net, federation.clients, device)
    start_time = time.perf_counter()
    counts = backend.evaluate(EvalCall(FedAvg(), federation, initial_state, all_clients))
    tested_samples = int(counts.total.sum())
    evaluation_seconds = time.perf_counter() - start_time
    return {
        "seconds": seconds,
        "samples": task.sample_steps(federation),
        **{f"share_{part}": value / seconds for part, value in part_seconds.items()},
        "tested_per_second": tested_samples / evaluation_seconds,
        "state_mib": sum(map(tree.nbytes, state.rows.trees)) / 2**20,
    }


def run_sweep(
    task: Task, device: torch.device, engine_settings: engine.Engine, run_count: int
) -> dict[str, float]:
    """Train a round of several runs of other seeds together, as a lockstep sweep does."""
    federation = task.federation().to(device)
    net = task.net(federation)
    backend = engine.make_backend(engine_settings, net, device)
    calls = []
    samples = 0
    for seed in range(run_count):
        (cohort,) = engine.draw_cohorts(seed, CLIENTS, task.width / CLIENTS, 1)
        state = engine.make_initial_state(METHOD, net, federation.clients, device)
        draws = Draws(seed, "train", 1)
        calls.append(TrainCall(METHOD, federation, state, cohort, LOCAL, draws))
        samples += int(federation.train_sizes[cohort].sum()) * LOCAL.epochs
    # The first two warm up: a graph is captured where a width comes for the second time.
    for _ in range(3):
        start_time = time.perf_counter()
        for answer in backend.run(calls):
            assert not isinstance(answer, Exception), answer
            float(answer.loss.sum())  # waits for a GPU
    return {"seconds": time.perf_counter() - start_time, "samples": samples}


class PartClock:
    """Add up the seconds in parts of a round, of all threads together."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Time a block."""
        start_time = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start_time
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def time_calls(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return the same function, timed."""

        def timed_function(*arguments: Any, **options: Any) -> Any:
            with self.measure(part):
                return function(*arguments, **options)

        return timed_function

    def time_hooks(self, method: Method) -> Method:
        """Return the same method with its hooks timed."""
        method_type = type(method)
        hooks = {
            name: self.time_calls(
                getattr(method_type, name), name if name == "aggregate" else "hooks"
            )
            for name in HOOKS
        }
        values = {field.name: getattr(method, field.name) for field in fields(method)}
        return type(method_type.__name__, (method_type,), hooks)(**values)

    def time_backend(self, backend: engine.Backend) -> None:
        """Time the loop backend's training and evaluation; others overlap with a GPU's."""
        if isinstance(backend, LoopBackend):
            backend._train = self.time_calls(backend._train, "train")  # type: ignore[method-assign]
            # A process measures one variant, so that nobody else calls this function.
            loop.evaluate_client = self.time_calls(loop.evaluate_client, "evaluate")
