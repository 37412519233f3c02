"""The loop backend: one client after another, on worker threads with one intra-op thread each.

On a CPU small batches gain more from two clients side by side than from two threads inside an operator, and
oversubscription cannot happen. Convolutions run channels-last. Each client is computed by one thread with one fixed
order of operations, so the number of workers does not change a bit of the result.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.backend import Answer, Backend, Call, Counts, Engine, TrainCall, arithmetic, work
from fedpfl.engine.jobs import End, EvalJob, TrainJob
from fedpfl.engine.keys import Draws
from fedpfl.engine.participation import One, evaluation, participation
from fedpfl.engine.ranks import cores
from fedpfl.engine.sgd import Local, at_rest, bits, complete, idle, movement, numbered, parked, steps, update_
from fedpfl.engine.shard import gathered
from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods import Batch, Data, Phase
from fedpfl.models import Net


class Loop(Backend):
    """One client after another; a pool of threads on a CPU."""

    name = "loop"

    def __init__(self, net: Net, device: torch.device, engine: Engine):
        workers = 1 if device.type == "cuda" else engine.workers or cores()
        if device.type == "cpu":
            torch.set_num_threads(1)
            keep_memory()
        self.engine = engine
        self._net, self._local = net, threading.local()
        self._autocast = partial(torch.autocast, device.type, torch.bfloat16, engine.precision == "bf16")
        self._arithmetic = partial(arithmetic, device, engine.precision)
        self._pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """See Backend. The clients of all calls share the pool, largest first, so that its threads end together."""
        with self._arithmetic():
            return self._answers(calls)

    def _answers(self, calls: Sequence[Call]) -> list[Answer]:
        units = sorted(
            (-work(call, client), number, client) for number, call in enumerate(calls) for client in call.clients
        )
        stops, common = [threading.Event() for _ in calls], [dict[str, Any]() for _ in calls]
        futures: dict[tuple[int, int], Future] = {}
        for _, number, client in units:
            futures[number, client] = self._pool.submit(
                self._answer, calls[number], One(client, common[number]), stops[number]
            )
        answers: list[Answer] = []
        try:
            for number, call in enumerate(calls):
                try:
                    answers.append(tree.stack([futures[number, client].result() for client in call.clients]))
                except Exception as error:
                    stops[number].set()  # its other clients end within a step, or are not begun
                    for client in call.clients:
                        futures[number, client].cancel()
                    answers.append(error)
        except BaseException:  # Ctrl-C: all end within a step
            for stop in stops:
                stop.set()
            for future in futures.values():
                future.cancel()
            raise
        return answers

    def _answer(self, call: Call, row: One, stop: threading.Event) -> Any:
        """Take one client through a call, each of its jobs at once."""
        if not hasattr(self._local, "net"):
            self._local.net = self._net.copy()
        net, follow = self._local.net, participation if isinstance(call, TrainCall) else evaluation
        work = follow(call, row, net, self._autocast)  # type: ignore[arg-type]
        answer = None
        try:
            while True:
                job = work.send(answer)
                answer = self._evaluate(net, job) if isinstance(job, EvalJob) else self._train(net, job, stop)
        except StopIteration as done:
            return done.value

    def _evaluate(self, net: Net, job: EvalJob) -> Counts:
        ((federation, client),) = job.rows
        data, bound = gathered(federation, getattr(federation, job.split)[client]), net.bind(job.buffers)
        correct = torch.zeros((), dtype=torch.int64, device=data.y.device)
        loss = torch.zeros((), device=data.y.device)
        with torch.no_grad(), self._autocast():
            for batch in data.chunks():
                logits = job.method.predict(bound, job.params, batch.x)
                correct += (logits.argmax(1) == batch.y).sum()
                loss += F.cross_entropy(logits, batch.y, reduction="sum")
        return Counts(correct, loss, torch.tensor(len(data.y), device=data.y.device))

    def _train(self, net: Net, job: TrainJob, stop: threading.Event) -> End:
        """Take all steps of a job, phase by phase."""
        ((federation, number),), plan, server = job.rows, job.plan, job.server
        data, client, buffers = gathered(federation, federation.train[number]), job.client, job.buffers
        params = tree.map(_working_copy, job.start)
        leaves = tree.leaves(params)
        memory = at_rest(plan, params)
        total, by_sample, samples, count = *torch.zeros(3, device=data.y.device).unbind(), 0
        records: list[Tree] = []
        for phase, epochs in numbered(plan.phases):
            flag = idle(phase)
            if flag is not None and bool(flag):
                continue
            moves = movement(phase, params)
            moving, moments = [leaves[i] for i in moves.moving], memory.of(moves.moving)
            for i, leaf in enumerate(leaves):
                leaf.requires_grad_(i in moves.moving)
            objective, local = phase.loss or plan.loss, plan.local.during(phase)
            masks = [None if mask is None else bits(mask, leaf) for mask, leaf in zip(moves.masks, moving, strict=True)]
            with parked(moments, moves.masks, local):
                for batch, *more in _batches(federation, data, phase, epochs, local, job.draws[0], number):
                    if stop.is_set():
                        raise CancelledError
                    bound = net.bind(buffers, training=True)
                    if phase.step:
                        with torch.no_grad(), self._autocast():
                            params, loss = phase.step(bound, params, (batch, *more) if more else batch, server, client)
                        buffers = bound.buffers
                    else:
                        with self._autocast():
                            loss = objective(bound, params, batch, server, client)
                        if phase.keeps:
                            loss, kept = loss
                            records.append(tree.map(Tensor.detach, kept))
                        grads = list(torch.autograd.grad(loss, moving, materialize_grads=True))
                        buffers, loss = bound.buffers, loss.detach()
                        with torch.no_grad():
                            if phase.after_gradient:
                                now = tree.map(Tensor.detach, params)
                                gradient = tree.rebuild(params, complete(grads, leaves, moves.moving))
                                client = phase.after_gradient(now, gradient, loss, batch, server, client)
                            update_(moving, moments, grads, masks, local)
                    count += 1
                    total += loss
                    if plan.by_sample:
                        by_sample += loss * len(batch.y)
                        samples += len(batch.y)
            leaves = tree.leaves(params)  # steps of a phase's own make new ones
        end = tree.map(lambda leaf: leaf.detach().contiguous(), params)
        joined = tree.map(lambda *parts: torch.cat(parts), *records) if records else {}
        return End(end, client, buffers, total / max(1, count), by_sample / samples.clamp(min=1), [joined])


def _batches(
    federation: Federation, data: Data, phase: Phase, epochs: range, local: Local, draws: Draws, client: int
) -> Iterator[list[Batch]]:
    """Give the minibatches of each step of a client whose training data are `data`, planned epoch by epoch."""
    device = data.y.device
    for epoch in epochs:
        plan = steps(phase, range(epoch, epoch + 1), local.batch_size, draws, federation, client, local.steps)
        sizes = (plan.positions >= 0).sum(-1).tolist()
        for positions, views, random, counts in zip(*plan, sizes, strict=True):
            step = []
            for rows, seen, count in zip(positions, views, counts, strict=True):
                batch = data.rows(tree.send(rows[:count], device))._replace(random=tree.send(random, device))
                if federation.augment:
                    x = federation.seen(batch.x, tree.send(seen[:count], device))
                    batch = batch._replace(x=x.contiguous(memory_format=torch.channels_last))
                step.append(batch)
            yield step


def keep_memory() -> None:
    """Have glibc keep freed memory: the next step asks for the same sizes, and fresh pages cost up to a fifth of it.

    Does nothing with another C library.
    """
    if sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None), "gnu_get_libc_version"):
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(mmap_threshold, 2**31 - 1)
    libc.mallopt(top_pad, 64 * 2**20)  # a thread's heap, which glibc would otherwise give back as a whole


def _working_copy(leaf: Tensor) -> Tensor:
    layout = torch.channels_last if leaf.dim() == 4 else torch.contiguous_format
    return leaf.detach().clone(memory_format=layout)
