"""`engine=auto` on a GPU: each way of answering the first call is tried, and the fastest that
agrees is taken.
"""

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
"""How far trained models may lie apart, in shares of what distinguishes the clients' models
(`apart`).
"""

TRIES = 3  # answers of a candidate, of which the fastest counts: the first warms up
PATIENCE = 4.0  # times the best, beyond which a candidate is not asked again


def candidate_engines(engine: Engine) -> list[Engine]:
    """Return what `engine.backend=auto` may mean on a GPU."""
    own = [replace(engine, backend="batched", graphs=graphs) for graphs in (True, False)]
    return [*own, replace(engine, backend="loop", graphs=False)]


def engine_label(engine: Engine) -> str:
    """Return a short name: `loop`, `batched`, `batched with graphs`."""
    return f"{engine.backend} with graphs" if engine.graphs else engine.backend


class Candidate(NamedTuple):
    """Hold how a candidate answered: in how many seconds at best."""

    engine: Engine
    backend: Backend
    answers: list[Answer]
    seconds: float


class AutotunedBackend(Backend):
    """Answer the first call that trains by every candidate, and all later ones by the fastest that
    agrees.

    Candidates that raise, run out of memory or disagree with the last one, which is the plainest,
    are left out with a line in the log. What is answered comes from the one that is taken, as if it
    had been alone.

    make, wait: builds a candidate; waits until the device has done its work. share: makes the
    processes of a run of one mind.
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
        self.net, self._engines, self._make, self._wait, self._share = (
            net,
            engines,
            make,
            wait,
            share,
        )
        self._backend: Backend | None = None
        self.engine = engines[-1]
        self.seconds: dict[str, float] = {}

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """See Backend."""
        if self._backend is None and not any(map(_trains, calls)):
            return self._make(self.engine).run(calls)
        if self._backend is None:
            return self._first(calls)
        answers = self._backend.run(calls)
        self.engine = self._backend.engine
        return answers

    def _first(self, calls: Sequence[Call]) -> list[Answer]:
        tried: list[Candidate] = []
        for engine in self._engines:
            best = min((one.seconds for one in tried), default=math.inf)
            tried.append(self._tried(engine, calls, best))
        sound = [one for one in tried if self._answered(one)]
        agreeing = [one for one in sound if one is sound[-1] or self._agrees(one, sound[-1])]
        if not agreeing:
            return tried[-1].answers
        self.seconds = self._share({engine_label(one.engine): one.seconds for one in agreeing})
        taken = min(agreeing, key=lambda one: self.seconds[engine_label(one.engine)])
        self._backend, self.engine, self.name = (
            taken.backend,
            taken.backend.engine,
            taken.backend.name,
        )
        times = ", ".join(f"{name} {seconds:.3g}" for name, seconds in self.seconds.items())
        log.info(
            "engine: %s is taken; seconds for the first cohort: %s",
            engine_label(taken.engine),
            times,
        )
        return taken.answers

    def _tried(self, engine: Engine, calls: Sequence[Call], best: float) -> Candidate:
        """Time answers, as long as there is hope."""
        backend, answers, seconds = self._make(engine), [], math.inf
        for _ in range(TRIES):
            self._wait()
            began = time.perf_counter()
            answers = backend.run(calls)
            self._wait()
            seconds = min(seconds, time.perf_counter() - began)
            if seconds > PATIENCE * best or any(
                isinstance(answer, Exception) for answer in answers
            ):
                break
        return Candidate(engine, backend, answers, seconds)

    def _answered(self, one: Candidate) -> bool:
        errors = [answer for answer in one.answers if isinstance(answer, Exception)]
        if errors:
            log.warning(
                "engine: %s is left out: %s", engine_label(one.engine), error_text(errors[0])
            )
        return not errors

    def _agrees(self, one: Candidate, reference: Candidate) -> bool:
        far, allowed = (
            max(map(answer_distance, one.answers, reference.answers)),
            TOLERANCE[one.engine.precision],
        )
        if far > allowed:
            names = engine_label(one.engine), engine_label(reference.engine)
            log.warning(
                "engine: %s is left out: its results are %.2g away from those of %s, where %.2g would do",
                names[0],
                far,
                names[1],
                allowed,
            )
        return far <= allowed


def _trains(call: Call) -> bool:
    return isinstance(call, TrainCall) and (call.survey is None or call.survey.trains)


def choose_backend(
    engine: Engine,
    net: Net,
    on: torch.device,
    known: Mapping[str, Any] | None = None,
    over: Callable[[Backend], Backend] = lambda backend: backend,
    share: Callable[[Any], Any] = lambda value: value,
) -> Backend:
    """Return the backend of a run: that which `known` recorded, or on a GPU what turns out to be
    the fastest.

    over: what spreads a backend over processes.
    """

    def build(engine: Engine) -> Backend:
        return over(make_backend(engine, net, on))

    obstacle = (
        find_obstacle(net) if on.type == "cuda" and engine.backend == "auto" and not known else ""
    )
    if obstacle:
        log.info(
            "engine: loop is taken; batched cannot vectorise model=%s over clients (%s)",
            net.name,
            obstacle,
        )
    if on.type == "cuda" and engine.backend == "auto" and not known and not obstacle:
        return AutotunedBackend(
            net, candidate_engines(engine), build, partial(torch.cuda.synchronize, on), share
        )
    return build(replace(engine, **known) if known and engine.backend == "auto" else engine)


def answer_distance(answer: Any, reference: Any) -> float:
    """Return how far two answers to a call lie apart: 0 where they are equal, about 1 where one of
    them did not train.

    Uploads and states are compared by their distance, in shares of what tells the reference's
    clients apart; losses by their relative difference. What is not finite must be so in both.
    """
    losses = [(answer.loss, reference.loss)]
    trees: list[tuple[Tree, Tree]] = []
    if isinstance(reference, Participation):
        tested = (answer.before, reference.before), (answer.after, reference.after)
        losses += [(own.loss / own.total, other.loss / other.total) for own, other in tested]
        trees = [
            (answer.uploads, reference.uploads),
            (answer.client_states, reference.client_states),
        ]
    far = [((own - other).abs() / (other.abs() + 0.1)).max() for own, other in map(_finite, losses)]
    for own, other in trees:
        pairs = [_finite(pair) for pair in zip(tree.leaves(own), tree.leaves(other), strict=True)]
        sums = [
            ((a - b).square().sum(), (b - b.mean(0)).square().sum(), b.square().sum())
            for a, b in pairs
        ]
        if sums:
            distance, spread, size = (torch.stack(part).sum() for part in zip(*sums, strict=True))
            far.append((distance / (spread + 1e-6 * size).clamp(min=1e-30)).sqrt())
    return max(map(float, far))


def _finite(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return both in float64, 0 where neither is finite, and infinity where one is."""
    own, other = (part.double() for part in pair)
    alike = own.isfinite() == other.isfinite()
    return torch.where(alike, own.nan_to_num(0, 0, 0), math.inf), other.nan_to_num(0, 0, 0)
