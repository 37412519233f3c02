"""The batched backend: a cohort is one program.

The answers of a Method, written for one client, are vectorised with `torch.func.vmap`. Clients are ragged: rows are
sorted by their number of steps, and every step runs on just the rows that still have one, a leading slice of the
stacked tensors. Partial batches are padded with samples of weight 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value, vmap

from fedpfl import traffic, tree
from fedpfl.data.federation import Federation
from fedpfl.engine.backend import Engine, Participation, Tally
from fedpfl.engine.keys import Draws
from fedpfl.engine.sgd import (
    Lesson,
    Local,
    Tuning,
    batches,
    complete,
    fine_tuning,
    movement,
    numbered,
    training,
    update_,
)
from fedpfl.engine.state import State
from fedpfl.methods import Batch, Method, Phase
from fedpfl.models import Net
from fedpfl.tree import Tree

CHUNK = 128  # samples per client and forward pass outside training


class Batched:
    """All clients of a slice of the cohort in lockstep."""

    def __init__(self, net: Net, device: torch.device, engine: Engine):
        self._net, self._width = net, engine.width
        self._autocast = partial(torch.autocast, device.type, torch.bfloat16, engine.precision == "bf16")

    def participate(
        self, method: Method, federation: Federation, state: State, cohort: list[int], local: Local, draws: Draws
    ) -> Participation:
        """See Backend."""

        def together(clients: list[int]) -> Participation:
            server, index = state.server, torch.tensor(clients, device=federation.x.device)
            each = partial(_each, count=len(clients))
            mine = dict(tree.take(state.clients, index))
            buffers = state.buffers(index, len(clients))
            if method.draw:
                drawn = [method.draw(draws.server(client), server) for client in clients]
                mine |= tree.to(tree.stack(drawn), federation.x.device)
            if method.vectorises:
                mine = each(lambda m: method.prepare(server, m), mine)
            else:
                mine = tree.stack([method.prepare(server, tree.take(mine, row)) for row in range(len(clients))])
            start = each(lambda m: method.start(server, m), mine)
            down = each(lambda m: traffic.count(method.send(server, m)), mine)
            measures = each(lambda m: method.measure(server, m), mine)
            judged = each(lambda m, s: method.judged(server, m, s), mine, start)
            before = self._judge(method, federation, clients, judged, buffers)
            lesson = _vectorised(lambda m, s: training(method, local, draws, server, m, s), len(clients), mine, start)
            end, mine, buffers, loss = self._train(lesson, federation, clients, start, server, mine, buffers)
            if method.summarize:
                mine = {**mine, "summary": self._summarize(method, federation, clients, end, server, mine, buffers)}
            judged = each(lambda m, e: method.judged(server, m, e), mine, end)
            after = self._judge(method, federation, clients, judged, buffers)

            def finish(m: dict[str, Tree], s: Tree, e: Tree) -> tuple[Tree, dict[str, Tree], traffic.Traffic]:
                upload, kept = method.finish(server, m, s, e)
                return upload, kept, traffic.count(upload)

            upload, kept, up = each(finish, mine, start, end)
            return Participation(upload, kept, buffers, before, after, down, up, measures, loss)

        return self._slices(together, cohort, federation.train_sizes)

    def evaluate(
        self,
        method: Method,
        federation: Federation,
        state: State,
        clients: list[int],
        tuning: Tuning | None = None,
    ) -> Tally:
        """See Backend."""

        def together(clients: list[int]) -> Tally:
            count, index = len(clients), torch.tensor(clients, device=federation.x.device)
            mine, buffers = tree.take(state.clients, index), state.buffers(index, count)
            model = _each(lambda m: method.personal(state.server, m), mine, count=count)
            if tuning:
                lesson = _vectorised(lambda p: fine_tuning(method, tuning, p, self._net.parts), count, model)
                model, _, buffers, _ = self._train(lesson, federation, clients, model, state.server, mine, buffers)
            return self._judge(method, federation, clients, model, buffers)

        return self._slices(together, clients, federation.train_sizes if tuning else federation.test_sizes)

    def _slices(self, job: Callable[[list[int]], Any], clients: list[int], sizes: Tensor) -> Any:
        """Run `job` on slices of at most `width` clients, largest first; its rows come in the order of `clients`."""
        order = sorted(range(len(clients)), key=lambda i: (-int(sizes[clients[i]]), clients[i]))
        width = self._width or len(clients)
        parts = [job([clients[i] for i in order[at : at + width]]) for at in range(0, len(order), width)]
        joined = tree.map(lambda *leaves: torch.cat(leaves), *parts) if len(parts) > 1 else parts[0]
        back = torch.tensor(order).argsort()
        return tree.map(lambda leaf: leaf[back.to(leaf.device)], joined)

    def _judge(
        self, method: Method, federation: Federation, clients: list[int], params: Tree, buffers: dict[str, Tree]
    ) -> Tally:
        device = federation.x.device
        correct = torch.zeros(len(clients), dtype=torch.int64, device=device)
        loss = torch.zeros(len(clients), device=device)

        def one(p: Tree, b: dict[str, Tree], batch: Batch) -> tuple[Tensor, Tensor]:
            logits = method.predict(self._net.bind(b), p, batch.x)
            assert batch.weight is not None
            losses = F.cross_entropy(logits, batch.y, reduction="none") * batch.weight
            return ((logits.argmax(1) == batch.y) & (batch.weight > 0)).sum(), losses.sum()

        with torch.no_grad(), self._autocast():
            for rows, batch in _lockstep(federation, [federation.test[client].split(CHUNK) for client in clients]):
                hits, losses = _each(one, tree.take(params, rows), tree.take(buffers, rows), batch)
                correct[rows] += hits
                loss[rows] += losses
        return Tally(correct, loss, federation.test_sizes[clients].to(device))

    def _train(
        self,
        lesson: Lesson,
        federation: Federation,
        clients: list[int],
        start: Tree,
        server: Tree,
        mine: dict[str, Tree],
        buffers: dict[str, Tree],
    ) -> tuple[Tree, dict[str, Tree], dict[str, Tree], Tensor]:
        """Trained trees, `mine` and buffers after the lesson, and the mean loss of each client's steps."""
        device, local, draws = federation.x.device, lesson.local, lesson.draws
        trained, buffers = tree.clone(start), tree.clone(buffers)
        mine = tree.clone(mine) if lesson.observe else mine
        leaves = tree.leaves(trained)
        velocity = [torch.zeros_like(leaf) for leaf in leaves]
        total, steps = torch.zeros(2, len(clients), device=device)
        for phase, epochs in numbered(lesson.phases):
            moves = movement(phase, trained)
            gradient = self._gradient(lesson, phase, moves.moving, trained, server)
            plan = [
                [own[rows] for rows in batches(draws, client, phase.stream, epochs, len(own), local.batch_size)]
                for client, own in ((client, federation.train[client]) for client in clients)
            ]
            for rows, batch in _lockstep(federation, plan):
                now = [leaf[rows] for leaf in leaves]  # views: the rows still training lead
                context = tree.take(buffers, rows), tree.take(mine, rows)
                with self._autocast():
                    grads, loss, after, seen = _each(gradient, [now[i] for i in moves.moving], now, *context, batch)
                masks = [None if mask is None else mask[rows] for mask in moves.masks]
                update_([now[i] for i in moves.moving], [velocity[i][rows] for i in moves.moving], grads, masks, local)
                tree.put_(buffers, rows, after)
                if lesson.observe:
                    tree.put_(mine, rows, seen)
                total[rows] += loss
                steps[rows] += 1
        return trained, mine, buffers, total / steps.clamp(min=1)

    def _gradient(
        self, lesson: Lesson, phase: Phase, moving: list[int], trained: Tree, server: Tree
    ) -> Callable[..., tuple[list[Tensor], Tensor, dict[str, Tree], dict[str, Tree]]]:
        """One client's gradient at the leaves `moving`, its loss, buffers and (if observed) `mine` afterwards."""
        objective, net = phase.loss or lesson.objective, self._net

        def one(
            values: list[Tensor], leaves: list[Tensor], buffers: dict[str, Tree], mine: dict[str, Tree], batch: Batch
        ) -> tuple[list[Tensor], Tensor, dict[str, Tree], dict[str, Tree]]:
            def loss_of(values: list[Tensor]) -> tuple[Tensor, dict[str, Tree]]:
                replaced = dict(zip(moving, values, strict=True))
                params = tree.rebuild(trained, [replaced.get(i, leaf) for i, leaf in enumerate(leaves)])
                bound = net.bind(buffers, training=True, weight=batch.weight)
                return objective(bound, params, batch, server, mine), bound.buffers

            grads, (loss, after) = grad_and_value(loss_of, has_aux=True)(values)
            seen = {}
            if lesson.observe:
                everything = tree.rebuild(trained, complete(grads, leaves, moving))
                seen = lesson.observe(tree.rebuild(trained, leaves), everything, loss, batch, server, mine)
            return grads, loss, after, seen

        return one

    def _summarize(
        self,
        method: Method,
        federation: Federation,
        clients: list[int],
        end: Tree,
        server: Tree,
        mine: dict[str, Tree],
        buffers: dict[str, Tree],
    ) -> Tree:
        summarize, total = method.summarize, None
        assert summarize is not None

        def one(e: Tree, b: dict[str, Tree], m: dict[str, Tree], batch: Batch) -> Tree:
            return summarize(self._net.bind(b), e, batch, server, m)

        for rows, batch in _lockstep(federation, [federation.train[client].split(CHUNK) for client in clients]):
            part = _each(one, *(tree.take(stacked, rows) for stacked in (end, buffers, mine)), batch)
            if total is None:
                total = tree.map(lambda leaf: leaf.new_zeros(len(clients), *leaf.shape[1:]), part)
            tree.put_(total, rows, tree.map(torch.add, tree.take(total, rows), part))
        return total


