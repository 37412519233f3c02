"""The training steps of a job as one vectorised program; on CUDA its steps can be captured and replayed as graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fedpfl import tree
from fedpfl.data.federation import Federation
from fedpfl.engine.jobs import End, TrainJob
from fedpfl.engine.sgd import Local, Movement, complete, idle, movement, numbered, parked, steps, update_
from fedpfl.methods import Batch, Phase
from fedpfl.models import Net
from fedpfl.tree import Tree

KEPT = 4  # programs whose memory and graphs are kept for the next round

Capture = Callable[[Callable[[], None]], Callable[[], None]]


class Programs:
    """Run jobs, eagerly, or by graphs that are captured once per kind of job, phase and number of rows.

    capture: makes something that replays what a call did, from the same memory; None runs every step eagerly.
    """

    def __init__(self, net: Net, autocast: Callable[[], AbstractContextManager], capture: Capture | None = None):
        self._net, self._autocast, self._capture = net, autocast, capture
        self._kept: list[tuple[Any, Program]] = []

    def run(self, job: TrainJob) -> End:
        """Take all steps of a job, whose rows are sorted, the longest first."""
        if self._capture is None or any(phase.keeps for phase in job.plan.phases):  # a graph would overwrite it
            return Program(self._net, self._autocast, job).run(job)
        key = (len(job.rows), *job.kind())
        program = next((kept for known, kept in self._kept if known == key), None)
        if program is None:
            program = Program(self._net, self._autocast, job, self._capture)
        else:
            program.load(job)
        self._kept = [(key, program), *((k, kept) for k, kept in self._kept if kept is not program)][:KEPT]
        end = program.run(job)
        client = end.client if job.plain else tree.clone(end.client)
        return replace(end, params=tree.clone(end.params), client=client, buffers=tree.clone(end.buffers))


class Program:
    """The steps of jobs of one kind and number of rows, on memory of its own."""

    def __init__(
        self, net: Net, autocast: Callable[[], AbstractContextManager], job: TrainJob, capture: Capture | None = None
    ):
        self._net, self._autocast, self._capture = net, autocast, capture
        watched = any(phase.after_gradient for phase in job.plan.phases)
        self._own = replace(job, start=tree.clone(job.start), buffers=tree.clone(job.buffers))
        if job.plain:
            self._own = replace(self._own, client={}, server={})
        elif capture or watched:
            self._own = replace(self._own, client=tree.clone(job.client))
        if capture:  # graphs read everything from where it was at first
            phases = [phase._replace(mask=_copied(phase.mask)) for phase in job.plan.phases]
            servers = None if job.servers is None else tree.clone(job.servers)
            server = tree.clone(self._own.server)
            self._own = replace(self._own, plan=replace(job.plan, phases=phases), server=server, servers=servers)
        leaves = tree.leaves(self._own.start)
        self._velocity = [torch.zeros_like(leaf) for leaf in leaves]
        device, rows = leaves[0].device, len(job.rows)
        self._total, self._steps, self._by_sample, self._samples = torch.zeros(4, rows, device=device)
        self._idle = torch.zeros(rows, dtype=torch.bool, device=device)
        self._inputs = [torch.empty(0)] * 4
        self._kept: list[tuple[Tree, Tensor]] = []
        self._graphs: dict[tuple[int, int, bool], Callable[[], None] | None] = {}

    def load(self, job: TrainJob) -> None:
        """Copy another job of the same kind into the program's memory."""
        parts = ["start", "buffers"] if self._own.plain else ["start", "buffers", "client", "server"]
        for part in parts:
            tree.map(Tensor.copy_, getattr(self._own, part), getattr(job, part))
        if self._own.servers is not None:
            tree.map(Tensor.copy_, self._own.servers, job.servers)
        for own, phase in zip(self._own.plan.phases, job.plan.phases, strict=True):
            tree.map(lambda own, new: own.copy_(new) if isinstance(own, Tensor) else own, own.mask, phase.mask)
        torch._foreach_zero_([*self._velocity, self._total, self._steps, self._by_sample, self._samples])

    def run(self, job: TrainJob) -> End:
        """Take all steps; what is returned is the program's own memory."""
        own, federation, device = self._own, self._own.rows[0].federation, self._total.device
        for number, (phase, epochs) in enumerate(numbered(own.plan.phases)):
            flags = idle(phase, len(job.rows))
            if flags is not None and bool(flags.all()):
                continue
            some_idle = flags is not None and bool(flags.any())
            if flags is not None:
                self._idle.copy_(flags)
            moves, local = movement(phase, own.start), job.plan.local.during(phase)
            inputs, active = self._planned(job, phase, epochs, local.batch_size)
            if [part.shape[1:] for part in inputs] != [part.shape for part in self._inputs]:
                self._inputs = [part.new_zeros(part.shape[1:], device=device) for part in inputs]
                self._graphs.clear()
            velocity = [self._velocity[i] for i in moves.moving]
            with parked(velocity, moves.masks, local):
                for *now, rows in zip(*(part.to(device) for part in inputs), active, strict=True):
                    for memory, values in zip(self._inputs, now, strict=True):
                        memory.copy_(values)
                    make = partial(self._eager, federation, phase, moves, local, rows, some_idle)
                    self._step((number, rows, some_idle), make)
        client = job.client if own.plain else own.client  # which a plain job has not read
        loss, by_sample = self._total / self._steps.clamp(min=1), self._by_sample / self._samples.clamp(min=1)
        return End(own.start, client, own.buffers, loss, by_sample, self._records())

    def _planned(
        self, job: TrainJob, phase: Phase, epochs: range, batch_size: int
    ) -> tuple[tuple[Tensor, ...], list[int]]:
        """Sample indices, weights, random numbers and views of every step, and how many leading rows take it."""
        federation = job.rows[0].federation
        taken = [
            list(steps(phase, epochs, batch_size, draws, row.federation, row.client))
            for row, draws in zip(job.rows, job.draws, strict=True)
        ]
        plan = [
            [[row.federation.train[row.client][chosen] for chosen in step.minibatches] for step in own]
            for own, row in zip(taken, job.rows, strict=True)
        ]
        # Graphs want one shape in every round, also where no client has a full batch.
        indices, weights, active = planned(plan, batch_size if self._capture else 0)
        assert all(rows == list(range(len(rows))) for rows in active), "the rows of a job are sorted by their steps"
        randoms = torch.zeros(len(active), len(plan), phase.randoms)
        views = torch.zeros(*indices.shape, federation.views)
        for row, own in enumerate(taken):
            for place, step in enumerate(own):
                randoms[place, row] = step.random
                for k, seen in enumerate(step.views if federation.views else ()):
                    views[place, row, k, : len(seen)] = seen
        return (indices, weights, randoms, views), [len(rows) for rows in active]

    def _records(self) -> list[Tree]:
        """What was kept, per row, without the padding."""
        found: list[list[Tree]] = [[] for _ in self._own.rows]
        for kept, weight in self._kept:
            for row, real in enumerate(weight > 0):
                found[row].append(tree.map(lambda leaf, row=row, real=real: leaf[row][real], kept))
        return [tree.map(lambda *leaves: torch.cat(leaves), *own) if own else {} for own in found]

    def _step(self, key: tuple[int, int, bool], make: Callable[[], Callable[[], None]]) -> None:
        """Run eagerly the first time, which warms up; captured the second; replayed from then on."""
        graph = self._graphs.get(key)
        if self._capture is None or key not in self._graphs:
            make()()
            self._graphs[key] = None
            return
        if graph is None:
            graph = self._graphs[key] = self._capture(make())
        graph()

    def _eager(
        self, federation: Federation, phase: Phase, moves: Movement, local: Local, rows: int, some_idle: bool
    ) -> Callable[[], None]:
        own, now = self._own, slice(rows)
        leaves = [leaf[now] for leaf in tree.leaves(own.start)]  # views of the leading rows
        velocity = [self._velocity[i][now] for i in moves.moving]
        moving = [leaves[i] for i in moves.moving]
        masks = [None if mask is None else mask[now] for mask in moves.masks]
        one = self._own_step if phase.step else self._gradient(moves.moving)
        one = partial(one, phase)

        def step() -> None:
            takes = ~self._idle[now] if some_idle else None  # here: a graph reads its round's flags

            def moved(new: Tree, old: Tree) -> Tree:
                return new if takes is None else tree.by_row(takes, new, old)

            index, weight, random, views = (part[now] for part in self._inputs)
            x, y = federation.seen(federation.normalize(federation.x[index]), views), federation.y[index]
            batches = [Batch(x[:, k], y[:, k], weight[:, k], random) for k in range(index.shape[1])]
            stacked = (tree.take(part, now) for part in (own.buffers, own.client, own.servers or {}))
            buffers, client, servers = stacked
            if phase.step:
                with torch.no_grad(), self._autocast():
                    new, loss, after = each(one, leaves, batches, buffers, client, servers)
                for leaf, value in zip(leaves, new, strict=True):
                    leaf.copy_(moved(value, leaf))
            else:
                with self._autocast():
                    grads, loss, after, seen, kept = each(one, moving, leaves, batches[0], buffers, client, servers)
                update_(moving, velocity, grads, masks, local, stacked=True)
                if phase.after_gradient:
                    tree.put_(own.client, now, moved(seen, client))
                if phase.keeps:
                    real = weight[:, 0] if takes is None else weight[:, 0] * takes[:, None]
                    self._kept.append((kept, real.clone()))
            tree.put_(own.buffers, now, moved(after, buffers))
            self._total[now] += moved(loss, torch.zeros_like(loss))
            self._steps[now] += 1 if takes is None else takes
            if own.plan.by_sample:
                count = weight[:, 0].sum(1) if takes is None else weight[:, 0].sum(1) * takes
                self._by_sample[now] += loss * count
                self._samples[now] += count

        return step

    def _own_step(
        self,
        phase: Phase,
        leaves: list[Tensor],
        batches: list[Batch],
        buffers: dict[str, Tree],
        client: dict[str, Tree],
        servers: dict[str, Tree],
    ) -> tuple[list[Tensor], Tensor, dict[str, Tree]]:
        """One client's `Phase.step`: the new leaves, the loss and the buffers."""
        assert phase.step is not None
        bound = self._net.bind(buffers, training=True, weight=batches[0].weight)
        batch = batches[0] if len(batches) == 1 else tuple(batches)
        params, server = tree.rebuild(self._own.start, leaves), servers.get("server", self._own.server)
        params, loss = phase.step(bound, params, batch, server, client)
        return tree.leaves(params), loss, bound.buffers

    def _gradient(self, moving: list[int]) -> Callable[..., Any]:
        """One client's gradient at the leaves `moving`, loss, buffers, state (after the gradient) and what is kept."""
        own, net = self._own, self._net

        def one(
            phase: Phase,
            values: list[Tensor],
            leaves: list[Tensor],
            batch: Batch,
            buffers: dict[str, Tree],
            client: dict[str, Tree],
            servers: dict[str, Tree],
        ) -> tuple[list[Tensor], Tensor, dict[str, Tree], dict[str, Tree], Tree]:
            server, objective = servers.get("server", own.server), phase.loss or own.plan.loss

            def loss_of(values: list[Tensor]) -> tuple[Tensor, tuple[dict[str, Tree], Tree]]:
                replaced = dict(zip(moving, values, strict=True))
                params = tree.rebuild(own.start, [replaced.get(i, leaf) for i, leaf in enumerate(leaves)])
                bound = net.bind(buffers, training=True, weight=batch.weight)
                loss = objective(bound, params, batch, server, client)
                loss, kept = loss if phase.keeps else (loss, {})
                return loss, (bound.buffers, kept)

            grads, (loss, (after, kept)) = grad_and_value(loss_of, has_aux=True)(values)
            seen = {}
            if phase.after_gradient:
                gradient = tree.rebuild(own.start, complete(grads, leaves, moving))
                seen = phase.after_gradient(tree.rebuild(own.start, leaves), gradient, loss, batch, server, client)
            return grads, loss, after, seen, kept

        return one


