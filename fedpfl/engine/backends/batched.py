"""The batched backend: a cohort is one program.

The hooks of a Method, written for one client, are vectorised with `torch.func.vmap`. Clients are
ragged: rows are sorted by their number of steps, and every step runs on just the rows that still
have one, a leading slice of the stacked tensors. Partial batches are padded with samples of weight
0.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vjp

from fedpfl.engine.backends.backend import Backend, Engine, reproducible_arithmetic
from fedpfl.engine.backends.graphs import CudaGraphs
from fedpfl.engine.backends.planning import evaluation_batches
from fedpfl.engine.backends.programs import ProgramCache
from fedpfl.engine.calls import Answer, Call, Counts, TrainCall
from fedpfl.engine.keys import track_global_draws
from fedpfl.engine.measures import compute_measures
from fedpfl.engine.training.clients import ManyClients
from fedpfl.engine.training.jobs import (
    ClientRow,
    EvalJob,
    TrainJob,
    TrainResult,
    concatenate_rows,
    divide_rows,
    join_jobs,
    run_by_kind,
    split_result,
)
from fedpfl.engine.training.participation import run_evaluation, run_participation
from fedpfl.engine.training.shared_model import SharedModel, find_shared_model
from fedpfl.engine.training.shortcuts import Shortcuts
from fedpfl.engine.training.vectorize import vmap_clients
from fedpfl.ground import tree
from fedpfl.ground.errors import as_exception
from fedpfl.ground.seeding import seeded_by_key
from fedpfl.ground.survival import Horizon
from fedpfl.ground.tree import Entries, Tree
from fedpfl.methods import Batch, Method
from fedpfl.models import Net

log = logging.getLogger(__name__)

MANY_CLIENTS = 256
"""From so many on those with one model are evaluated together; fewer are one program, as trained."""


class BatchedBackend(Backend):
    """Run all clients of a slice of the cohort in lockstep.

    So it does with those of several calls where their steps are alike.
    """

    name = "batched"

    def __init__(self, net: Net, device: torch.device, engine: Engine):
        self.net = net
        self.engine = engine
        self._autocast = partial(
            torch.autocast, device.type, torch.bfloat16, engine.precision == "bf16"
        )
        self._arithmetic = partial(reproducible_arithmetic, device, engine.precision)
        graphs = CudaGraphs(device) if engine.graphs and device.type == "cuda" else None
        self._programs = ProgramCache(net, self._autocast, graphs)
        self._ready = graphs.ready if graphs else nullcontext
        # Calls run one by one if a method or network draws from the process's generators.
        self._runs_calls_alone = bool(net.traits.draws)

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """See Backend. Calls join into programs of at most `width` clients."""
        with self._arithmetic(), self._ready():
            if not self._runs_calls_alone:
                with seeded_by_key("batched") as drawn_from:
                    results = self._run_calls(calls)
                    if not drawn_from():
                        return results
                # Answers of a cohort are large, and are made again.
                del results
                self._runs_calls_alone = True
            return [self._run_call_alone(call) for call in calls]

    def _run_call_alone(self, call: Call) -> Answer:
        """Run one call, the process's generators seeded for it."""
        key = call.draws.hook_key()
        with track_global_draws(call.method, key, self.net.traits.draws):
            return self._run_calls([call])[0]

    def _run_calls(self, calls: Sequence[Call], may_forget: bool = True) -> list[Answer]:
        """Run calls together; where memory runs out or one fails, in smaller parts.

        Args:
            calls: Of one run or of several.
            may_forget: Whether programs of earlier rounds may be dropped to make room.
        """
        failed: Exception
        has_forgotten = False
        should_repeat = False
        try:
            return self._run_slices(calls)
        except torch.OutOfMemoryError as error:
            failed = error.with_traceback(None)  # frames hold the missing memory
            has_forgotten = may_forget and self._programs.forget()
            should_repeat = has_forgotten or self._halve_width(calls)
        except (Exception, SystemExit) as error:
            failed = as_exception(error)
        if should_repeat:
            return self._run_calls(calls, may_forget=not has_forgotten)
        if len(calls) == 1:
            return [failed]
        del failed
        # Alone, each shows whether it is at fault.
        return [self._run_calls([call])[0] for call in calls]

    def _halve_width(self, calls: Sequence[Call]) -> bool:
        """Halve how many clients go together, from now on; return whether that was possible."""
        client_count = sum(len(call.clients) for call in calls)
        width = min(self.engine.width or client_count, client_count) // 2
        if not width:
            return False
        self.engine = replace(self.engine, width=width)
        log.warning(
            "engine: out of memory; from here on %d clients at a time (engine.width=%d)",
            width,
            width,
        )
        return True

    def _run_slices(self, calls: Sequence[Call]) -> list[Answer]:
        """Run calls by programs of at most `width` clients, each call's largest first."""
        # ---- Step 1: each call's clients, by size, are cut into slices. Those that are evaluated
        # by one model are left out.
        slices: list[_Slice] = []
        orders: list[Tensor] = []
        shared_models: list[SharedModel | None] = []
        for number, call in enumerate(calls):
            shared: SharedModel | None = None
            may_share = self.engine.shortcuts and not self._runs_calls_alone
            if may_share and len(call.clients) >= MANY_CLIENTS:
                shared = find_shared_model(call, self.net)
            shared_models.append(shared)
            separate_clients = shared.other_clients if shared else call.clients
            # Rows that stand last end first, so that each step is a leading slice of the program's
            # memory.
            order = _order_by_size(call, separate_clients)
            orders.append(torch.tensor(order))
            clients = [separate_clients[position] for position in order]
            width = self.engine.width or max(1, len(order))
            for start in range(0, len(order), width):
                slices.append(_Slice(number, call, clients[start : start + width]))

        # ---- Step 2: slices that fit into the width together are one program.
        parts: list[list[Any]] = [[] for _ in calls]
        most_clients = self.engine.width or math.inf
        while slices:
            program = [slices.pop(0)]
            client_count = len(program[0].clients)
            while slices and client_count + len(slices[0].clients) <= most_clients:
                program.append(slices.pop(0))
                client_count += len(program[-1].clients)
            for member, result in zip(program, self._follow(program), strict=True):
                parts[member.number].append(result)

        # ---- Step 3: results go back into the order of each call's clients.
        answers: list[Any] = []
        for call_parts, positions, shared in zip(parts, orders, shared_models, strict=True):
            answer: Any = None
            if call_parts:
                answer = tree.take(concatenate_rows(call_parts), positions.argsort())
            answers.append(self._with_shared(shared, answer) if shared else answer)
        return answers

    def _with_shared(self, shared: SharedModel, answer: dict[str, Counts] | None) -> Answer:
        """Return a call's answer from that of the clients that do not share the model."""
        counts = [
            shared.evaluate_pass(self.net, forward_pass, self._autocast, Shortcuts())
            for forward_pass in shared.passes
        ]
        return shared.make_answer(counts, answer)

    def _follow(self, slices: list[_Slice]) -> list[Any]:
        """Take slices through their calls; jobs that they yield at the same time are joined."""
        participations = [self._start_participation(member) for member in slices]
        final_results: list[Any] = [None] * len(slices)
        job_results: dict[int, Any] = dict.fromkeys(range(len(slices)))
        while job_results:
            jobs: dict[int, TrainJob | EvalJob] = {}
            for number, job_result in job_results.items():
                try:
                    jobs[number] = participations[number].send(job_result)
                except StopIteration as stop_iteration:
                    self.net.require_constants()
                    final_results[number] = stop_iteration.value
            job_results = {}
            work: Callable[[list[Any]], list[Any]]
            for job_type, work in ((TrainJob, self._train), (EvalJob, self._evaluate)):
                numbers = [number for number, job in jobs.items() if isinstance(job, job_type)]
                results = run_by_kind(work, [jobs[number] for number in numbers])
                job_results |= zip(numbers, results, strict=True)
        return final_results

    def _start_participation(self, member: _Slice) -> Generator[TrainJob | EvalJob, Any, Any]:
        """Return the generator of a slice's jobs."""
        clients = ManyClients(member.clients)
        if isinstance(member.call, TrainCall):
            return run_participation(member.call, clients, self.net, self._autocast)
        return run_evaluation(member.call, clients, self.net, self._autocast)

    def _evaluate(self, jobs: list[EvalJob]) -> list[Counts]:
        """Evaluate jobs of one kind as one program."""
        # ---- Step 1: the models of all jobs, and their clients' samples
        rows = [row for job in jobs for row in job.rows]
        random = [numbers for job in jobs for numbers in job.random()]
        samples = [getattr(row.federation, jobs[0].split)[row.client] for row in rows]
        params = concatenate_rows([job.params for job in jobs])
        buffers = concatenate_rows([job.buffers for job in jobs])
        excluded_classes = _stack_excluded_classes(rows)
        device = rows[0].federation.x.device
        correct = torch.zeros(len(rows), dtype=torch.int64, device=device)
        loss = torch.zeros(len(rows), device=device)

        # ---- Step 2: they are counted, chunk by chunk.
        metrics = jobs[0].metrics
        count_client = partial(self._count_batch, jobs[0].method, bool(metrics))
        logits_of_batches: list[tuple[slice | Tensor, Tensor]] = []
        with torch.no_grad(), self._autocast():
            for batch_rows, batch in evaluation_batches(rows[0].federation, samples, random):
                counts = vmap_clients(
                    count_client,
                    tree.take(params, batch_rows),
                    tree.take(buffers, batch_rows),
                    tree.take(excluded_classes, batch_rows),
                    batch,
                )
                correct[batch_rows] += counts["hits"]
                loss[batch_rows] += counts["loss"]
                if metrics:
                    logits_of_batches.append((batch_rows, counts["logits"]))

        # ---- Step 3: measures beside hits and loss, where they are asked for
        measures: dict[str, Tensor] = {}
        if metrics:
            labels = []
            for row, indices in zip(rows, samples, strict=True):
                labels.append(row.federation.y[tree.send(indices, device)])
            classes = rows[0].federation.classes
            horizons = [horizon for job in jobs for horizon in _list_horizons(job)]
            measures = _compute_row_measures(
                metrics, logits_of_batches, labels, classes, horizons=horizons
            )
        pairs = zip(rows, samples, strict=True)
        sizes = [row.federation.count_labels(indices) for row, indices in pairs]
        total = tree.send(torch.tensor(sizes), device)
        counts_of_rows = Counts(correct=correct, loss=loss, total=total, measures=measures)
        return divide_rows(counts_of_rows, [len(job.rows) for job in jobs])

    def _count_batch(
        self,
        method: Method,
        wants_logits: bool,
        params: Tree,
        buffers: Entries,
        excluded_classes: Tree,
        batch: Batch,
    ) -> dict[str, Tensor]:
        """Return one client's hits and summed loss of a batch, and logits if asked for."""
        bound = self.net.bind(buffers, weight=batch.samples)
        unlabelled = batch.without_labels()
        # As if differentiated, like in training: autocast then meets whole layers. Under vmap
        # alone it would meet their parts, and round other ones on a CPU than on a GPU.
        results: Any = vjp(
            lambda weight: (weight, method.predict(bound, params, unlabelled)),
            batch.samples,
            has_aux=True,
        )
        logits = allowed_logits = results[2]
        if excluded_classes:
            allowed_logits = logits.masked_fill(excluded_classes["classes"], -torch.inf)
        hits = (batch.find_hits(allowed_logits) * (batch.samples > 0)).sum()
        counts = {"hits": hits, "loss": batch.summed_loss(logits)}
        if wants_logits:
            counts["logits"] = allowed_logits
        return counts

    def _train(self, jobs: list[TrainJob]) -> list[TrainResult]:
        """Take all steps of jobs of one kind as one program."""
        if len(jobs) == 1:
            return [self._programs.run(jobs[0])]
        joined_job, positions = join_jobs(jobs)
        return split_result(self._programs.run(joined_job), positions, jobs)


