"""The batched backend: a cohort is one program.

The hooks of a Method, written for one client, are vectorised with `torch.func.vmap`. Clients are ragged: rows are
sorted by their number of steps, and every step runs on just the rows that still have one, a leading slice of the
stacked tensors. Partial batches are padded with samples of weight 0.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl import tree
from fedpfl.engine.backend import Answer, Backend, Call, Counts, Engine, TrainCall
from fedpfl.engine.jobs import End, EvalJob, TrainJob, by_kind, concatenate, divide, join, part, reorder
from fedpfl.engine.participation import Many, evaluation, participation
from fedpfl.engine.program import Programs, cuda_graph, each, passes
from fedpfl.methods import Batch
from fedpfl.models import Net
from fedpfl.tree import Tree

CHUNK = 128  # samples per client and forward pass outside training


class Batched(Backend):
    """All clients of a slice of the cohort in lockstep, and those of several calls where their steps are alike."""

    name = "batched"

    def __init__(self, net: Net, device: torch.device, engine: Engine):
        self._net, self._width = net, engine.width
        self._autocast = partial(torch.autocast, device.type, torch.bfloat16, engine.precision == "bf16")
        self._programs = Programs(
            net, self._autocast, cuda_graph() if engine.graphs and device.type == "cuda" else None
        )

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """See Backend. Calls join into programs of at most `width` clients."""
        try:
            return self._slices(calls)
        except Exception as error:
            failed = error
        if len(calls) == 1:
            return [failed]
        traceback.clear_frames(failed.__traceback__)  # which hold the memory that the next tries need
        return [self.run([call])[0] for call in calls]  # alone, each shows whether it is at fault

    def _slices(self, calls: Sequence[Call]) -> list[Answer]:
        """Answer `calls` by programs of at most `width` clients, each call's largest first."""
        slices: list[_Slice] = []
        orders: list[Tensor] = []
        for number, call in enumerate(calls):
            trains = isinstance(call, TrainCall) or call.tuning
            sizes = call.federation.train_sizes if trains else call.federation.test_sizes
            order = sorted(range(len(call.clients)), key=lambda i: (-int(sizes[call.clients[i]]), call.clients[i]))
            orders.append(torch.tensor(order))
            width = self._width or len(order)
            for at in range(0, len(order), width):
                slices.append(_Slice(number, call, [call.clients[i] for i in order[at : at + width]]))
        parts: list[list[Any]] = [[] for _ in calls]
        while slices:
            program = [slices.pop(0)]
            while slices and sum(len(own.clients) for own in (*program, slices[0])) <= (self._width or math.inf):
                program.append(slices.pop(0))
            for done, answer in zip(program, self._follow(program), strict=True):
                parts[done.number].append(answer)
        return [reorder(concatenate(own), order.argsort()) for own, order in zip(parts, orders, strict=True)]

    def _follow(self, slices: list[_Slice]) -> list[Any]:
        """Take slices through their calls; what they want trained or evaluated at the same time is done together."""
        works = [
            (participation if isinstance(own.call, TrainCall) else evaluation)(
                own.call, Many(own.clients), self._net, self._autocast
            )
            for own in slices
        ]
        results: list[Any] = [None] * len(works)
        answers: dict[int, Any] = dict.fromkeys(range(len(works)))
        while answers:
            jobs: dict[int, TrainJob | EvalJob] = {}
            for number, answer in answers.items():
                try:
                    jobs[number] = works[number].send(answer)
                except StopIteration as done:
                    results[number] = done.value
            answers = {}
            for kind, together in ((TrainJob, self._train), (EvalJob, self._evaluate)):
                chosen = [number for number, job in jobs.items() if isinstance(job, kind)]
                answers |= zip(chosen, by_kind(together, [jobs[number] for number in chosen]), strict=True)
        return results

    def _evaluate(self, jobs: list[EvalJob]) -> list[Counts]:
        """Evaluate jobs of one kind as one program."""
        method, rows = jobs[0].method, [row for job in jobs for row in job.rows]
        params, buffers = concatenate([job.params for job in jobs]), concatenate([job.buffers for job in jobs])
        device = rows[0].federation.x.device
        correct = torch.zeros(len(rows), dtype=torch.int64, device=device)
        loss = torch.zeros(len(rows), device=device)

        def one(p: Tree, b: dict[str, Tree], batch: Batch) -> tuple[Tensor, Tensor]:
            logits = method.predict(self._net.bind(b), p, batch.x)
            losses = F.cross_entropy(logits, batch.y, reduction="none")
            return ((logits.argmax(1) == batch.y) & (batch.samples > 0)).sum(), batch.sum(losses)

        owned = [getattr(row.federation, jobs[0].split)[row.client] for row in rows]
        with torch.no_grad(), self._autocast():
            for now, batch in passes(rows[0].federation, [own.split(CHUNK) for own in owned]):
                hits, losses = each(one, tree.take(params, now), tree.take(buffers, now), batch)
                correct[now] += hits
                loss[now] += losses
        total = torch.tensor([len(own) for own in owned], device=device)
        return divide(Counts(correct, loss, total), [len(job.rows) for job in jobs])

    def _train(self, jobs: list[TrainJob]) -> list[End]:
        """Take all steps of jobs of one kind as one program."""
        if len(jobs) == 1:
            return [self._programs.run(jobs[0])]
        joined, places = join(jobs)
        return part(self._programs.run(joined), places, jobs)


class _Slice(NamedTuple):
    """Some clients of a call, and the call's number."""

    number: int
    call: Any
    clients: list[int]
