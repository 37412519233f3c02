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
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl import traffic, tree
from fedpfl.data.federation import Federation
from fedpfl.engine.backend import Answer, Backend, Call, Engine, Judging, Participation, Tally, Training
from fedpfl.engine.sgd import (
    Lesson,
    Step,
    bits,
    complete,
    fine_tuning,
    movement,
    numbered,
    parked,
    steps,
    training,
    update_,
)
from fedpfl.engine.shard import gathered, training_shard
from fedpfl.engine.state import confined, mirrored
from fedpfl.methods import Batch, Method
from fedpfl.methods.base import Data
from fedpfl.models import Net
from fedpfl.tree import Tree


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
        buffers = mirrored(method, state.buffers(client))
        if method.draw:
            mine |= tree.to(method.draw(draws.server(client), state.server), federation.x.device)
        shard = training_shard(federation, client, local.batch_size, draws)
        if method.survey:
            with self._autocast():
                mine |= method.survey(net.bind(buffers, training=True), shard, state.server, mine)
        mine = method.prepare(state.server, mine)
        start = method.start(state.server, mine)
        down = traffic.count(method.send(state.server, mine))
        measures = method.measure(state.server, mine)
        test, train = gathered(federation, federation.test[client]), shard.data
        before = self._judge(method, net, buffers, method.judged(state.server, mine, start), test)
        lesson = training(method, local, draws, state.server, mine, start)
        end, mine, after_training, loss, kept = self._train(
            lesson, net, buffers, federation, client, train, start, state.server, mine, stop
        )
        touched = method.touched(state.server, mine) if method.touched else {}
        buffers = confined(after_training, buffers, touched)
        if method.digest:
            mine = {**mine, **method.digest(kept, state.server, mine)}
        if method.summarize:
            mine = {**mine, "summary": _sums(method.summarize, net, buffers, train, end, state.server, mine)}
        if method.validate:
            held_out = gathered(federation, federation.held_out[client])
            mine = {**mine, "validation": _sums(method.validate, net, buffers, held_out, end, state.server, mine)}
        after = self._judge(method, net, buffers, method.judged(state.server, mine, end), test)
        upload, kept = method.finish(state.server, mine, start, end)
        up = traffic.count(upload)
        return Participation(upload, kept, buffers, touched, before, after, down, up, measures, loss)

    def _tally(self, call: Judging, client: int, stop: threading.Event) -> Tally:
        method, federation, state, _, tuning, _ = call
        net = self._own_net()
        mine, buffers = state.mine(client, federation.x.device), state.buffers(client)
        if method.adapt:
            shard = training_shard(federation, client, *call.adaptation)
            with self._autocast():
                mine = {**mine, **method.adapt(net.bind(buffers, training=True), shard, state.server, mine)}
        model = method.personal(state.server, mine)
        if tuning:
            lesson = fine_tuning(method, tuning, net.parts, model)
            train = gathered(federation, federation.train[client])
            model, _, buffers, *_ = self._train(
                lesson, net, buffers, federation, client, train, model, state.server, mine, stop
            )
        return self._judge(method, net, buffers, model, gathered(federation, federation.test[client]))

    def _own_net(self) -> Net:
        if not hasattr(self._local, "net"):
            self._local.net = self._net.copy()
        return self._local.net

    def _judge(self, method: Method, net: Net, buffers: dict[str, Tree], params: Tree, data: Data) -> Tally:
        bound = net.bind(buffers)
        correct = torch.zeros((), dtype=torch.int64, device=data.y.device)
        loss = torch.zeros((), device=data.y.device)
        with torch.no_grad(), self._autocast():
            for batch in data.chunks():
                logits = method.predict(bound, params, batch.x)
                correct += (logits.argmax(1) == batch.y).sum()
                loss += F.cross_entropy(logits, batch.y, reduction="sum")
        return Tally(correct, loss, torch.tensor(len(data.y), device=data.y.device))

    def _train(
        self,
        lesson: Lesson,
        net: Net,
        buffers: dict[str, Tree],
        federation: Federation,
        client: int,
        data: Data,
        start: Tree,
        server: Tree,
        mine: dict[str, Tree],
        stop: threading.Event,
    ) -> tuple[Tree, dict[str, Tree], dict[str, Tree], Tensor, Tree]:
        """The trained tree, `mine` and buffers after the lesson, the mean loss of its steps, and what it kept."""
        trained = tree.map(_working_copy, start)
        leaves = tree.leaves(trained)
        velocity = [torch.zeros_like(leaf) for leaf in leaves]
        total, count = torch.zeros((), device=data.y.device), 0
        records: list[Tree] = []
        for phase, epochs in numbered(lesson.phases):
            if phase.skip is not None and bool(phase.skip):
                continue
            moves = movement(phase, trained)
            moving, speed = [leaves[i] for i in moves.moving], [velocity[i] for i in moves.moving]
            for i, leaf in enumerate(leaves):
                leaf.requires_grad_(i in moves.moving)
            objective, local = phase.loss or lesson.objective, lesson.local.during(phase)
            masks = [None if mask is None else bits(mask, leaf) for mask, leaf in zip(moves.masks, moving, strict=True)]
            with parked(speed, moves.masks, local):
                for step in steps(lesson, lesson.draws, client, phase.stream, epochs, federation):
                    if stop.is_set():
                        raise CancelledError
                    batch, *more = _batches(federation, data, step)
                    bound = net.bind(buffers, training=True)
                    count += 1
                    if lesson.step:
                        with torch.no_grad(), self._autocast():
                            trained, loss = lesson.step(bound, trained, (batch, *more) if more else batch, server, mine)
                            total += loss
                        buffers = bound.buffers
                        continue
                    with self._autocast():
                        loss = objective(bound, trained, batch, server, mine)
                    if lesson.keeps:
                        loss, kept = loss
                        records.append(tree.map(Tensor.detach, kept))
                    grads = list(torch.autograd.grad(loss, moving, materialize_grads=True))
                    buffers = bound.buffers
                    with torch.no_grad():
                        if lesson.observe:
                            params = tree.map(Tensor.detach, trained)
                            gradient = tree.rebuild(trained, complete(grads, leaves, moves.moving))
                            mine = lesson.observe(params, gradient, loss.detach(), batch, server, mine)
                        update_(moving, speed, grads, masks, local)
                        total += loss
        end = tree.map(lambda leaf: leaf.detach().contiguous(), trained)
        return end, mine, buffers, total / max(1, count), _joined(records)


