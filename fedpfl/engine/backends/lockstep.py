"""Lockstep sweeps: the jobs of a multirun in one process, their cohorts trained together.

    python -m fedpfl.train -m hydra/launcher=lockstep seed=1,2,3,4 quantile.q=0.999,0.9999

Every job is a thread with its own state and run directory. Where it calls its backend it waits;
once all jobs wait, their calls are answered together by one backend per model, data shape and
engine. Only one job moves at a time: jobs do little between calls, and neither Hydra nor W&B
expects company.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import torch

from fedpfl.engine import Backend, Engine
from fedpfl.engine.calls import Answer, Call
from fedpfl.ground import memory
from fedpfl.models import Net

T = TypeVar("T")

current_stage: ContextVar[LockstepStage | None] = ContextVar("stage", default=None)
"""Where the current thread's job runs; None outside a lockstep sweep."""


@dataclass(eq=False)
class _Request:
    """Hold calls of a job, and their results to come.

    Attributes:
        backend: None where the job waits for memory.
    """

    backend: Backend | None
    calls: Sequence[Call]
    results: Future[list[Answer]] = field(default_factory=Future)


class LockstepStage:
    """Run at most `jobs` jobs side by side, and bring their backend calls together."""

    def __init__(self, jobs: int):
        self._jobs = jobs
        self._turn = threading.Lock()  # held by the one job that moves
        self._news = threading.Condition()  # guards what follows
        self._active_count = 0  # jobs that are neither waiting for an answer nor over
        self._living_count = 0
        self._requests: list[_Request] = []
        self._is_broken = False
        self._shared: dict[Hashable, Any] = {}
        self._admitted_bytes = 0  # of the states of jobs that were admitted

    def share(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value that the first job with this key made."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    @contextmanager
    def admit(self, size: int, device: torch.device) -> Iterator[None]:
        """Wait in a job's thread until its states fit beside those of other jobs.

        Half of the memory that the sweep finds is for programs, which become narrower where it
        runs out. A job that does not fit runs alone.
        """
        free, _ = self.share(("memory", device), lambda: memory.device_memory(device))
        while self._admitted_bytes and self._admitted_bytes + size > free / 2:
            self.ask(None, [])
        self._admitted_bytes += size
        try:
            yield
        finally:
            self._admitted_bytes -= size

    def play(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run all jobs; return their results, in order. The error of a job is its result.

        An interrupt of the main thread is raised in every job, and again here when they have ended.
        """
        # ---- Step 1: the main thread starts jobs and answers requests, whenever all jobs wait.
        results: list[Any] = [None] * len(jobs)
        waiting = list(enumerate(jobs))
        threads: list[threading.Thread] = []
        try:
            while True:
                with self._news:
                    while self._active_count:
                        self._news.wait()
                    free = self._jobs - self._living_count
                    self._requests = [one for one in self._requests if not one.results.done()]
                if waiting and free:
                    for number, job in waiting[:free]:
                        threads.append(
                            threading.Thread(target=self._run_job, args=(number, job, results))
                        )
                        self._add_counts(active=1, living=1)
                        threads[-1].start()
                    waiting = waiting[free:]
                elif self._requests:
                    # All jobs wait meanwhile.
                    self._run_requests([*self._requests])
                else:
                    return results
        except BaseException:
            # ---- Step 2: an interrupt ends all jobs.
            with self._news:
                self._is_broken = True
            for request in self._requests:  # an interrupt may come between two answers
                if not request.results.done():
                    self._add_counts(active=1)
                    request.results.set_exception(KeyboardInterrupt())
            for thread in threads:
                if thread.ident:  # or between a thread and its start
                    thread.join()
            raise

    def ask(self, backend: Backend | None, calls: Sequence[Call]) -> list[Answer]:
        """Wait, in a job's thread, for the other jobs and for the results of calls."""
        request = _Request(backend, calls)
        with self._news:
            if self._is_broken:
                raise KeyboardInterrupt
            self._requests.append(request)
        # Another job moves while this one waits for its answer.
        self._turn.release()
        self._add_counts(active=-1)
        request.results.exception()  # waits for either
        self._turn.acquire()
        return request.results.result()

    def _run_job(self, number: int, job: Callable[[], Any], results: list[Any]) -> None:
        """Run a job in its thread, whenever it is its turn."""
        current_stage.set(self)
        torch.set_num_threads(1)
        try:
            with self._turn:
                results[number] = job()
        except BaseException as error:
            results[number] = error
        finally:
            self._add_counts(active=-1, living=-1)

    def _add_counts(self, active: int, living: int = 0) -> None:
        """Count jobs that begin or stop to move, or to live."""
        with self._news:
            self._active_count += active
            self._living_count += living
            self._news.notify_all()

    def _run_requests(self, requests: list[_Request]) -> None:
        """Run requests, those to the same backend together."""
        for backend in dict.fromkeys(request.backend for request in requests):
            group = [request for request in requests if request.backend is backend]
            calls = [call for request in group for call in request.calls]
            answers = iter(backend.run(calls) if backend else [])
            for request in group:
                # Counted before the job goes on.
                self._add_counts(active=1)
                request.results.set_result([*islice(answers, len(request.calls))])


class LockstepBackend(Backend):
    """Wrap a backend as one job of a stage sees it."""

    def __init__(self, stage: LockstepStage, backend: Backend):
        self._stage, self._backend = stage, backend
        self.name = f"{backend.name} in lockstep"

    @property
    def engine(self) -> Engine:  # type: ignore[override]
        """Return that of the shared backend."""
        return self._backend.engine

    @property
    def net(self) -> Net:  # type: ignore[override]
        """Return that of the shared backend."""
        return self._backend.net

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """See Backend."""
        return self._stage.ask(self._backend, calls)