def cuda_graph() -> Capture:
    """Capture into CUDA graphs, which share one pool of memory: they are replayed one after another."""
    pool = torch.cuda.graph_pool_handle()

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            step()
        return graph.replay

    return capture


def each(f: Callable[..., Any], *stacked: Any, count: int | None = None) -> Any:
    """Apply one-client `f` to every row of the stacked trees."""
    rows = count if count is not None else next(leaf.shape[0] for part in stacked for leaf in _tensors(part))
    # The row numbers make sure that something is mapped over even where a method keeps nothing per client.
    return vmap(lambda _, *parts: f(*parts), randomness="different")(torch.arange(rows), *stacked)


def planned(plan: Sequence[Sequence[Sequence[Tensor]]], batch: int = 0) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Return sample indices and weights of every step, `[steps, rows, minibatches, batch]`, and the rows that take it.

    plan: sample indices of the minibatches of each row's steps. What is short is padded with index 0 and weight 0, up
    to the longest batch and at least up to `batch`.
    """
    counts = [len(own) for own in plan]
    longest = max((len(chosen) for own in plan for step in own for chosen in step), default=0)
    longest = max(longest, batch)
    together = max((len(step) for own in plan for step in own), default=1)
    indices = torch.zeros(max(counts, default=0), len(plan), together, longest, dtype=torch.int64)
    weight = torch.zeros(indices.shape)
    for row, own in enumerate(plan):
        for place, step in enumerate(own):
            for k, chosen in enumerate(step):
                indices[place, row, k, : len(chosen)] = chosen
                weight[place, row, k, : len(chosen)] = 1
    return indices, weight, [[row for row, count in enumerate(counts) if count > step] for step in range(len(indices))]


def passes(federation: Federation, plan: Sequence[Sequence[Tensor]]) -> Iterator[tuple[slice | Tensor, Batch]]:
    """Give for every step of a plan (each row's sample indices) the rows that take it, and their batches."""
    device = federation.x.device
    indices, weights, steps = planned([[[chosen] for chosen in own] for own in plan])
    for index, weight, active in zip(indices.to(device), weights.to(device), steps, strict=True):
        leading = active[-1] == len(active) - 1
        rows = slice(len(active)) if leading else torch.tensor(active, device=device)
        chosen, shares = index[rows, 0], weight[rows, 0]
        none = shares.new_empty(len(shares), 0)
        yield rows, Batch(federation.normalize(federation.x[chosen]), federation.y[chosen], shares, none)


def _copied(mask: Tree) -> Tree:
    return tree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, mask)


def _tensors(part: Any) -> list[Tensor]:
    return list(part) if isinstance(part, list) else tree.leaves(part)