def _order_by_size(call: Call, clients: Sequence[int]) -> list[int]:
    """Return positions of some of a call's clients, those with most samples first."""
    sizes = call.federation.test_sizes
    if isinstance(call, TrainCall) or call.tuning:
        sizes = call.federation.train_sizes
    # Numbers break ties: the order of a cohort must not decide which clients share a program.
    keys = [(-int(sizes[client]), client) for client in clients]
    return sorted(range(len(keys)), key=lambda position: keys[position])


def _stack_excluded_classes(rows: Sequence[ClientRow]) -> Tree:
    """Return each row's excluded classes as an entry `classes`, {} if none has any."""
    if rows[0].federation.excluded_classes is None:
        return {}
    flags = [
        row.federation.excluded_classes[row.client]  # type: ignore[index]
        for row in rows
    ]
    return {"classes": torch.stack(flags)}


def _compute_row_measures(
    metrics: Sequence[str],
    logits_of_batches: Sequence[tuple[slice | Tensor, Tensor]],
    labels: Sequence[Tensor],
    classes: int,
    horizons: Sequence[Horizon | None],
) -> dict[str, Tensor]:
    """Return each row's measures, stacked.

    Args:
        metrics: Names of measures.
        logits_of_batches: Of each batch its rows, and logits `[rows, samples, classes]`.
        labels: Of each row.
        classes: How many there are.
        horizons: Of each row.
    """
    logits_of_rows: list[list[Tensor]] = [[] for _ in labels]
    for batch_rows, logits in logits_of_batches:
        rows = torch.arange(len(labels), device=logits.device)[batch_rows].tolist()
        for row, row_logits in zip(rows, logits, strict=True):
            logits_of_rows[row].append(row_logits)
    measures = []
    for parts, y, horizon in zip(logits_of_rows, labels, horizons, strict=True):
        predictions = torch.cat(parts)[: len(y)] if parts else y.new_zeros(0, classes)
        measures.append(compute_measures(metrics, predictions, y, horizon))
    return tree.stack(measures)


def _list_horizons(job: EvalJob) -> list[Horizon | None]:
    """Return the horizon of each row of a job."""
    horizon = job.horizon
    if horizon is None or horizon.hazard is None:
        return [horizon] * len(job.rows)
    return [Horizon(horizon.time, hazard) for hazard in horizon.hazard]


class _Slice(NamedTuple):
    """Hold some clients of a call.

    Attributes:
        number: The call's.
    """

    number: int
    call: Any
    clients: list[int]
