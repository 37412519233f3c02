"""The training steps of a study as one vectorised program; on CUDA its steps can be captured and replayed as graphs."""

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
from fedpfl.engine.joint import End, Study
from fedpfl.engine.sgd import Movement, complete, movement, numbered, parked, steps, update_
from fedpfl.methods import Batch, Phase
from fedpfl.models import Net
from fedpfl.tree import Tree

KEPT = 4  # programs whose memory and graphs are kept for the next round


class Programs:
    """Runs studies, eagerly, or by graphs that are captured once per kind of study, phase and number of rows.

    capture: makes something that replays what a call did, from the same memory; None runs every step eagerly.
    """

    def __init__(
        self,
        net: Net,
        autocast: Callable[[], AbstractContextManager],
        capture: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
    ):
        self._net, self._autocast, self._capture = net, autocast, capture
        self._kept: list[tuple[Any, Program]] = []

    def run(self, study: Study) -> End:
        """Take all steps of a study, whose rows are sorted, the longest first."""
        if self._capture is None or study.lesson.keeps:  # a graph would overwrite what is kept
            return Program(self._net, self._autocast, study).run(study)
        key = (len(study.rows), *study.kind())
        program = next((kept for known, kept in self._kept if known == key), None)
        if program is None:
            program = Program(self._net, self._autocast, study, self._capture)
        else:
            program.load(study)
        self._kept = [(key, program), *((k, kept) for k, kept in self._kept if kept is not program)][:KEPT]
        end = program.run(study)
        mine = end.mine if study.plain else tree.clone(end.mine)
        return End(tree.clone(end.trained), mine, tree.clone(end.buffers), end.loss, end.kept)


