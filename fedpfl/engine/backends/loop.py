"""The loop backend: one client after another, on worker threads with one intra-op thread each.

On a CPU small batches gain more from two clients side by side than from two threads inside an
operator, and oversubscription cannot happen. Convolutions run channels-last. Each client is
computed by one thread with one fixed order of operations, so the number of workers does not change
a bit of the result.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedpfl.engine.backends.backend import Backend, Engine, reproducible_arithmetic
from fedpfl.engine.backends.ranks import available_cores
from fedpfl.engine.calls import Answer, Call, Counts, TrainCall, estimate_work
from fedpfl.engine.keys import generator, seeded_by_key, track_global_draws
from fedpfl.engine.measures import compute_measures
from fedpfl.engine.training.hook_checks import AnswerForms, require_equal_forms
from fedpfl.engine.training.jobs import EvalJob, TrainJob, TrainResult
from fedpfl.engine.training.participation import OneClient, run_evaluation, run_participation
from fedpfl.engine.training.sgd import (
    Local,
    as_bitmask,
    clients_without_trainable_entries,
    complete_gradients,
    find_trainable_leaves,
    initial_moments,
    masked_moments,
    optimizer_step_,
    plan_steps,
    streams_with_differing_masks,
    with_epoch_numbers,
)
from fedpfl.engine.training.shard import gather_data
from fedpfl.ground import tree
from fedpfl.ground.errors import as_exception
from fedpfl.ground.tree import Tree
from fedpfl.methods import Batch, Data, Phase
from fedpfl.models import Bound, Net


class LoopBackend(Backend):
    """One client after another; a pool of threads on a CPU."""

    name = "loop"

    def __init__(self, net: Net, device: torch.device, engine: Engine):
        workers = 1 if device.type == "cuda" else engine.workers or available_cores()
        if device.type == "cpu":
            torch.set_num_threads(1)
            keep_freed_memory()
        self.engine = engine
        self.net, self._local = net, threading.local()
        self._autocast = partial(
            torch.autocast, device.type, torch.bfloat16, engine.precision == "bf16"
        )
        self._arithmetic = partial(reproducible_arithmetic, device, engine.precision)
        self._pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
        # A network that draws from torch's generator alone has one for each client, so that clients
        # go side by side.
        traits = net.traits
        self._side_by_side = (
            traits.draws <= {"torch"} and not traits.recomputes and device.type == "cpu"
        )
        self._alone: threading.Lock | None = (
            None  # held by the one client that is computed, where one draws
        )
        if traits.draws and not self._side_by_side:
            self._alone = threading.Lock()

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """See Backend. The clients of all calls share the pool, largest first, so that its threads
        end together.
        """
        with self._arithmetic():
            if self._alone is None:
                with seeded_by_key("loop") as drawn:
                    answers = self._answers(calls)
                    if not drawn():
                        return answers
                del answers
                self._alone = threading.Lock()
            return self._answers(calls)

    def _answers(self, calls: Sequence[Call]) -> list[Answer]:
        units = sorted(
            (-estimate_work(call, client), number, client)
            for number, call in enumerate(calls)
            for client in call.clients
        )
        stops, common = [threading.Event() for _ in calls], [dict[str, Any]() for _ in calls]
        found: list[AnswerForms] = [{} for _ in calls]
        futures: dict[tuple[int, int], Future] = {}
        for _, number, client in units:
            row = OneClient(client, common[number], found[number])
            answer = self._answer if self._alone is None else self._drawing
            futures[number, client] = self._pool.submit(answer, calls[number], row, stops[number])
        answers: list[Answer] = []
        try:
            for number, call in enumerate(calls):
                try:
                    ended = [futures[number, client].result() for client in call.clients]
                    for hook, forms in found[number].items():
                        require_equal_forms(hook, forms)
                    answers.append(tree.stack(ended))
                except (Exception, SystemExit) as error:
                    stops[number].set()  # its other clients end within a step, or are not begun
                    for client in call.clients:
                        futures[number, client].cancel()
                    answers.append(as_exception(error))
        except BaseException:  # Ctrl-C: all end within a step
            for stop in stops:
                stop.set()
            for future in futures.values():
                future.cancel()
            raise
        return answers

    def _drawing(self, call: Call, row: OneClient, stop: threading.Event) -> Any:
        """Do `_answer` for one client at a time, with random numbers of its own: no order and no
        cohort matters.
        """
        assert self._alone
        drawn = self.net.traits.draws
        with (
            self._alone,
            track_global_draws(call.method, *call.draws.own(row.clients[0]), network_draws=drawn),
        ):
            return self._answer(
                call, OneClient(row.clients[0], answer_forms=row.answer_forms), stop
            )

    def _answer(self, call: Call, row: OneClient, stop: threading.Event) -> Any:
        """Take one client through a call, each of its jobs at once."""
        if not hasattr(self._local, "net"):
            self._local.net = self.net.copy()
        net, follow = (
            self._local.net,
            run_participation if isinstance(call, TrainCall) else run_evaluation,
        )
        if net.traits.draws and self._alone is None:
            net.generator = generator(*call.draws.own(row.clients[0]))
        else:
            net.generator = None
        work = follow(call, row, net, self._autocast)  # type: ignore[arg-type]
        answer = None
        while True:
            try:
                job = work.send(answer)
            except StopIteration as done:
                return done.value
            answer = (
                self._evaluate(net, job)
                if isinstance(job, EvalJob)
                else self._train(net, job, stop)
            )

    def _evaluate(self, net: Net, job: EvalJob) -> Counts:
        ((federation, client),) = job.rows
        data, bound = (
            gather_data(federation, getattr(federation, job.split)[client]),
            net.bind(job.buffers),
        )
        barred = federation.excluded_classes
        correct = torch.zeros((), dtype=torch.int64, device=data.y.device)
        loss = torch.zeros((), device=data.y.device)
        (random,) = job.random()
        kept = list[Tensor]()
        with torch.no_grad(), self._autocast():
            for batch in data.chunks(random=tree.send(random, data.y.device)):
                logits = job.method.predict(bound, job.params, batch.without_labels())
                allowed = (
                    logits if barred is None else logits.masked_fill(barred[client], -torch.inf)
                )
                correct += batch.find_hits(allowed).sum()
                loss += batch.summed_loss(logits)
                kept += [allowed] if job.metrics else []
        more = compute_measures(job.metrics, torch.cat(kept), data.y) if kept else {}
        return Counts(correct, loss, torch.tensor(len(data.y), device=data.y.device), more)

    def _train(self, net: Net, job: TrainJob, stop: threading.Event) -> TrainResult:
        """Take all steps of a job, phase by phase."""
        training = _Training(net, job, self._autocast, stop)
        for phase, epochs in with_epoch_numbers(job.plan.phases):
            flag = clients_without_trainable_entries(phase)
            if flag is None or not bool(flag):
                training.play(phase, epochs)
        return training.end()


class _Training:
    """Hold a client's trained tree, state and buffers on the way through its phases."""

    def __init__(
        self,
        net: Net,
        job: TrainJob,
        autocast: Callable[[], AbstractContextManager],
        stop: threading.Event,
    ):
        self._net, self._job, self._autocast, self._stop = net, job, autocast, stop
        ((federation, number),) = job.rows
        self._data = gather_data(federation, federation.train[number])
        self._params, self._client, self._buffers = (
            tree.map(working_copy, job.start),
            job.client,
            job.buffers,
        )
        self._memory, self._uneven = (
            initial_moments(job.plan, self._params),
            streams_with_differing_masks(job.plan.phases),
        )
        self._total, self._by_sample, self._samples = torch.zeros(
            3, device=self._data.y.device
        ).unbind()
        self._steps, self._records = 0, list[Tree]()

    def play(self, phase: Phase, epochs: range) -> None:
        """Take the steps of a phase."""
        job, leaves = self._job, tree.leaves(self._params)
        moves, local = find_trainable_leaves(phase, self._params), job.plan.local.for_phase(phase)
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_(i in moves.moving)
        moving, moments = (
            [leaves[i] for i in moves.moving],
            self._memory[phase.stream].of(moves.moving),
        )
        masks = [
            None if mask is None else as_bitmask(mask, leaf)
            for mask, leaf in zip(moves.masks, moving, strict=True)
        ]
        with (
            masked_moments(moments, moves.masks, local)
            if phase.stream in self._uneven
            else nullcontext()
        ):
            for batches in _batches(job, self._data, phase, epochs, local):
                if self._stop.is_set():
                    raise CancelledError
                bound = self._net.bind(self._buffers, training=True)
                if phase.step:
                    loss = self._stepped(phase, bound, batches)
                else:
                    loss, grads = self._gradient(phase, bound, batches[0], leaves, moves.moving)
                    with torch.no_grad():
                        optimizer_step_(moving, moments, grads, masks, local)
                self._buffers = bound.buffers
                self._count(loss, len(batches[0].y))

    def end(self) -> TrainResult:
        """Return what is left after the last phase."""
        params = tree.map(detached_copy, self._params)
        joined = tree.map(lambda *parts: torch.cat(parts), *self._records) if self._records else {}
        loss, by_sample = (
            self._total / max(1, self._steps),
            self._by_sample / self._samples.clamp(min=1),
        )
        stepped = torch.full_like(loss, self._steps > 0, dtype=torch.bool)
        return TrainResult(params, self._client, self._buffers, loss, by_sample, stepped, [joined])

    def _stepped(self, phase: Phase, bound: Bound, batches: list[Batch]) -> Tensor:
        """Take a step of the phase's own; return the loss."""
        assert phase.step is not None
        given = tuple(batches) if len(batches) > 1 else batches[0]
        with torch.no_grad(), self._autocast():
            self._params, loss = phase.step(
                self._job.server, self._client, bound, self._params, given
            )
        return loss.detach()

    def _gradient(
        self, phase: Phase, bound: Bound, batch: Batch, leaves: list[Tensor], moving: list[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and its gradient at the leaves `moving`, which the phase may look at
        first.
        """
        server, objective = self._job.server, phase.loss or self._job.plan.loss
        with self._autocast():
            loss = objective(server, self._client, bound, self._params, batch)
        loss, kept = loss if isinstance(loss, tuple) else (loss, {})
        kept = tree.map(Tensor.detach, kept)
        if kept and self._job.records:
            self._records.append(kept)
        grads = self._differentiate(loss, [leaves[i] for i in moving])
        loss = loss.detach()
        if phase.after_gradient:
            now, gradient = (
                tree.map(Tensor.detach, self._params),
                complete_gradients(grads, leaves, moving),
            )
            with torch.no_grad():
                whole = tree.rebuild(self._params, gradient)
                self._client = phase.after_gradient(
                    server, self._client, now, whole, batch, loss, kept
                )
        return loss, grads

    def _differentiate(self, loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
        """Return the gradient of the loss at some leaves of the trained tree."""
        if not self._net.traits.recomputes:
            return list(torch.autograd.grad(loss, leaves, materialize_grads=True))
        # Reentrant checkpointing adds up its gradients in the leaves, and gives `autograd.grad`
        # none.
        for leaf in leaves:
            leaf.grad = None
        loss.backward()
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]

    def _count(self, loss: Tensor, samples: int) -> None:
        self._steps += 1
        self._total += loss
        if self._job.plan.by_sample:
            self._by_sample += loss * samples
            self._samples += samples


def _batches(
    job: TrainJob, data: Data, phase: Phase, epochs: range, local: Local
) -> Iterator[list[Batch]]:
    """Give the minibatches of each step of a client whose training data are `data`, planned epoch
    by epoch.
    """
    ((federation, client),), (draws,), device = job.rows, job.draws, data.y.device
    for epoch in epochs:
        now = range(epoch, epoch + 1)
        plan = plan_steps(
            phase, now, local.batch_size, draws, federation, client, local.steps, job.randoms
        )
        sizes = (plan.positions >= 0).sum(-1).tolist()
        for *minibatches, counts in zip(*plan, sizes, strict=True):
            step = []
            for rows, seen, random, count in zip(*minibatches, counts, strict=True):
                batch = data.rows(tree.send(rows[:count], device))._replace(
                    random=tree.send(random[:count], device)
                )
                if federation.augment:
                    x = federation.apply_augmentation(batch.x, tree.send(seen[:count], device))
                    batch = batch._replace(x=x.contiguous(memory_format=torch.channels_last))
                step.append(batch)
            yield step


def keep_freed_memory() -> None:
    """Have glibc keep freed memory: the next step asks for the same sizes, and fresh pages cost up
    to a fifth of it.

    Does nothing with another C library.
    """
    if sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None), "gnu_get_libc_version"):
        return
    libc.malloc_trim(
        0
    )  # of earlier runs in this process: thousands would fill the memory with gaps
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(mmap_threshold, 2**31 - 1)
    libc.mallopt(
        top_pad, 64 * 2**20
    )  # a thread's heap, which glibc would otherwise give back as a whole


def working_copy(leaf: Tensor) -> Tensor:
    """Return a leaf to train, four axes channels last, as convolutions like them."""
    layout = torch.channels_last if leaf.dim() == 4 else torch.contiguous_format
    return leaf.detach().clone(memory_format=layout)


def detached_copy(leaf: Tensor) -> Tensor:
    """Return a trained leaf laid out as one never trained.

    An axis of one entry is contiguous at any stride, and a convolution chooses its kernel, hence
    last bits, by strides.
    """
    return leaf.detach().contiguous().flatten().view(leaf.shape)