def _lockstep(federation: Federation, plan: Sequence[Sequence[Tensor]]) -> Iterator[tuple[slice | Tensor, Batch]]:
    """For every step the rows (clients) that still have a batch, and their stacked batches, padded with weight 0.

    plan: sample indices of each client's batches. Indices and weights go to the device at once, before the first step.
    The rows are a leading slice where clients are sorted by their number of batches, longest first.
    """
    device = federation.x.device
    counts = [len(batches) for batches in plan]
    longest = max((len(batch) for batches in plan for batch in batches), default=0)
    indices = torch.zeros(max(counts, default=0), len(plan), longest, dtype=torch.int64)
    weight = torch.zeros(indices.shape)
    for row, own in enumerate(plan):
        for step, batch in enumerate(own):
            indices[step, row, : len(batch)] = batch
            weight[step, row, : len(batch)] = 1
    indices, weight = indices.to(device), weight.to(device)
    for step in range(len(indices)):
        active = [row for row, count in enumerate(counts) if count > step]
        leading = active[-1] == len(active) - 1
        rows = slice(len(active)) if leading else torch.tensor(active, device=device)
        chosen = indices[step, rows]
        yield rows, Batch(federation.normalize(federation.x[chosen]), federation.y[chosen], weight[step, rows])


def _each(f: Callable[..., Any], *stacked: Any, count: int | None = None) -> Any:
    """Apply one-client `f` to every row of the stacked trees."""
    rows = count if count is not None else next(leaf.shape[0] for part in stacked for leaf in _tensors(part))
    # The row numbers make sure that something is mapped over even where a method keeps nothing per client.
    return vmap(lambda _, *parts: f(*parts), randomness="different")(torch.arange(rows), *stacked)


def _tensors(part: Any) -> list[Tensor]:
    return list(part) if isinstance(part, list) else tree.leaves(part)


def _vectorised(make: Callable[..., Lesson], count: int, *stacked: Any) -> Lesson:
    """The lesson of many clients at once: masks, which depend on a client, are stacked; the rest is common."""
    common: list[Lesson] = []

    def masks(*parts: Any) -> list[Tensor]:
        lesson = make(*parts)
        common.append(lesson)
        return [leaf for phase in lesson.phases for leaf in tree.leaves(phase.mask) if isinstance(leaf, Tensor)]

    values = iter(_each(masks, *stacked, count=count))
    lesson = common[0]
    phases = [
        phase._replace(mask=tree.map(lambda leaf: next(values) if isinstance(leaf, Tensor) else leaf, phase.mask))
        for phase in lesson.phases
    ]
    return replace(lesson, phases=phases)