class Program:
    """The steps of studies of one kind and number of rows, on memory of its own."""

    def __init__(
        self,
        net: Net,
        autocast: Callable[[], AbstractContextManager],
        study: Study,
        capture: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
    ):
        self._net, self._autocast, self._capture = net, autocast, capture
        observed = study.lesson.observe is not None
        self._own = replace(study, start=tree.clone(study.start), buffers=tree.clone(study.buffers))
        if study.plain:
            self._own = replace(self._own, mine={}, server={})
        elif capture or observed:
            self._own = replace(self._own, mine=tree.clone(study.mine))
        if capture:  # graphs read everything from where it was at first
            lesson = replace(study.lesson, phases=[_copied(phase) for phase in study.lesson.phases])
            server, servers = tree.clone(self._own.server), tree.clone(study.servers)
            self._own = replace(self._own, lesson=lesson, server=server, servers=servers)
        leaves = tree.leaves(self._own.start)
        self._velocity = [torch.zeros_like(leaf) for leaf in leaves]
        self._total, self._steps = torch.zeros(2, len(study.rows), device=leaves[0].device)
        self._index = self._weight = self._random = self._views = torch.empty(0)
        self._kept: list[tuple[Tree, Tensor]] = []
        self._graphs: dict[tuple[int, int], Callable[[], None] | None] = {}

    def load(self, study: Study) -> None:
        """Copy another study of the same kind into the program's memory."""
        parts = (
            ["start", "buffers", "servers"] if self._own.plain else ["start", "buffers", "servers", "mine", "server"]
        )
        for part in parts:
            tree.map(Tensor.copy_, getattr(self._own, part), getattr(study, part))
        for mine, phase in zip(self._own.lesson.phases, study.lesson.phases, strict=True):
            tree.map(lambda own, new: own.copy_(new) if isinstance(own, Tensor) else own, mine.mask, phase.mask)
            if mine.skip is not None and phase.skip is not None:
                mine.skip.copy_(phase.skip)
        torch._foreach_zero_([*self._velocity, self._total, self._steps])

    def run(self, study: Study) -> End:
        """All steps; what is returned is the program's own memory."""
        own, local = self._own, study.lesson.local
        federation = own.rows[0].federation
        owned = list(zip(study.rows, study.draws, strict=True))
        for number, (phase, epochs) in enumerate(numbered(own.lesson.phases)):
            if phase.skip is not None and bool(phase.skip.all()):
                continue
            moves = movement(phase, own.start)
            taken = [
                list(steps(own.lesson, draws, row.client, phase.stream, epochs, row.federation)) for row, draws in owned
            ]
            plan = [
                [[row.federation.train[row.client][chosen] for chosen in step.minibatches] for step in each_step]
                for each_step, (row, _) in zip(taken, owned, strict=True)
            ]
            device = federation.x.device
            # Graphs want one shape in every round, also where no client has a full batch.
            indices, weights, counts = planned(plan, device, local.batch_size if self._capture else 0)
            randoms = torch.zeros(len(counts), len(plan), own.lesson.randoms)
            for row, each_step in enumerate(taken):
                if own.lesson.randoms and each_step:
                    randoms[: len(each_step), row] = torch.stack([step.random for step in each_step])
            views = torch.zeros(*indices.shape, federation.views)
            for row, each_step in enumerate(taken if federation.views else ()):
                for place, step in enumerate(each_step):
                    for k, seen in enumerate(step.views):
                        views[place, row, k, : len(seen)] = seen
            if indices.shape[1:] != self._index.shape:
                self._index, self._weight = indices.new_zeros(indices.shape[1:]), weights.new_zeros(weights.shape[1:])
                self._random = randoms.new_zeros(randoms.shape[1:], device=device)
                self._views = views.new_zeros(views.shape[1:], device=device)
                self._graphs.clear()
            each_of = indices, weights, randoms.to(device), views.to(device), counts
            velocity = [self._velocity[i] for i in moves.moving]
            with parked(velocity, _masks(phase, moves, velocity), local.during(phase)):
                for index, weight, random, view, active in zip(*each_of, strict=True):
                    rows = len(active)
                    assert active == list(range(rows)), "the rows of a study are sorted by their steps"
                    self._index.copy_(index)
                    self._weight.copy_(weight)
                    self._random.copy_(random)
                    self._views.copy_(view)
                    self._step((number, rows), partial(self._eager, federation, phase, moves, rows))
        mine = study.mine if own.plain else own.mine  # which a plain study has not read
        return End(own.start, mine, own.buffers, self._total / self._steps.clamp(min=1), self._records())

    def _records(self) -> list[Tree] | None:
        """What was kept, per row, without the padding."""
        if not self._own.lesson.keeps:
            return None
        found: list[list[Tree]] = [[] for _ in self._own.rows]
        for kept, weight in self._kept:
            for row, real in enumerate(weight > 0):
                found[row].append(tree.map(lambda leaf, row=row, real=real: leaf[row][real], kept))
        return [tree.map(lambda *leaves: torch.cat(leaves), *own) if own else {} for own in found]

    def _step(self, key: tuple[int, int], make: Callable[[], Callable[[], None]]) -> None:
        """Eagerly the first time, which warms up; captured the second; replayed from then on."""
        graph = self._graphs.get(key)
        if self._capture is None or key not in self._graphs:
            make()()
            self._graphs[key] = None
            return
        if graph is None:
            graph = self._graphs[key] = self._capture(make())
        graph()

    def _eager(self, federation: Federation, phase: Phase, moves: Movement, rows: int) -> Callable[[], None]:
        own, now = self._own, slice(rows)
        leaves = [leaf[now] for leaf in tree.leaves(own.start)]  # views of the leading rows
        velocity = [self._velocity[i][now] for i in moves.moving]
        moving = [leaves[i] for i in moves.moving]
        gradient, local = self._gradient(phase, moves.moving), own.lesson.local.during(phase)

        def step() -> None:
            takes = None if phase.skip is None else ~phase.skip[now]  # here: a graph reads its round's flags

            def moved(new: Tree, old: Tree) -> Tree:
                return new if takes is None else tree.by_row(takes, new, old)

            index, weight = self._index[now], self._weight[now]
            x, y = federation.seen(federation.normalize(federation.x[index]), self._views[now]), federation.y[index]
            batches = [Batch(x[:, k], y[:, k], weight[:, k], self._random[now]) for k in range(index.shape[1])]
            buffers, mine, servers = (tree.take(stacked, now) for stacked in (own.buffers, own.mine, own.servers))
            if own.lesson.step:
                with torch.no_grad(), self._autocast():
                    new, loss, after = each(self._whole_step, leaves, batches, buffers, mine, servers)
                for leaf, value in zip(leaves, new, strict=True):
                    leaf.copy_(moved(value, leaf))
            else:
                with self._autocast():
                    grads, loss, after, seen, kept = each(gradient, moving, leaves, batches[0], buffers, mine, servers)
                update_(moving, velocity, grads, _masks(phase, moves, moving), local, stacked=True)
                if own.lesson.observe:
                    tree.put_(own.mine, now, moved(seen, mine))
                if own.lesson.keeps:
                    real = weight[:, 0] if takes is None else weight[:, 0] * takes[:, None]
                    self._kept.append((kept, real.clone()))
            tree.put_(own.buffers, now, moved(after, buffers))
            self._total[now] += moved(loss, torch.zeros_like(loss))
            self._steps[now] += 1 if takes is None else takes

        return step

    def _whole_step(
        self,
        leaves: list[Tensor],
        batches: list[Batch],
        buffers: dict[str, Tree],
        mine: dict[str, Tree],
        servers: dict[str, Tree],
    ) -> tuple[list[Tensor], Tensor, dict[str, Tree]]:
        """One client's `Method.step`: the new leaves, the loss and the buffers."""
        own = self._own
        assert own.lesson.step is not None
        bound = self._net.bind(buffers, training=True, weight=batches[0].weight)
        batch = batches[0] if len(batches) == 1 else tuple(batches)
        params, loss = own.lesson.step(
            bound, tree.rebuild(own.start, leaves), batch, servers.get("server", own.server), mine
        )
        return tree.leaves(params), loss, bound.buffers

    def _gradient(
        self, phase: Phase, moving: list[int]
    ) -> Callable[..., tuple[list[Tensor], Tensor, dict[str, Tree], dict[str, Tree], Tree]]:
        """One client's gradient at the leaves `moving`, loss, buffers and (if observed) `mine` after, what is kept."""
        own, net = self._own, self._net
        objective, observe = phase.loss or own.lesson.objective, own.lesson.observe

        def one(
            values: list[Tensor],
            leaves: list[Tensor],
            batch: Batch,
            buffers: dict[str, Tree],
            mine: dict[str, Tree],
            servers: dict[str, Tree],
        ) -> tuple[list[Tensor], Tensor, dict[str, Tree], dict[str, Tree], Tree]:
            server = servers.get("server", own.server)

            def loss_of(values: list[Tensor]) -> tuple[Tensor, tuple[dict[str, Tree], Tree]]:
                replaced = dict(zip(moving, values, strict=True))
                params = tree.rebuild(own.start, [replaced.get(i, leaf) for i, leaf in enumerate(leaves)])
                bound = net.bind(buffers, training=True, weight=batch.weight)
                loss = objective(bound, params, batch, server, mine)
                loss, kept = loss if own.lesson.keeps else (loss, {})
                return loss, (bound.buffers, kept)

            grads, (loss, (after, kept)) = grad_and_value(loss_of, has_aux=True)(values)
            seen = {}
            if observe:
                everything = tree.rebuild(own.start, complete(grads, leaves, moving))
                seen = observe(tree.rebuild(own.start, leaves), everything, loss, batch, server, mine)
            return grads, loss, after, seen, kept

        return one