def _batches(federation: Federation, data: Data, step: Step) -> list[Batch]:
    """The minibatches of one step, of a client's training data."""
    device = data.y.device
    batches = [data.rows(rows.to(device))._replace(random=step.random.to(device)) for rows in step.minibatches]
    if not federation.augment:
        return batches
    return [
        batch._replace(x=federation.seen(batch.x, views.to(device)).contiguous(memory_format=torch.channels_last))
        for batch, views in zip(batches, step.views, strict=True)
    ]


def _sums(
    question: Callable[..., Tree],
    net: Net,
    buffers: dict[str, Tree],
    data: Data,
    end: Tree,
    server: Tree,
    mine: dict[str, Tree],
) -> Tree:
    """What a method's `summarize` or `validate` says of all batches together; zeros if there are no samples."""
    total = None
    for batch in data.chunks():
        part = question(net.bind(buffers), end, batch, server, mine)
        total = part if total is None else tree.map(torch.add, total, part)
    return total


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


def _joined(records: list[Tree]) -> Tree:
    """Trees of `[batch, ...]` one after another; {} if there are none."""
    return tree.map(lambda *leaves: torch.cat(leaves), *records) if records else {}


def _working_copy(leaf: Tensor) -> Tensor:
    layout = torch.channels_last if leaf.dim() == 4 else torch.contiguous_format
    return leaf.detach().clone(memory_format=layout)
