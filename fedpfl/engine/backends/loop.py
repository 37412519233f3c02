"""The loop backend: one client after another, on worker threads with one intra-op thread each.

On a CPU small batches gain more from two clients side by side than from two threads inside an
operator, and oversubscription cannot happen. Convolutions run channels-last. Each client is
computed by one thread with one fixed order of operations, so the number of workers does not change
a bit of the result.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import sys
import threading
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from fedpfl.engine.backends.backend import Backend, Engine, reproducible_arithmetic
from fedpfl.engine.backends.ranks import available_cores
from fedpfl.engine.calls import Answer, Call, Counts, TrainCall, estimate_work
from fedpfl.engine.keys import generator, track_global_draws
from fedpfl.engine.training.client_training import ClientTraining
from fedpfl.engine.training.clients import OneClient
from fedpfl.engine.training.cutting import cut_job
from fedpfl.engine.training.evaluation import ForwardPass, evaluate_client, has_equal_rows
from fedpfl.engine.training.jobs import Autocast, EvalJob, TrainJob, TrainResult
from fedpfl.engine.training.participation import run_evaluation, run_participation
from fedpfl.engine.training.shared_model import SharedModel, find_shared_model
from fedpfl.engine.training.shortcuts import Shortcuts, make_shortcuts
from fedpfl.engine.training.train_plan import clients_without_trainable_entries, with_epoch_numbers
from fedpfl.ground import tree
from fedpfl.ground.errors import as_exception
from fedpfl.ground.seeding import seeded_by_key
from fedpfl.models import Net


class LoopBackend(Backend):
    """One client after another; a pool of threads on a CPU."""

    name = "loop"

    def __init__(self, net: Net, device: torch.device, engine: Engine):
        # ---- Step 1: threads of one core each, with the same arithmetic.
        workers = 1 if device.type == "cuda" else engine.workers or available_cores()
        if device.type == "cpu":
            torch.set_num_threads(1)
            keep_freed_memory()
        self.engine = engine
        self.net = net
        self._device = device
        self._local = threading.local()
        self._autocast: Autocast = nullcontext
        if engine.precision == "bf16":
            self._autocast = partial(torch.autocast, device.type, torch.bfloat16)
        self._arithmetic = partial(reproducible_arithmetic, device, engine.precision)

        self._shortcuts: Shortcuts | None = None
        if engine.shortcuts:
            self._shortcuts = make_shortcuts(net, device, engine.precision)
        self._pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))

        # ---- Step 2: do clients go side by side?
        # A network that draws from torch's generator alone has one for each client, so that they
        # go side by side.
        traits = net.traits
        has_generator_per_client = (
            traits.draws <= {"torch"} and not traits.recomputes and device.type == "cpu"
        )
        # If a method or network draws from the process's generators, the client that is
        # computed holds this lock.
        self._client_lock: threading.Lock | None = None
        if traits.draws and not has_generator_per_client:
            self._client_lock = threading.Lock()

    @cached_property
    def _has_equal_rows(self) -> bool:
        """Check whether evaluation of several clients together changes no bit on this CPU."""
        return self._device.type != "cpu" or has_equal_rows(self.net)

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """See Backend. All calls share the pool, which takes the largest clients first.

        So its threads end together.
        """
        with self._arithmetic():
            if self._client_lock is None:
                with seeded_by_key("loop") as drawn_from:
                    results = self._run_calls(calls)
                    if not drawn_from():
                        return results
                del results
                self._client_lock = threading.Lock()
            return self._run_calls(calls)

    def _run_calls(self, calls: Sequence[Call]) -> list[Answer]:
        """Run all clients of all calls in the pool, and stack each call's results."""
        # ---- Step 1: the pool is given all clients, those with most work first. Clients that are
        # evaluated by one model go together.
        is_joinable = self._shortcuts and self._client_lock is None and self._has_equal_rows
        pending_calls = []
        for call in calls:
            shared = find_shared_model(call, self.net) if is_joinable else None
            pending_calls.append(_PendingCall(call, shared))
        tasks = [task for pending in pending_calls for task in self._list_tasks(pending)]
        for task in sorted(tasks, key=lambda task: -task.work):
            task.pending.futures[task.key] = self._pool.submit(task.run)

        # ---- Step 2: results are stacked; an error answers its call.
        try:
            return [pending.wait() for pending in pending_calls]
        except BaseException:  # Ctrl-C: all end within a step
            for pending in pending_calls:
                pending.cancel()
            raise

    def _list_tasks(self, pending: _PendingCall) -> list[_Task]:
        """List the tasks of a call for the pool: clients, and passes of several clients."""
        run_client = self._run_client if self._client_lock is None else self._run_client_alone
        call = pending.call
        tasks: list[_Task] = []
        for client in pending.separate_clients:
            run = partial(run_client, call, client, pending.stop)
            tasks.append(_Task(estimate_work(call, client), pending, client, run))
        for number, forward_pass in enumerate(pending.passes):
            work = sum(forward_pass.client_sizes) / 3
            run = partial(self._run_pass, pending, forward_pass)
            tasks.append(_Task(work, pending, ("pass", number), run))
        return tasks

    def _run_pass(self, pending: _PendingCall, forward_pass: ForwardPass) -> Counts:
        """Evaluate the clients of a pass together."""
        if pending.stop.is_set():
            raise CancelledError
        assert pending.shared
        assert self._shortcuts
        return pending.shared.evaluate_pass(
            self._thread_net(), forward_pass, self._autocast, self._shortcuts
        )

    def _run_client_alone(self, call: Call, client: int, stop: threading.Event) -> Any:
        """Run one client at a time, the process's generators seeded for it.

        Draws so depend neither on the order of clients nor on the cohort.
        """
        assert self._client_lock
        key = call.draws.hook_key(client)
        draws = track_global_draws(call.method, key, self.net.traits.draws)
        with self._client_lock, draws:
            return self._run_client(call, client, stop)

    def _thread_net(self) -> Net:
        """Return this thread's copy of the network."""
        if not hasattr(self._local, "net"):
            self._local.net = self.net.copy()
        return self._local.net

    def _run_client(self, call: Call, client: int, stop: threading.Event) -> Any:
        """Take one client through a call, in its turn if steps are short."""
        scripts = self._shortcuts and self._shortcuts.scripts
        with scripts.turn.hold() if scripts else nullcontext():
            return self._do_jobs(call, client, stop)

    def _do_jobs(self, call: Call, client: int, stop: threading.Event) -> Any:
        """Take one client through a call, and do each of its jobs."""
        net = self._thread_net()
        net.generator = None
        if net.traits.draws and self._client_lock is None:
            net.generator = generator(*call.draws.hook_key(client))
        jobs: Generator[TrainJob | EvalJob, Any, Any]
        if isinstance(call, TrainCall):
            jobs = run_participation(call, OneClient(client), net, self._autocast)
        else:
            jobs = run_evaluation(call, OneClient(client), net, self._autocast)
        result: Counts | TrainResult | None = None
        while True:
            try:
                job = jobs.send(result)
            except StopIteration as stop_iteration:
                net.require_constants()
                return stop_iteration.value
            result = self.do_job(net, job, stop)

    def do_job(
        self, net: Net, job: TrainJob | EvalJob, stop: threading.Event
    ) -> Counts | TrainResult:
        """Evaluate or train the client of a job."""
        if isinstance(job, EvalJob):
            return evaluate_client(net, job, self._autocast, self._shortcuts)
        return self._train(net, job, stop)

    def _train(self, net: Net, job: TrainJob, stop: threading.Event) -> TrainResult:
        """Take all steps of a job, phase by phase."""
        cut = cut_job(net, job) if self._shortcuts else None
        if cut:
            job = cut.job
        training = ClientTraining(
            net=net,
            job=job,
            autocast=self._autocast,
            stop=stop,
            shortcuts=self._shortcuts,
        )
        for phase, epochs in with_epoch_numbers(job.plan.phases):
            # Without an entry that moves there is no step, not even one of weight decay.
            is_idle = clients_without_trainable_entries(phase)
            if is_idle is None or not bool(is_idle):
                training.train_phase(phase, epochs)
        result = training.make_result()
        return cut.put_back(result) if cut else result