def cuda_graph() -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Captures into CUDA graphs, which share one pool of memory: they are replayed one after another."""
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


def planned(
    plan: Sequence[Sequence[Sequence[Tensor]]], device: torch.device, batch: int = 0
) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Sample indices and weights of every step, `[steps, rows, minibatches, batch]` on `device`, and the rows that take
    each step.

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
    active = [[row for row, count in enumerate(counts) if count > step] for step in range(len(indices))]
    return indices.to(device), weight.to(device), active


def passes(federation: Federation, plan: Sequence[Sequence[Tensor]]) -> Iterator[tuple[slice | Tensor, Batch]]:
    """For every step of a plan (each row's sample indices) the rows that take it, and their batches."""
    device = federation.x.device
    for index, weight, active in zip(*planned([[[chosen] for chosen in own] for own in plan], device), strict=True):
        leading = active[-1] == len(active) - 1
        rows = slice(len(active)) if leading else torch.tensor(active, device=device)
        chosen, shares = index[rows, 0], weight[rows, 0]
        none = shares.new_empty(len(shares), 0)
        yield rows, Batch(federation.normalize(federation.x[chosen]), federation.y[chosen], shares, none)


def _copied(phase: Phase) -> Phase:
    mask = tree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, phase.mask)
    return phase._replace(mask=mask, skip=None if phase.skip is None else phase.skip.clone())


def _masks(phase: Phase, moves: Movement, stacked: list[Tensor]) -> list[Tensor | None]:
    """Which entries of `stacked`, leading rows, move: by the phase's mask, in rows that do not skip it."""
    rows = len(stacked[0])
    masks = [None if mask is None else mask[:rows] for mask in moves.masks]
    if phase.skip is None:
        return masks
    takes = [~phase.skip[:rows].view(-1, *[1] * (leaf.dim() - 1)) for leaf in stacked]
    return [own if mask is None else own & mask for own, mask in zip(takes, masks, strict=True)]


def _tensors(part: Any) -> list[Tensor]:
    return list(part) if isinstance(part, list) else tree.leaves(part)
