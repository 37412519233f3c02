"""Autotuning of `engine=auto` on a GPU: the fastest candidate that agrees with loop is kept."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedpfl.engine.backends.backend import Backend, Engine
from fedpfl.engine.backends.selection import make_backend
from fedpfl.engine.calls import Answer, Call, Participation, TrainCall
from fedpfl.ground import tree
from fedpfl.ground.errors import error_text
from fedpfl.ground.tree import Tree
from fedpfl.models import Net
from fedpfl.models.vectorized import find_obstacle

log = logging.getLogger(__name__)

TOLERANCE = {"fp32": 0.05, "tf32": 0.2, "bf16": 0.5}
"""How far trained models may lie apart, by precision, as `answer_distance` measures it."""

TRIES = 3  # runs of a candidate, of which the fastest counts: the first warms up
PATIENCE = 4.0  # times the best, beyond which a candidate is not run again


def candidate_engines(engine: Engine) -> list[Engine]:
    """Return the engines that `engine.backend=auto` may mean on a GPU, loop last."""
    return [
        replace(engine, backend="batched", graphs=True),
        replace(engine, backend="batched", graphs=False),
        replace(engine, backend="loop", graphs=False),
    ]


def engine_label(engine: Engine) -> str:
    """Return a short name: `loop`, `batched`, `batched with graphs`."""
    return f"{engine.backend} with graphs" if engine.graphs else engine.backend


class Candidate(NamedTuple):
    """Hold a candidate's answers and the seconds of its fastest run."""

    engine: Engine
    backend: Backend
    answers: list[Answer]
    seconds: float


class AutotunedBackend(Backend):
    """Run the first training call on every candidate engine, then keep the fastest that agrees.

    Candidates that raise, run out of memory or disagree with the last one, which is the plainest,
    are left out with a line in the log. Answers come from the candidate that is kept, as if it had
    been alone.

    Args:
        net: The network.
        engines: The candidates, of which the last is the reference.
        make: Builds a candidate's backend.
        wait: Waits until the device has done its work.
        share: Gives all processes of a run the value of process 0, so that they choose alike.
    """

    name = "auto"

    def __init__(
        self,
        net: Net,
        engines: Sequence[Engine],
        make: Callable[[Engine], Backend],
        wait: Callable[[], None] = lambda: None,
        share: Callable[[Any], Any] = lambda value: value,
    ):
        self.net = net
        self._engines = engines
        self._make = make
        self._wait = wait
        self._share = share
        self._backend: Backend | None = None
        self.engine = engines[-1]
        self.seconds: dict[str, float] = {}

    def leave_out_batched(self) -> None:
        """Keep the last candidate, which is the plainest."""
        self._engines = self._engines[-1:]

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """See Backend."""
        if self._backend is None:
            if any(_is_training(call) for call in calls):
                return self._autotune(calls)
            return self._make(self.engine).run(calls)
        answers = self._backend.run(calls)
        self.engine = self._backend.engine  # it may have narrowed its width
        return answers

    def _autotune(self, calls: Sequence[Call]) -> list[Answer]:
        """Run the calls on every candidate, keep the fastest, and return its answers."""
        # ---- Step 1: each candidate runs the calls.
        candidates: list[Candidate] = []
        for engine in self._engines:
            best_seconds = min((candidate.seconds for candidate in candidates), default=math.inf)
            candidates.append(self._run_candidate(engine, calls, best_seconds))

        valid = [candidate for candidate in candidates if _has_answered(candidate)]
        if not valid:
            return candidates[-1].answers

        # ---- Step 2: those that disagree with the plainest are left out.
        reference = valid[-1]
        agreeing = [
            candidate
            for candidate in valid
            if candidate is reference or _agrees_with(candidate, reference)
        ]

        # All processes go by what process 0 has seen, so that they keep the same one.
        seconds = {engine_label(candidate.engine): candidate.seconds for candidate in agreeing}
        self.seconds = self._share(seconds)

        # ---- Step 3: the fastest of the others is kept, in all processes the same one.
        label = min(self.seconds, key=lambda name: self.seconds[name])
        fastest = next(one for one in candidates if engine_label(one.engine) == label)
        self._backend = fastest.backend
        self.engine = fastest.backend.engine
        self.name = fastest.backend.name
        times = ", ".join(f"{name} {value:.3g}" for name, value in self.seconds.items())
        log.info("engine: %s is taken; seconds for the first cohort: %s", label, times)
        return fastest.answers

    def _run_candidate(
        self, engine: Engine, calls: Sequence[Call], best_seconds: float
    ) -> Candidate:
        """Run a candidate up to TRIES times, as long as it may be the fastest."""
        backend = self._make(engine)
        answers: list[Answer] = []
        seconds = math.inf
        for _ in range(TRIES):
            self._wait()
            start = time.perf_counter()
            answers = backend.run(calls)
            self._wait()
            seconds = min(seconds, time.perf_counter() - start)
            has_failed = any(isinstance(answer, Exception) for answer in answers)
            # Calls are collective: by their own clocks processes would try differently often.
            seconds, has_failed = self._share((seconds, has_failed))
            if has_failed or seconds > PATIENCE * best_seconds:
                break
        for answer in answers:
            if isinstance(answer, Exception):
                answer.with_traceback(None)  # whose frames hold the candidate's memory
        return Candidate(engine=engine, backend=backend, answers=answers, seconds=seconds)