class _PendingCall:
    """Hold a call while the pool computes its clients.

    Attributes:
        call: The call.
        shared: Those clients that are evaluated by one model.
        separate_clients: The remaining clients.
        passes: Of `shared`.
        stop: Once it is set, clients end within a step, or are not begun.
        futures: By client, and of passes by `("pass", number)`.
    """

    def __init__(self, call: Call, shared: SharedModel | None):
        self.call = call
        self.shared = shared
        self.separate_clients = shared.other_clients if shared else call.clients
        self.passes = shared.passes if shared else []
        self.stop = threading.Event()
        self.futures: dict[Hashable, Future] = {}

    def wait(self) -> Answer:
        """Return the call's answer; an error is one."""
        try:
            return self._join_results()
        except (Exception, SystemExit) as error:
            self.cancel()
            return as_exception(error)

    def cancel(self) -> None:
        """Give up what has not ended, and wait for what ends within a step."""
        self.stop.set()
        running = [future for future in self.futures.values() if not future.cancel()]
        # A thread that went on could draw from the process's generators, which the next run seeds.
        concurrent.futures.wait(running)

    def _join_results(self) -> Answer:
        """Return the results of all clients, stacked in the order of the call."""
        results = [self.futures[client].result() for client in self.separate_clients]
        if self.shared is None:
            return tree.stack(results)
        counts = [self.futures["pass", number].result() for number in range(len(self.passes))]
        return self.shared.make_answer(counts, tree.stack(results) if results else None)


class _Task(NamedTuple):
    """Hold a part of a call that one thread computes.

    Attributes:
        work: How long it takes, in training samples.
        pending: The call.
        key: Of the result.
        run: Computes it.
    """

    work: float
    pending: _PendingCall
    key: Hashable
    run: Callable[[], Any]


def keep_freed_memory() -> None:
    """Have glibc keep freed memory, as the next step asks for the same sizes.

    Fresh pages cost up to a fifth of a step. Does nothing with another C library.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    # Memory of earlier runs in this process: thousands of runs would fill it with gaps.
    libc.malloc_trim(0)
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(mmap_threshold, 2**31 - 1)
    # A thread's heap, which glibc would give back as a whole.
    libc.mallopt(top_pad, 64 * 2**20)
