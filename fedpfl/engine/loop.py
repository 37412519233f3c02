"""The loop backend: one client after another, on worker threads with one intra-op thread each.

On a CPU small batches gain more from two clients side by side than from two threads inside an operator, and
oversubscription cannot happen. Convolutions run channels-last. Each client is computed by one thread with one fixed
order of operations, so the number of workers does not change a bit of the result.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl import traffic, tree
from fedpfl.data.federation import Federation
from fedpfl.engine.backend import Answer, Backend, Call, Engine, Judging, Participation, Tally, Training
from fedpfl.engine.sgd import (
    Lesson,
    batches,
    complete,
    fine_tuning,
    movement,
    numbered,
    training,
    update_,
)
from fedpfl.methods import Batch, Method
from fedpfl.models import Net
from fedpfl.tree import Tree

CHUNK = 256  # samples per forward pass outside training


class Loop(Backend):
    """One client after another; a pool of threads on a CPU."""

    name = "loop"

    def __init__(self, net: Net, device: torch.device, engine: Engine):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = 1 if device.type == "cuda" else engine.workers or cores
        if device.type == "cpu":
            torch.set_num_threads(1)
            keep_memory()
        self._net, self._local = net, threading.local()
        self._autocast = partial(torch.autocast, device.type, torch.bfloat16, engine.precision == "bf16")
        self._pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """See Backend. The clients of all calls share the pool, largest first, so that its threads end together."""
        units = sorted(
            (-_work(call, client), number, client) for number, call in enumerate(calls) for client in call.clients
        )
        stops = [threading.Event() for _ in calls]
        futures: dict[tuple[int, int], Future] = {}
        for _, number, client in units:
            call = calls[number]
            answer: Callable[..., Any] = self._participation if isinstance(call, Training) else self._tally
            futures[number, client] = self._pool.submit(answer, call, client, stops[number])
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

    def _participation(self, call: Training, client: int, stop: threading.Event) -> Participation:
        method, federation, state, _, local, draws = call
        net = self._own_net()
        mine = dict(state.mine(client, federation.x.device))
        buffers = state.buffers(client)
        if method.draw:
            mine |= tree.to(method.draw(draws.server(client), state.server), federation.x.device)
        mine = method.prepare(state.server, mine)
        start = method.start(state.server, mine)
        down = traffic.count(method.send(state.server, mine))
        measures = method.measure(state.server, mine)
        test, train = (Data.of(federation, split[client]) for split in (federation.test, federation.train))
        before = self._judge(method, net, buffers, method.judged(state.server, mine, start), test)
        lesson = training(method, local, draws, state.server, mine, start)
        end, mine, buffers, loss = self._train(lesson, net, buffers, client, train, start, state.server, mine, stop)
        if method.summarize:
            mine = {**mine, "summary": self._summarize(method, net, buffers, train, end, state.server, mine)}
        after = self._judge(method, net, buffers, method.judged(state.server, mine, end), test)
        upload, kept = method.finish(state.server, mine, start, end)
        return Participation(upload, kept, buffers, before, after, down, traffic.count(upload), measures, loss)

    def _tally(self, call: Judging, client: int, stop: threading.Event) -> Tally:
        method, federation, state, _, tuning = call
        net = self._own_net()
        mine = state.mine(client, federation.x.device)
        model, buffers = method.personal(state.server, mine), state.buffers(client)
        if tuning:
            lesson = fine_tuning(method, tuning, net.parts, model)
            train = Data.of(federation, federation.train[client])
            model, _, buffers, _ = self._train(lesson, net, buffers, client, train, model, state.server, mine, stop)
        return self._judge(method, net, buffers, model, Data.of(federation, federation.test[client]))

    def _own_net(self) -> Net:
        if not hasattr(self._local, "net"):
            self._local.net = self._net.copy()
        return self._local.net

    def _judge(self, method: Method, net: Net, buffers: dict[str, Tree], params: Tree, data: Data) -> Tally:
        bound = net.bind(buffers)
        correct = torch.zeros((), dtype=torch.int64, device=data.y.device)
        loss = torch.zeros((), device=data.y.device)
        with torch.no_grad(), self._autocast():
            for x, y, _ in data.chunks():
                logits = method.predict(bound, params, x)
                correct += (logits.argmax(1) == y).sum()
                loss += F.cross_entropy(logits, y, reduction="sum")
        return Tally(correct, loss, torch.tensor(len(data.y), device=data.y.device))

    def _train(
        self,
        lesson: Lesson,
        net: Net,
        buffers: dict[str, Tree],
        client: int,
        data: Data,
        start: Tree,
        server: Tree,
        mine: dict[str, Tree],
        stop: threading.Event,
    ) -> tuple[Tree, dict[str, Tree], dict[str, Tree], Tensor]:
        """The trained tree, `mine` and buffers after the lesson, and the mean loss of its steps."""
        trained = tree.map(_working_copy, start)
        leaves = tree.leaves(trained)
        velocity = [torch.zeros_like(leaf) for leaf in leaves]
        total, steps = torch.zeros((), device=data.y.device), 0
        for phase, epochs in numbered(lesson.phases):
            moves = movement(phase, trained)
            moving, speed = [leaves[i] for i in moves.moving], [velocity[i] for i in moves.moving]
            for i, leaf in enumerate(leaves):
                leaf.requires_grad_(i in moves.moving)
            objective = phase.loss or lesson.objective
            size = lesson.local.batch_size
            for rows in batches(lesson.draws, client, phase.stream, epochs, len(data.y), size):
                if stop.is_set():
                    raise CancelledError
                batch = data.rows(rows.to(data.y.device))
                bound = net.bind(buffers, training=True)
                with self._autocast():
                    loss = objective(bound, trained, batch, server, mine)
                grads = list(torch.autograd.grad(loss, moving, materialize_grads=True))
                buffers = bound.buffers
                with torch.no_grad():
                    if lesson.observe:
                        params = tree.map(Tensor.detach, trained)
                        gradient = tree.rebuild(trained, complete(grads, leaves, moves.moving))
                        mine = lesson.observe(params, gradient, loss.detach(), batch, server, mine)
                    update_(moving, speed, grads, moves.masks, lesson.local)
                    total += loss
                steps += 1
        end = tree.map(lambda leaf: leaf.detach().contiguous(), trained)
        return end, mine, buffers, total / max(1, steps)

    @staticmethod
    def _summarize(
        method: Method, net: Net, buffers: dict[str, Tree], data: Data, end: Tree, server: Tree, mine: dict[str, Tree]
    ) -> Tree:
        assert method.summarize is not None
        total = None
        for batch in data.chunks():
            part = method.summarize(net.bind(buffers), end, batch, server, mine)
            total = part if total is None else tree.map(torch.add, total, part)
        return total


class Data(NamedTuple):
    """A client's normalised images, in memory channels last as convolutions like it, and labels."""

    x: Tensor
    y: Tensor

    @classmethod
    def of(cls, federation: Federation, indices: Tensor) -> Data:
        """Gather and normalise samples `indices`."""
        images = federation.normalize(federation.x[indices])
        return cls(images.contiguous(memory_format=torch.channels_last), federation.y[indices])

    def rows(self, rows: Tensor) -> Batch:
        """Samples `rows`, still channels last."""
        return Batch(self.x.permute(0, 2, 3, 1)[rows].permute(0, 3, 1, 2), self.y[rows])

    def chunks(self) -> Iterator[Batch]:
        """All samples in order, in batches of bounded size."""
        for x, y in zip(self.x.split(CHUNK), self.y.split(CHUNK), strict=True):
            yield Batch(x, y)


def _work(call: Call, client: int) -> float:
    """Roughly how long a client keeps a thread, in training samples; judging one takes a third."""
    train, test = int(call.federation.train_sizes[client]), int(call.federation.test_sizes[client])
    local = call.local if isinstance(call, Training) else call.tuning.local if call.tuning else None
    return (local.epochs * train if local else 0) + test / 3


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
