"""How long a run will take: a step and an evaluation are timed before its first round, and nothing
of it changes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fedpfl import engine
from fedpfl.config.plan import Run
from fedpfl.data import Federation
from fedpfl.engine.backends import ranks
from fedpfl.engine.calls import EvalCall, TrainCall
from fedpfl.engine.keys import Draws, generator, seeded_by_key
from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods import Method, Phase, Turn
from fedpfl.record.forecast import Forecast
from fedpfl.runner.evaluate import make_adaptation

SLOW, VERY_SLOW = 0.3, 2.0
"""Seconds that the longer of two timed calls may take where the shorter allows it, and from which
one is enough.
"""
MOST_STEPS = 8
"""Steps of the longer of two timed calls, at most."""
FEW_SAMPLES, MORE_SAMPLES = 4, 128
"""Test samples of a client in the shorter and the longer of two timed evaluations, at most."""


FEW_ROUNDS, LITTLE_WORK = 5, 1e10
"""Rounds, and samples times parameters, up to which a run is over before it is worth being timed.
"""


class Line(NamedTuple):
    """Seconds of a call as a straight line: `fixed` + `each` times how much there is to do."""

    fixed: float
    each: float

    def at(self, amount: float) -> float:
        """Return the seconds of so much."""
        return self.fixed + self.each * amount


def is_worth_timing(run: Run, done: int) -> bool:
    """Tell whether what is left of a run after so many rounds takes long enough to be timed first."""
    left = run.settings.rounds - done
    samples = (
        float(run.federation.train_sizes.double().mean()) * run.cohort * run.local.amount * left
    )
    return left > FEW_ROUNDS or samples * tree.size(run.net.params) > LITTLE_WORK


def forecast_run(run: Run, state: engine.State) -> Forecast | None:
    """Time a few steps and a part of an evaluation, and return what rounds and evaluations take;
    None if that fails.

    Copies of network and method answer on an engine of their own, whose random numbers are nobody
    else's: the run is, bit for bit, what it would be without. What fails here fails again, in
    words, in the first round.
    """
    try:
        with seeded_by_key("timing"):
            return _Stopwatch(run, state).forecast()
    except Exception:
        return None


class _Stopwatch:
    """Time parts of a run on an engine of its own.

    Attributes:
        side: clients that are timed side by side, as many as the engine takes at once.
    """

    def __init__(self, run: Run, state: engine.State):
        self._run, self._state = run, state
        self._local = run.local.for_round(state.round + 1, run.settings.rounds)
        self._draws = Draws(run.settings.seed, "timing", state.round)
        self._backend = engine.make(run.engine, run.net.copy(), run.device)
        self._method = copy.deepcopy(run.method)
        self._phases: list[Phase] = []
        number, clients = state.round + 1, run.federation.clients
        draw = generator(run.settings.seed, "turns", number)
        cohort = next(
            engine.draw_cohorts(run.settings.seed, clients, run.settings.participation, 1)
        )
        self._turns = self._method.turns(state.round, cohort, clients, draw)
        is_loop = self._backend.name == "loop"
        side = ranks.cores() if is_loop and not run.engine.workers else run.engine.workers
        self.side = min(side, clients) if is_loop and run.device.type == "cpu" else run.cohort
        if is_loop and run.device.type != "cpu":
            self.side = 1
        # Clients of middling size, so that none of them is alone with too much or too little.
        order = run.federation.train_sizes.argsort()
        first = max(0, (clients - self.side) // 2)
        self._clients = sorted(order[first : first + self.side].tolist())

    def forecast(self) -> Forecast:
        """Return the seconds of a round and of evaluations."""
        run, federation, eval_ = self._run, self._run.federation, self._run.eval
        judging, steps = self._time_evaluation(), self._time_steps()
        phases = max(1, len(self._phases))
        per_client = steps.at(self._mean_steps(federation) / phases)
        tested = judging.at(float(federation.test_sizes.double().mean()))

        # ---- a round: each turn trains, and evaluates its clients before and after
        trained = sum(len(turn.clients) for turn in self._turns if turn.trains)
        looked_at = sum(len(turn.clients) for turn in self._turns if not turn.trains)
        judged = sum(len(turn.clients) for turn in self._turns if not turn.survey)
        round_work = trained * per_client + looked_at * steps.fixed + 2 * judged * tested

        # ---- an evaluation of everybody, newcomers included
        tests = [federation, *([run.unseen] if run.unseen else [])]
        work = sum(one.clients * judging.at(_mean_size(one)) for one in tests)
        if eval_.common:
            work += federation.clients * judging.each * float(federation.test_sizes.sum())
        tuning = 0.0
        if eval_.finetune_epochs:
            a_step, batch = self._time_tuning().each, self._local.batch_size
            batches = [
                eval_.finetune_epochs * one.clients * _mean_batches(one, batch) for one in tests
            ]
            tuning = work + a_step * sum(batches)
        scale = 1 / self.side / _processes()
        return Forecast(scale * round_work, scale * work, scale * (work + tuning))

    def _time_steps(self) -> Line:
        """Return the seconds of training `side` clients by the steps that each takes in every
        phase.
        """
        run, method = self._run, self._shortened()
        turn = Turn(self._clients, survey=lambda server, clients, uploads: (server, clients))

        def train(steps: int) -> None:
            local = replace(self._local, epochs=None, steps=steps)
            about = run.federation, self._state, self._clients, local, self._draws, False, turn
            self._backend.participate(TrainCall(method, *about))

        return self._line(train, 1, MOST_STEPS)

    def _shortened(self) -> Method:
        """Return the method with phases of one epoch; those it has are noted."""
        method, whole, noted = copy.copy(self._method), self._method.phases, self._phases
        epochs = self._local.epochs or 1

        def phases(server: Tree, client: dict[str, Tree], params: Tree, _: int) -> list[Phase]:
            planned = [phase for phase in whole(server, client, params, epochs) if phase.epochs > 0]
            noted[:] = planned
            return [phase._replace(epochs=1) for phase in planned]

        vars(method)["phases"] = phases
        return method

    def _time_evaluation(self) -> Line:
        """Return the seconds of evaluating `side` clients by the samples that each is tested on."""
        run = self._run

        def judge(samples: int) -> None:
            federation = _with_fewer_tests(run.federation, self._clients, samples)
            about = federation, self._state, self._clients, None, make_adaptation(run, self._state)
            self._backend.evaluate_splits(
                EvalCall(self._method, *about, measures=run.settings.metrics)
            )

        def judged(samples: int) -> float:
            fewer = _with_fewer_tests(run.federation, self._clients, samples).select_clients(
                self._clients
            )
            return _mean_size(fewer)

        most = max(len(run.federation.test[client]) for client in self._clients)
        return self._line(judge, min(most, FEW_SAMPLES), min(most, MORE_SAMPLES), judged)

    def _time_tuning(self) -> Line:
        """Return the seconds of evaluating `side` clients after so many steps of fine-tuning."""
        run = self._run
        federation = _with_fewer_tests(run.federation, self._clients, FEW_SAMPLES)

        def tune(steps: int) -> None:
            local = replace(self._local, epochs=None, steps=steps)
            tuning = engine.FineTuning(local, self._draws, run.eval.finetune_part)
            about = (
                federation,
                self._state,
                self._clients,
                tuning,
                make_adaptation(run, self._state),
            )
            self._backend.evaluate_splits(EvalCall(self._method, *about))

        return self._line(tune, 1, MOST_STEPS)

    def _line(
        self, act: Callable[[int], None], few: int, more: int, size: Callable[[int], float] = float
    ) -> Line:
        """Time an act of little and of more.

        Args:
            act: what to time.
            few: its smaller argument.
            more: its larger one, at most.
            size: how much there is to do by the argument.
        """
        few = max(1, few)
        seconds = self._seconds(act, few)
        if seconds > VERY_SLOW:  # warming up is the least of it, and more would cost as much
            return Line(0.0, seconds / max(1.0, size(few)))
        seconds = min(seconds, self._seconds(act, few))
        more = min(more, few * max(2, int(SLOW / max(seconds, 1e-6))))
        if size(more) <= size(few):
            return Line(0.0, seconds / max(1.0, size(few)))
        each = max(0.0, self._seconds(act, more) - seconds) / (size(more) - size(few))
        return Line(max(0.0, seconds - each * size(few)), each)

    def _seconds(self, act: Callable[[int], None], amount: int) -> float:
        wait: Callable[[], Any] = (
            torch.cuda.synchronize if self._run.device.type == "cuda" else lambda: None
        )
        wait()
        began = time.perf_counter()
        act(amount)
        wait()
        return time.perf_counter() - began

    def _mean_steps(self, federation: Federation) -> float:
        """Return the steps of a participation over all phases, mean over clients."""
        batch, fixed = self._local.batch_size, self._local.steps
        batches = [_mean_batches(federation, batch, phase.batches, fixed) for phase in self._phases]
        return sum(phase.epochs * each for phase, each in zip(self._phases, batches, strict=True))


def _with_fewer_tests(federation: Federation, clients: list[int], samples: int) -> Federation:
    """Return the federation with at most so many test and validation samples of some clients."""
    test, validation = list(federation.test), list(federation.validation)
    for split in (test, validation):
        for client in clients if split else ():
            split[client] = split[client][:samples]
    return replace(federation, test=tuple(test), validation=tuple(validation))


def _mean_batches(
    federation: Federation, size: int, together: int = 1, fixed: int | None = None
) -> float:
    """Return the steps that an epoch has, mean over clients, as `engine.sgd.steps` deals them.

    Args:
        federation: whose clients.
        size: samples of a minibatch.
        together: minibatches of a step.
        fixed: steps in place of an epoch.
    """
    sizes = federation.train_sizes
    counts = (sizes // size + (sizes % size > 1).long()) // together
    if fixed:
        counts = (counts > 0).long() * fixed
    return float(counts.double().mean())


def _mean_size(federation: Federation) -> float:
    """Return the samples that a client's model is judged on, mean over clients."""
    held = sum(map(len, federation.validation))
    return (float(federation.test_sizes.sum()) + held) / max(1, federation.clients)


def _processes() -> int:
    """Return how many processes share the clients of a run."""
    return dist.get_world_size() if dist.is_initialized() else 1