def _has_answered(candidate: Candidate) -> bool:
    """Return whether a candidate has answered all calls; log the first error otherwise."""
    errors = [answer for answer in candidate.answers if isinstance(answer, Exception)]
    if errors:
        label = engine_label(candidate.engine)
        log.warning("engine: %s is left out: %s", label, error_text(errors[0]))
    return not errors


def _agrees_with(candidate: Candidate, reference: Candidate) -> bool:
    """Return whether answers are near the reference's; log how far they are otherwise."""
    distance = max(map(answer_distance, candidate.answers, reference.answers))
    tolerance = TOLERANCE[candidate.engine.precision]
    if distance > tolerance:
        log.warning(
            "engine: %s is left out: its results are %.2g away from those of %s, "
            "where %.2g would do",
            engine_label(candidate.engine),
            distance,
            engine_label(reference.engine),
            tolerance,
        )
    return distance <= tolerance


def _is_training(call: Call) -> bool:
    """Return whether somebody trains in a call."""
    return isinstance(call, TrainCall) and (call.survey is None or call.survey.trains)


def choose_backend(
    engine: Engine,
    net: Net,
    device: torch.device,
    recorded_engine: Mapping[str, Any] | None = None,
    distribute: Callable[[Backend], Backend] = lambda backend: backend,
    share: Callable[[Any], Any] = lambda value: value,
) -> Backend:
    """Return the backend of a run: the recorded one, on a GPU an autotuned one, else the default.

    Args:
        engine: The run's settings.
        net: The network.
        device: Where it is computed.
        recorded_engine: Settings that an earlier process of the run has kept.
        distribute: Spreads a backend over the processes of a run.
        share: Gives all processes the value of process 0.
    """

    def build(engine: Engine) -> Backend:
        return distribute(make_backend(engine, net, device))

    # ---- Where nothing is to be chosen
    if engine.backend != "auto":
        return build(replace(engine, width=_resumed_width(engine, recorded_engine or {})))
    if recorded_engine:
        return build(replace(engine, **recorded_engine))
    # By the clock of a CPU the last bits would depend on what else it does.
    if device.type != "cuda":
        return build(engine)
    if obstacle := find_obstacle(net):
        log.info(
            "engine: loop is taken; batched cannot vectorise model=%s over clients (%s)",
            net.name,
            obstacle,
        )
        return build(engine)

    # ---- On a GPU the clock decides.
    return AutotunedBackend(
        net=net,
        engines=candidate_engines(engine),
        make=build,
        wait=partial(torch.cuda.synchronize, device),
        share=share,
    )


def _resumed_width(engine: Engine, recorded_engine: Mapping[str, Any]) -> int:
    """Return the width to go on with: the recorded one, where memory ran out before."""
    width = recorded_engine.get("width", 0)
    # A width that the user has set meanwhile counts where it is the smaller one.
    has_narrowed = width and (not engine.width or width < engine.width)
    if has_narrowed and recorded_engine.get("backend") == engine.backend:
        return int(width)
    return engine.width


def answer_distance(answer: Any, reference: Any) -> float:
    """Return how far two answers to a call lie apart: 0 if equal, about 1 if one did not train.

    Uploads and states are compared by their distance, in shares of the spread of the reference's
    clients; losses by their relative difference. What is not finite must be so in both.
    """
    # ---- Step 1: what is compared.
    losses = [(answer.loss, reference.loss)]
    trees: list[tuple[Tree, Tree]] = []
    if isinstance(reference, Participation):
        for counts, other_counts in (
            (answer.before, reference.before),
            (answer.after, reference.after),
        ):
            losses.append((counts.loss / counts.total, other_counts.loss / other_counts.total))
        trees = [
            (answer.uploads, reference.uploads),
            (answer.client_states, reference.client_states),
        ]

    # ---- Step 2: losses, by their relative difference; 0.1 keeps small ones from counting much.
    distances: list[Tensor] = []
    for pair in losses:
        loss, other_loss = _both_finite(pair)
        distances.append(((loss - other_loss).abs() / (other_loss.abs() + 0.1)).max())

    # ---- Step 3: uploads and states, in shares of how far clients lie apart.
    for one, other in trees:
        sums = []
        for pair in zip(tree.leaves(one), tree.leaves(other), strict=True):
            a, b = _both_finite(pair)
            parts = (a - b, b - b.mean(0), b)
            sums.append(torch.stack([part.square().sum() for part in parts]))
        if sums:
            distance, spread, size = torch.stack(sums).sum(0)
            # The size keeps the distance small where all clients of the reference are alike.
            distances.append((distance / (spread + 1e-6 * size).clamp(min=1e-30)).sqrt())
    return max(map(float, distances))


def _both_finite(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return both in float64, 0 where neither is finite, and infinity where one is."""
    one, other = (part.double() for part in pair)
    is_alike = one.isfinite() == other.isfinite()
    one = one.nan_to_num(0, 0, 0)
    other = other.nan_to_num(0, 0, 0)
    # Where one alone is finite, its distance from the other is infinite.
    return torch.where(is_alike, one, math.inf), other
