"""The batched backend: a cohort is one program.

The hooks of a Method, written for one client, are vectorised with `torch.func.vmap`. Clients are
ragged: rows are sorted by their number of steps, and every step runs on just the rows that still
have one, a leading slice of the stacked tensors. Partial batches are padded with samples of weight
0.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vjp

from fedpfl.engine.backends.backend import Backend, Engine, reproducible_arithmetic
from fedpfl.engine.backends.planning import evaluation_batches
from fedpfl.engine.backends.programs import CudaGraphs, ProgramCache
from fedpfl.engine.calls import Answer, Call, Counts, TrainCall
from fedpfl.engine.keys import seeded_by_key, track_global_draws
from fedpfl.engine.measures import compute_measures
from fedpfl.engine.training.hook_checks import AnswerForms
from fedpfl.engine.training.jobs import (
    EvalJob,
    TrainJob,
    TrainResult,
    concatenate_rows,
    divide_rows,
    join_jobs,
    run_by_kind,
    split_result,
)
from fedpfl.engine.training.participation import ManyClients, run_evaluation, run_participation
from fedpfl.engine.training.vectorize import vmap_clients
from fedpfl.ground import tree
from fedpfl.ground.errors import as_exception
from fedpfl.ground.tree import Tree
from fedpfl.methods import Batch
from fedpfl.models import Net

log = logging.getLogger(__name__)


class BatchedBackend(Backend):
    """All clients of a slice of the cohort in lockstep, and those of several calls where their
    steps are alike.
    """

    name = "batched"

    def __init__(self, net: Net, device: torch.device, engine: Engine):
        self.net, self.engine = net, engine
        self._autocast = partial(
            torch.autocast, device.type, torch.bfloat16, engine.precision == "bf16"
        )
        self._arithmetic = partial(reproducible_arithmetic, device, engine.precision)
        graphs = CudaGraphs(device) if engine.graphs and device.type == "cuda" else None
        room = torch.cuda.get_device_properties(device).total_memory / 4 if graphs else math.inf
        self._programs = ProgramCache(net, self._autocast, graphs, room)
        self._ready = graphs.ready if graphs else nullcontext
        self._alone = bool(
            net.traits.draws
        )  # whether calls are answered one after another, as somebody draws

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """See Backend. Calls join into programs of at most `width` clients."""
        with self._arithmetic(), self._ready():
            if not self._alone:
                with seeded_by_key("batched") as drawn:
                    answers = self._answers(calls)
                    if not drawn():
                        return answers
                del answers
                self._alone = True
            return [self._drawing(call) for call in calls]

    def _drawing(self, call: Call) -> Answer:
        """Answer one call, with random numbers of its own."""
        with track_global_draws(
            call.method, *call.draws.hook_key(), network_draws=self.net.traits.draws
        ):
            return self._answers([call])[0]

    def _answers(self, calls: Sequence[Call], again: bool = True) -> list[Answer]:
        failed: Exception
        freed = more = False
        try:
            return self._slices(calls)
        except torch.OutOfMemoryError as error:
            failed = error.with_traceback(None)  # whose frames hold the memory that is missed
            freed = again and self._programs.forget()
            more = freed or self._narrowed(calls)
        except (Exception, SystemExit) as error:
            failed = as_exception(error)
        if more:
            return self._answers(calls, again=not freed)
        if len(calls) == 1:
            return [failed]
        del failed
        return [
            self._answers([call])[0] for call in calls
        ]  # alone, each shows whether it is at fault

    def _narrowed(self, calls: Sequence[Call]) -> bool:
        """Halve how many clients go together, from now on; tell whether that was possible."""
        together = sum(len(call.clients) for call in calls)
        width = min(self.engine.width or together, together) // 2
        if not width:
            return False
        self.engine = replace(self.engine, width=width)
        log.warning(
            "engine: out of memory; from here on %d clients at a time (engine.width=%d)",
            width,
            width,
        )
        return True

    def _slices(self, calls: Sequence[Call]) -> list[Answer]:
        """Answer `calls` by programs of at most `width` clients, each call's largest first."""
        slices: list[_Slice] = []
        orders: list[Tensor] = []
        for number, call in enumerate(calls):
            found: AnswerForms = {}
            trains = isinstance(call, TrainCall) or call.tuning
            sizes = call.federation.train_sizes if trains else call.federation.test_sizes
            order = sorted(
                range(len(call.clients)),
                key=lambda i: (-int(sizes[call.clients[i]]), call.clients[i]),
            )
            orders.append(torch.tensor(order))
            width = self.engine.width or len(order)
            for at in range(0, len(order), width):
                slices.append(
                    _Slice(number, call, [call.clients[i] for i in order[at : at + width]], found)
                )
        parts: list[list[Any]] = [[] for _ in calls]
        while slices:
            program = [slices.pop(0)]
            while slices and sum(len(own.clients) for own in (*program, slices[0])) <= (
                self.engine.width or math.inf
            ):
                program.append(slices.pop(0))
            for done, answer in zip(program, self._follow(program), strict=True):
                parts[done.number].append(answer)
        return [
            tree.take(concatenate_rows(own), order.argsort())
            for own, order in zip(parts, orders, strict=True)
        ]

    def _follow(self, slices: list[_Slice]) -> list[Any]:
        """Take slices through their calls; what they want trained or evaluated at the same time is
        done together.
        """
        works = [
            (run_participation if isinstance(own.call, TrainCall) else run_evaluation)(
                own.call, ManyClients(own.clients, own.found), self.net, self._autocast
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
                answers |= zip(
                    chosen, run_by_kind(together, [jobs[number] for number in chosen]), strict=True
                )
        return results

    def _evaluate(self, jobs: list[EvalJob]) -> list[Counts]:
        """Evaluate jobs of one kind as one program."""
        method, rows = jobs[0].method, [row for job in jobs for row in job.rows]
        params, buffers = (
            concatenate_rows([job.params for job in jobs]),
            concatenate_rows([job.buffers for job in jobs]),
        )
        device = rows[0].federation.x.device
        correct = torch.zeros(len(rows), dtype=torch.int64, device=device)
        loss = torch.zeros(len(rows), device=device)
        metrics, kept = jobs[0].metrics, list[tuple[Tensor, Tensor]]()

        barred: Tree = {}
        if rows[0].federation.excluded_classes is not None:
            barred = {
                "classes": torch.stack(
                    [
                        row.federation.excluded_classes[row.client]  # type: ignore[index]
                        for row in rows
                    ]
                )
            }

        def one(p: Tree, b: dict[str, Tree], barred: Tree, batch: Batch) -> tuple[Tensor, ...]:
            # As if differentiated, like in training: autocast then meets whole layers. Under vmap
            # alone it would meet their parts, and round other ones on a CPU than on a GPU.
            bound = self.net.bind(b, weight=batch.samples)
            shown = batch.without_labels()
            seen: Any = vjp(
                lambda none: (none, method.predict(bound, p, shown)), batch.samples, has_aux=True
            )
            logits = seen[2]
            allowed = logits.masked_fill(barred["classes"], -torch.inf) if barred else logits
            hits = (batch.find_hits(allowed) & (batch.samples > 0)).sum()
            return hits, batch.summed_loss(logits), *([allowed] if metrics else [])

        owned = [getattr(row.federation, jobs[0].split)[row.client] for row in rows]
        random = [numbers for job in jobs for numbers in job.random()]
        with torch.no_grad(), self._autocast():
            for now, batch in evaluation_batches(rows[0].federation, owned, random):
                own = (tree.take(part, now) for part in (params, buffers, barred))
                hits, losses, *logits = vmap_clients(one, *own, batch)
                correct[now] += hits
                loss[now] += losses
                kept += [(now, *logits)] if logits else []
        total = tree.send(torch.tensor([len(own) for own in owned]), device)
        labels = [
            row.federation.y[tree.send(own, device)]
            for row, own in zip(rows, owned, strict=True)
            if metrics
        ]
        more = _measured(metrics, kept, labels)
        return divide_rows(Counts(correct, loss, total, more), [len(job.rows) for job in jobs])

    def _train(self, jobs: list[TrainJob]) -> list[TrainResult]:
        """Take all steps of jobs of one kind as one program."""
        if len(jobs) == 1:
            return [self._programs.run(jobs[0])]
        joined, places = join_jobs(jobs)
        return split_result(self._programs.run(joined), places, jobs)


def _measured(
    metrics: Sequence[str], kept: Sequence[tuple[slice | Tensor, Tensor]], labels: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return each row's measures, stacked. kept: of each pass its rows, and logits `[rows, samples,
    classes]`.
    """
    parts: list[list[Tensor]] = [[] for _ in labels]
    for now, logits in kept:
        for row, own in zip(
            torch.arange(len(labels), device=logits.device)[now].tolist(), logits, strict=True
        ):
            parts[row].append(own)
    each = [
        compute_measures(metrics, torch.cat(own)[: len(y)] if own else y, y)
        for own, y in zip(parts, labels, strict=True)
    ]
    return tree.stack(each) if each else {}


class _Slice(NamedTuple):
    """Some clients of a call, the call's number, and what its clients found out."""

    number: int
    call: Any
    clients: list[int]
    found: AnswerForms
