"""How long a run will take: a step and an evaluation are timed, and nothing of the run changes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from fedpfl import engine
from fedpfl.config.run import Run
from fedpfl.data import Federation
from fedpfl.engine.backends import ranks
from fedpfl.engine.calls import EvalCall, TrainCall
from fedpfl.engine.keys import generator
from fedpfl.ground import tree
from fedpfl.ground.seeding import seeded_by_key
from fedpfl.ground.tree import Tree
from fedpfl.methods import Method, Phase, Turn
from fedpfl.record.forecast import Forecast
from fedpfl.runner.evaluate import make_adaptation

AIMED_SECONDS = 0.3
"""What the longer of two timed calls may take, where the shorter allows it."""
LONG_SECONDS = 2.0
"""From which one timed call is enough."""
MAX_STEPS = 8
"""Steps of the longer of two timed calls, at most."""
FEW_SAMPLES = 4
"""Test samples of a client in the shorter of two timed evaluations, at most."""
MANY_SAMPLES = 128
"""Test samples of a client in the longer one, at most."""
SHORT_ROUNDS = 5
"""Rounds up to which a run is over before it is worth being timed, if its work is little too."""
LITTLE_WORK = 1e10
"""Samples times parameters up to which work is little."""


class LinearTime(NamedTuple):
    """Seconds of a call as a straight line: `fixed` + `slope` times how much there is to do."""

    fixed: float
    slope: float

    def predict(self, amount: float) -> float:
        """Return the seconds of so much."""
        return self.fixed + self.slope * amount


def is_worth_timing(run: Run, rounds_done: int) -> bool:
    """Return whether what is left of a run takes long enough to be timed first."""
    rounds_left = run.settings.rounds - rounds_done
    mean_samples = float(run.federation.train_sizes.double().mean())
    samples = mean_samples * run.cohort * run.local.amount * rounds_left
    return rounds_left > SHORT_ROUNDS or samples * tree.size(run.net.params) > LITTLE_WORK


def forecast_run(run: Run, state: engine.State) -> Forecast | None:
    """Return the seconds of rounds and evaluations, None if they cannot be timed.

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
        parallel_clients: clients that are timed side by side, as many as the engine takes at once.
    """

    def __init__(self, run: Run, state: engine.State):
        self._run = run
        self._state = state
        self._local = run.local.for_round(state.round + 1, run.settings.rounds)
        self._draws = run.make_draws("timing", state.round)
        self._backend = engine.make_backend(
            run.engine,
            run.net.copy(),
            run.device,
        )
        # A method's caches, and what hooks keep by mistake, stay out of the run.
        self._method = copy.deepcopy(run.method)
        self._phases: list[Phase] = []  # those of the last timed training
        self._turns = self._plan_turns()
        self.parallel_clients = self._count_parallel_clients()
        # Clients of middling size, so that none of them is alone with too much or too little.
        by_size = run.federation.train_sizes.argsort()
        start = max(0, (run.federation.clients - self.parallel_clients) // 2)
        self._clients = sorted(by_size[start : start + self.parallel_clients].tolist())

    def _plan_turns(self) -> list[Turn]:
        """Return the turns of the next round."""
        settings = self._run.settings
        clients = self._run.federation.clients
        round_number = self._state.round + 1
        turns_generator = generator(settings.seed, "turns", round_number)
        cohorts = engine.draw_cohorts(settings.seed, clients, settings.participation, 1)
        return self._method.turns(
            self._state.round,
            next(cohorts),
            clients,
            turns_generator,
        )

    def _count_parallel_clients(self) -> int:
        """Return how many clients the engine takes at once."""
        run = self._run
        if self._backend.name != "loop":
            return run.cohort
        if run.device.type != "cpu":
            return 1
        return min(run.engine.workers or ranks.available_cores(), run.federation.clients)

    def forecast(self) -> Forecast:
        """Return the seconds of a round and of evaluations."""
        run = self._run
        federation = run.federation
        evaluation_time = self._time_evaluation()
        step_time = self._time_steps()

        # ---- A round: each turn trains, and evaluates its clients before and after.
        # Steps were timed in all phases at once.
        mean_steps = self._mean_steps(federation) / max(1, len(self._phases))
        train_seconds = step_time.predict(mean_steps)
        mean_test_samples = float(federation.test_sizes.double().mean())
        evaluation_seconds = evaluation_time.predict(mean_test_samples)
        # A turn that does not train still calls the hooks around training, the fixed part of a
        # step's line.
        trained = sum(len(turn.clients) for turn in self._turns if turn.trains)
        untrained = sum(len(turn.clients) for turn in self._turns if not turn.trains)
        evaluated = sum(len(turn.clients) for turn in self._turns if not turn.survey)
        round_seconds = (
            trained * train_seconds
            + untrained * step_time.fixed
            + 2 * evaluated * evaluation_seconds
        )

        # ---- An evaluation of everybody, newcomers included.
        federations = [federation]
        if run.newcomers:
            federations.append(run.newcomers)
        everyone_seconds = sum(
            one.clients * evaluation_time.predict(_mean_size(one)) for one in federations
        )
        if run.eval.common:
            all_samples = float(federation.test_sizes.sum())
            everyone_seconds += federation.clients * evaluation_time.slope * all_samples

        # ---- The same once more after fine-tuning.
        tuning_seconds = 0.0
        if run.eval.finetune_epochs:
            seconds_of_step = self._time_tuning().slope
            tuning_steps = [
                run.eval.finetune_epochs * one.clients * _mean_batches(one, self._local.batch_size)
                for one in federations
            ]
            tuning_seconds = everyone_seconds + seconds_of_step * sum(tuning_steps)
        scale = 1 / self.parallel_clients / _count_processes()
        return Forecast(
            scale * round_seconds,
            scale * everyone_seconds,
            scale * (everyone_seconds + tuning_seconds),
        )

    def _time_steps(self) -> LinearTime:
        """Return the seconds of training by the steps that each client takes in every phase."""
        method = self._shorten_phases()
        # In a survey nobody is evaluated, so that steps alone are timed.
        turn = Turn(self._clients, survey=lambda server, clients, uploads: (server, clients))

        def train(steps: int) -> None:
            call = TrainCall(
                method=method,
                federation=self._run.federation,
                state=self._state,
                clients=self._clients,
                local=replace(self._local, epochs=None, steps=steps),
                draws=self._draws,
                survey=turn,
            )
            self._backend.run_one(call)

        return self._fit_time(train, small=1, large=MAX_STEPS)

    def _shorten_phases(self) -> Method:
        """Return the method with phases of one epoch; those it has are kept in `_phases`."""
        method = copy.copy(self._method)
        plan_phases = self._method.phases
        epochs = self._local.epochs or 1

        def phases(server: Tree, client: dict[str, Tree], params: Tree, _: int) -> list[Phase]:
            planned = plan_phases(server, client, params, epochs)
            self._phases[:] = [phase for phase in planned if phase.epochs > 0]
            return [phase._replace(epochs=1) for phase in self._phases]

        # Methods are frozen; the hook of this copy alone is another one.
        vars(method)["phases"] = phases
        return method

    def _time_evaluation(self) -> LinearTime:
        """Return the seconds of evaluating by the samples that each client is tested on."""
        run = self._run

        def evaluate(samples: int) -> None:
            call = EvalCall(
                method=self._method,
                federation=_with_fewer_tests(run.federation, self._clients, samples),
                state=self._state,
                clients=self._clients,
                before_evaluation=make_adaptation(run, self._state),
                measures=run.settings.metrics,
            )
            self._backend.evaluate_splits(call)

        def mean_size(samples: int) -> float:
            smaller = _with_fewer_tests(run.federation, self._clients, samples)
            return _mean_size(smaller.select_clients(self._clients))

        largest_test = max(len(run.federation.test[client]) for client in self._clients)
        return self._fit_time(
            evaluate,
            small=min(largest_test, FEW_SAMPLES),
            large=min(largest_test, MANY_SAMPLES),
            size=mean_size,
        )

    def _time_tuning(self) -> LinearTime:
        """Return the seconds of evaluating after so many steps of fine-tuning."""
        run = self._run
        federation = _with_fewer_tests(run.federation, self._clients, FEW_SAMPLES)

        def tune(steps: int) -> None:
            local = replace(self._local, epochs=None, steps=steps)
            call = EvalCall(
                method=self._method,
                federation=federation,
                state=self._state,
                clients=self._clients,
                tuning=engine.FineTuning(local, self._draws, run.eval.finetune_part),
                before_evaluation=make_adaptation(run, self._state),
            )
            self._backend.evaluate_splits(call)

        return self._fit_time(tune, small=1, large=MAX_STEPS)

    def _fit_time(
        self,
        act: Callable[[int], None],
        small: int,
        large: int,
        size: Callable[[int], float] = float,
    ) -> LinearTime:
        """Time an act of little and of more, and fit a line.

        Args:
            act: what to time.
            small: its smaller argument.
            large: its larger one, at most.
            size: how much there is to do by the argument.
        """
        small = max(1, small)
        if self._run.device.type == "cuda":
            for _ in range(2):  # the first loads kernels, the second captures graphs
                act(small)
        seconds = self._time_call(act, small)
        if seconds > LONG_SECONDS:  # warming up is the least of it, and more would cost as much
            return LinearTime(0.0, seconds / max(1.0, size(small)))
        # The faster of two: whatever else the machine does only adds.
        seconds = min(seconds, self._time_call(act, small))
        # At least twice as much, or the slope would be that of noise.
        large = min(large, small * max(2, int(AIMED_SECONDS / max(seconds, 1e-6))))
        if size(large) <= size(small):
            return LinearTime(0.0, seconds / max(1.0, size(small)))
        more_seconds = max(0.0, self._time_call(act, large) - seconds)
        slope = more_seconds / (size(large) - size(small))
        return LinearTime(max(0.0, seconds - slope * size(small)), slope)

    def _time_call(self, act: Callable[[int], None], amount: int) -> float:
        """Return the seconds of a call, until the device has done its work."""
        is_cuda = self._run.device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize()
        start_time = time.perf_counter()
        act(amount)
        if is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start_time

    def _mean_steps(self, federation: Federation) -> float:
        """Return the steps of a participation over all phases, mean over clients."""
        return sum(
            phase.epochs
            * _mean_batches(federation, self._local.batch_size, phase.batches, self._local.steps)
            for phase in self._phases
        )


def _with_fewer_tests(federation: Federation, clients: list[int], samples: int) -> Federation:
    """Return the federation with at most so many test and validation samples of some clients."""
    test = list(federation.test)
    validation = list(federation.validation)
    for split in (test, validation):
        for client in clients if split else ():
            split[client] = split[client][:samples]
    return replace(federation, test=tuple(test), validation=tuple(validation))


def _mean_batches(
    federation: Federation,
    batch_size: int,
    batches_per_step: int = 1,
    fixed_steps: int | None = None,
) -> float:
    """Return the steps that an epoch has, mean over clients, as `engine.training.minibatches` counts them.

    Args:
        federation: whose clients.
        batch_size: samples of a minibatch.
        batches_per_step: minibatches of a step.
        fixed_steps: steps in place of an epoch.
    """
    sizes = federation.train_sizes
    # A last minibatch of one sample is left out.
    counts = (sizes // batch_size + (sizes % batch_size > 1).long()) // batches_per_step
    if fixed_steps:
        # Clients without a whole minibatch make no step, however many are asked for.
        counts = (counts > 0).long() * fixed_steps
    return float(counts.double().mean())


def _mean_size(federation: Federation) -> float:
    """Return the samples that a client's model is evaluated on, mean over clients."""
    validation_samples = sum(map(len, federation.validation))
    return (float(federation.test_sizes.sum()) + validation_samples) / max(1, federation.clients)


def _count_processes() -> int:
    """Return how many processes share the clients of a run."""
    return dist.get_world_size() if dist.is_initialized() else 1
