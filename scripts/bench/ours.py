"""fedpfl itself: FedOBP on one of the backends, with the time that each part of a round takes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from bench.task import CORES, LOCAL, Task
from fedpfl import engine, models
from fedpfl.engine.backends.loop import Loop
from fedpfl.engine.calls import EvalCall, TrainCall
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.methods import FedAvg, FedOBP, Method
from fedpfl.record import rundir

HOOKS = ("prepare", "start", "download", "metrics", "finish", "aggregate")


def run(
    task: Task, device: torch.device, own: engine.Engine, store: str = "auto"
) -> dict[str, float]:
    """Rounds of FedOBP, each recorded; seconds by part on the loop backend, whose parts have an
    end.
    """
    fed = task.federation().to(device)
    net = models.build_network(task.model, fed.shape, fed.classes, 42)
    runner = engine.make(own, net, device)
    clock = Clock()
    method = clock.method(FedOBP(q=0.99993))
    cohorts, samples = task.cohorts(), 0
    threads = CORES if isinstance(runner, Loop) and device.type == "cpu" else 1
    clock.watch(runner)
    with tempfile.TemporaryDirectory() as folder:
        state = engine.make_initial_state(
            method, net, fed.clients, device, engine.Store(store), Path(folder)
        )  # type: ignore[arg-type]
        with rundir.RunDirectory.open(Path(folder) / "run", "", "benchmark") as directory:
            directory.restore()
            state, _ = engine.play_round(
                runner, method, fed, state, cohorts[-1], LOCAL, 42
            )  # warm up
            clock.spent.clear()
            started = time.perf_counter()
            for number, cohort in enumerate(cohorts[: task.rounds], 1):
                state, outcome = engine.play_round(runner, method, fed, state, cohort, LOCAL, 42)
                samples += int(fed.train_sizes[cohort].sum()) * LOCAL.epochs
                with clock.adding("log"):
                    directory.row(
                        {"round": number, "bits_up": outcome.traffic.bits_up, **outcome.metrics}
                    )
            seconds = time.perf_counter() - started
    parts = {name: clock.spent.get(name, 0.0) / threads for name in ("train", "evaluate", "hooks")}
    parts["hooks"] += clock.spent.get("aggregate", 0.0)
    parts["log"] = clock.spent["log"]
    before = time.perf_counter()
    counts = runner.evaluate(
        EvalCall(
            FedAvg(),
            fed,
            engine.make_initial_state(FedAvg(), net, fed.clients, device),
            list(range(fed.clients)),
        )
    )
    tested = int(counts.total.sum())
    return {
        "seconds": seconds,
        "samples": samples,
        **{f"share_{name}": value / seconds for name, value in parts.items()},
        "tested_per_second": tested / (time.perf_counter() - before),
        "state_mib": sum(map(tree.nbytes, state.rows.trees)) / 2**20,
    }


def jobs(task: Task, device: torch.device, own: engine.Engine, count: int) -> dict[str, float]:
    """`count` runs of other seeds answered together, as a lockstep sweep does; a round of each."""
    fed = task.federation().to(device)
    net = models.build_network(task.model, fed.shape, fed.classes, 42)
    runner = engine.make(own, net, device)
    method = FedOBP(q=0.99993)
    calls, samples = [], 0
    for seed in range(count):
        (cohort,) = engine.draw_cohorts(seed, 100, task.width / 100, 1)
        state = engine.make_initial_state(method, net, fed.clients, device)
        calls.append(TrainCall(method, fed, state, cohort, LOCAL, Draws(seed, "train", 1)))
        samples += int(fed.train_sizes[cohort].sum()) * LOCAL.epochs
    for _ in range(
        3
    ):  # the first two warm up: graphs are captured where a width comes for the second time
        started = time.perf_counter()
        for answer in runner.run(calls):
            assert not isinstance(answer, Exception), answer
            float(answer.loss.sum())  # waits for a GPU
    return {"seconds": time.perf_counter() - started, "samples": samples}


class Clock:
    """Adds up the time spent in parts of a round; of what runs on several threads, theirs together."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    @contextmanager
    def adding(self, part: str) -> Any:
        """Time a block."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self.spent[part] = self.spent.get(part, 0.0) + time.perf_counter() - before

    def timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The same callable, timed."""

        def timed(*arguments: Any, **named: Any) -> Any:
            with self.adding(part):
                return call(*arguments, **named)

        return timed

    def method(self, method: Method) -> Method:
        """The same method with its hooks timed."""
        kind = type(method)
        parts = {
            name: self.timed(getattr(kind, name), name if name == "aggregate" else "hooks")
            for name in HOOKS
        }
        values = {field.name: getattr(method, field.name) for field in fields(method)}
        return type(kind.__name__, (kind,), parts)(**values)

    def watch(self, runner: engine.Backend) -> None:
        """Time the loop backend's training and evaluation; the batched backend's overlap with a
        GPU's.
        """
        if isinstance(runner, Loop):
            runner._train = self.timed(runner._train, "train")  # type: ignore[method-assign]
            runner._evaluate = self.timed(runner._evaluate, "evaluate")  # type: ignore[method-assign]
