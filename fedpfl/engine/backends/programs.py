"""The training steps of a job as one vectorised program; on CUDA its steps can be captured and
replayed as graphs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value

from fedpfl.data.federation import Federation
from fedpfl.engine.backends.planning import plan_training_steps
from fedpfl.engine.training.jobs import TrainJob, TrainResult, phase_structure
from fedpfl.engine.training.sgd import (
    Local,
    TrainableLeaves,
    clients_without_trainable_entries,
    complete_gradients,
    find_trainable_leaves,
    initial_moments,
    masked_moments,
    optimizer_step_,
    streams_with_differing_masks,
    with_epoch_numbers,
)
from fedpfl.engine.training.vectorize import vmap_clients
from fedpfl.ground import tree
from fedpfl.ground.errors import error_text
from fedpfl.ground.tree import Tree
from fedpfl.methods import Batch, Phase
from fedpfl.models import Net

log = logging.getLogger(__name__)

Capture = Callable[[Callable[[], None]], Callable[[], None]]
Tried = Callable[[Callable[[], None]], Callable[[], None] | None]


class ProgramCache:
    """Run jobs, eagerly, or by graphs that are captured once per kind of job, kind of phase and
    width.

    capture: makes something that replays what a call did, from the same memory; None runs every
        step eagerly. Where it fails, steps run eagerly from then on, in the same shapes, so that no
        bit of a result depends on it.
    room: bytes of memory of their own that programs may keep for the next round.
    """

    def __init__(
        self,
        net: Net,
        autocast: Callable[[], AbstractContextManager],
        capture: Capture | None = None,
        room: float = math.inf,
    ):
        self._net, self._autocast, self._capture, self._room = net, autocast, capture, room
        self._kept: list[tuple[Any, Program]] = []
        self._failed = False

    def run(self, job: TrainJob) -> TrainResult:
        """Take all steps of a job, whose rows are sorted, the longest first."""
        if self._capture is None:
            return Program(self._net, self._autocast, job).run(job)
        key = (len(job.rows), *job.kind())
        program = next((kept for known, kept in self._kept if known == key), None)
        if program is None:
            program = Program(self._net, self._autocast, job, self._captured)
        else:
            program.load(job)
        kept = [(key, program), *((k, kept) for k, kept in self._kept if kept is not program)]
        held = accumulate(program.nbytes for _, program in kept)
        self._kept = [
            own for own, total in zip(kept, held, strict=True) if total <= self._room
        ] or kept[:1]
        end = program.run(job)
        client = end.client if job.is_plain else tree.clone(end.client)
        return replace(
            end, params=tree.clone(end.params), client=client, buffers=tree.clone(end.buffers)
        )

    def forget(self) -> bool:
        """Let go of what is kept; tell whether there was something."""
        kept, self._kept = self._kept, []
        return bool(kept)

    def _captured(self, step: Callable[[], None]) -> Callable[[], None] | None:
        """Capture a step; None from the first time on that it fails."""
        if self._capture is None or self._failed:
            return None
        try:
            return self._capture(step)
        except Exception as error:
            self._failed, why = True, error_text(error)
        log.warning(
            "engine.graphs: a step could not be captured, so steps run eagerly from here on (%s)",
            why,
        )
        return None


class Program:
    """The steps of jobs of one kind and number of rows, on memory of its own."""

    def __init__(
        self,
        net: Net,
        autocast: Callable[[], AbstractContextManager],
        job: TrainJob,
        capture: Tried | None = None,
    ):
        self._net, self._autocast, self._capture = net, autocast, capture
        watched = any(phase.after_gradient for phase in job.plan.phases)
        self._own = replace(job, start=tree.clone(job.start), buffers=tree.clone(job.buffers))
        if job.is_plain:
            self._own = replace(self._own, client={}, server={})
        elif capture or watched:
            self._own = replace(self._own, client=tree.clone(job.client))
        self._phases = [phase for phase, _ in with_epoch_numbers(job.plan.phases)]
        self._slots = list(
            range(len(self._phases))
        )  # of the phase whose memory and graphs each phase uses
        if capture:  # graphs read everything from where it was at first
            forms = [phase_structure(phase)._replace(epochs=1) for phase in self._phases]
            self._slots = [forms.index(form) for form in forms]
            copied = partial(
                tree.map, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf
            )
            self._phases = [phase._replace(mask=copied(phase.mask)) for phase in self._phases]
            servers = None if job.servers is None else tree.clone(job.servers)
            self._own = replace(self._own, server=tree.clone(self._own.server), servers=servers)
        leaves = tree.leaves(self._own.start)
        self._moments = initial_moments(job.plan, self._own.start, stacked=True)
        device, rows = leaves[0].device, len(job.rows)
        self._total, self._steps, self._by_sample, self._samples, self._rates = torch.zeros(
            5, rows, device=device
        )
        self._idle = torch.zeros(rows, dtype=torch.bool, device=device)
        self._inputs: dict[int, list[Tensor]] = {}
        self._kept: list[tuple[Tree, Tensor]] = []
        self._keeping: set[int] = (
            set()
        )  # slots of which a graph would overwrite what is kept of the step before
        self._graphs: dict[tuple[int, int, bool], Callable[[], None] | None] = {}

    @property
    def nbytes(self) -> int:
        """Return the size of the program's own trees, in bytes."""
        own = self._own
        moments = dict(enumerate(self._remembered()))
        return sum(
            map(
                tree.nbytes,
                (own.start, moments, own.client, own.buffers, own.server, own.servers or {}),
            )
        )

    def _remembered(self) -> list[Tensor]:
        """Return what the optimiser remembers, of all streams."""
        return [leaf for moments in self._moments.values() for leaf in moments.leaves()]

    def load(self, job: TrainJob) -> None:
        """Copy another job of the same kind into the program's memory."""
        parts = (
            ["start", "buffers"] if self._own.is_plain else ["start", "buffers", "client", "server"]
        )
        for part in parts:
            tree.map(Tensor.copy_, getattr(self._own, part), getattr(job, part))
        if self._own.servers is not None:
            tree.map(Tensor.copy_, self._own.servers, job.servers)
        torch._foreach_zero_(
            [*self._remembered(), self._total, self._steps, self._by_sample, self._samples]
        )

    def run(self, job: TrainJob) -> TrainResult:
        """Take all steps; what is returned is the program's own memory."""
        own, federation, device = self._own, self._own.rows[0].federation, self._total.device
        phases, parks = (
            list(with_epoch_numbers(job.plan.phases)),
            streams_with_differing_masks(job.plan.phases),
        )
        if job.plan.local.has_schedule:
            self._rates.copy_(tree.send(torch.tensor(job.rates), device))
        idles = {
            number: clients_without_trainable_entries(phase, len(job.rows))
            for number, (phase, _) in enumerate(phases)
        }
        told = tree.fetch(  # at once, as a GPU is waited for
            {
                number: torch.stack([flags.all(), flags.any()])
                for number, flags in idles.items()
                if flags is not None
            }
        )
        for number, (given, epochs) in enumerate(phases):
            slot = self._slots[number]
            flags, (all_idle, some_idle) = (
                idles[number],
                told[number].tolist() if number in told else (False, False),
            )
            if all_idle:
                continue
            if flags is not None:
                self._idle.copy_(flags)
            phase = self._phases[slot]
            if self._capture:
                tree.map(
                    lambda own, new: own.copy_(new) if isinstance(own, Tensor) else own,
                    phase.mask,
                    given.mask,
                )
            moves, local = find_trainable_leaves(phase, own.start), job.plan.local.for_phase(phase)
            # Graphs want one shape in every round, also where no client has a full batch.
            least = local.batch_size if self._capture else 0
            inputs, active = plan_training_steps(job, phase, epochs, local.batch_size, least)
            memory = self._inputs.get(slot, [])
            if active and [part.shape[1:] for part in inputs] != [part.shape for part in memory]:
                memory = self._inputs[slot] = [
                    part.new_zeros(part.shape[1:], device=device) for part in inputs
                ]
                self._graphs.clear()
            moments = self._moments[given.stream].of(moves.indices)
            with (
                masked_moments(moments, moves.masks, local)
                if given.stream in parks
                else nullcontext()
            ):
                ended, still = [], len(job.rows)
                for *now, rows in zip(
                    *(tree.send(part, device) for part in inputs), active, strict=True
                ):
                    wide = min(captured_width(rows), len(job.rows)) if self._capture else rows
                    if rows < min(wide, still):
                        ended += self._ended(slice(rows, min(wide, still)))
                    still = rows
                    for own_part, values in zip(memory, now, strict=True):
                        own_part.copy_(values)
                    make = partial(
                        self._eager, federation, slot, phase, moves, local, wide, some_idle
                    )
                    self._step((slot, wide, some_idle), make)
                for part, values in ended:
                    part.copy_(values)
        client = job.client if own.is_plain else own.client  # which a plain job has not read
        loss, by_sample = (
            self._total / self._steps.clamp(min=1),
            self._by_sample / self._samples.clamp(min=1),
        )
        return TrainResult(
            own.start, client, own.buffers, loss, by_sample, self._steps > 0, self._records()
        )

    def _records(self) -> list[Tree]:
        """What was kept, per row, without the padding."""
        found: list[list[Tree]] = [[] for _ in self._own.rows]
        steps, self._kept = self._kept, []
        counts = tree.fetch({step: weight.sum(1) for step, (_, weight) in enumerate(steps)})
        for step, (kept, _) in enumerate(steps):
            for row, count in enumerate(counts[step].long().tolist()):
                found[row].append(
                    tree.map(lambda leaf, row=row, count=count: leaf[row][:count], kept)
                )
        return [tree.map(lambda *leaves: torch.cat(leaves), *own) if own else {} for own in found]

    def _ended(self, rows: slice) -> list[tuple[Tensor, Tensor]]:
        """Return the memory of rows whose steps are over, and copies of it: wider steps run over
        them.
        """
        own = self._own
        parts = [
            *tree.leaves(own.start),
            *tree.leaves(own.buffers),
            *tree.leaves(own.client),
            *self._remembered(),
        ]
        parts += [self._total, self._steps, self._by_sample, self._samples]
        return [(part[rows], part[rows].clone()) for part in parts]

    def _step(self, key: tuple[int, int, bool], make: Callable[[], Callable[[], None]]) -> None:
        """Run eagerly the first time, which warms up; captured the second; replayed from then on."""
        graph = self._graphs.get(key)
        if self._capture is None or key not in self._graphs or key[0] in self._keeping:
            make()()
            self._graphs[key] = None
            return
        graph = graph or self._capture(make())
        if graph is None:
            make()()
            return
        self._graphs[key] = graph
        graph()

    def _eager(
        self,
        federation: Federation,
        slot: int,
        phase: Phase,
        moves: TrainableLeaves,
        local: Local,
        rows: int,
        some_idle: bool,
    ) -> Callable[[], None]:
        own, now, inputs = self._own, slice(rows), self._inputs[slot]
        leaves = [leaf[now] for leaf in tree.leaves(own.start)]  # views of the leading rows
        moments = self._moments[phase.stream].of(moves.indices, now)
        moving = [leaves[i] for i in moves.indices]
        masks = [None if mask is None else mask[now] for mask in moves.masks]
        # A graph would repeat the number it was captured with.
        rates = self._rates[now] if local.has_schedule and "lr" not in phase.sgd else None
        one = self._own_step if phase.step else self._gradient(moves.indices)
        one = partial(one, phase)

        def step() -> None:
            takes = ~self._idle[now] if some_idle else None  # here: a graph reads its round's flags

            def moved(new: Tree, old: Tree) -> Tree:
                return new if takes is None else tree.by_row(takes, new, old)

            numbers, weight, random, views = (part[now] for part in inputs)
            index, place = numbers.unbind(1)
            x, y = (
                federation.apply_augmentation(federation.normalize(federation.x[index]), views),
                federation.y[index],
            )
            batches = [
                Batch(x[:, k], y[:, k], weight[:, k], random[:, k], place[:, k])
                for k in range(index.shape[1])
            ]
            stacked = (
                tree.take(part, now) for part in (own.buffers, own.client, own.servers or {})
            )
            buffers, client, servers = stacked
            if phase.step:
                with torch.no_grad(), self._autocast():
                    new, loss, after = vmap_clients(one, leaves, batches, buffers, client, servers)
                for leaf, value in zip(leaves, new, strict=True):
                    leaf.copy_(moved(value, leaf))
            else:
                with self._autocast():
                    grads, loss, after, seen, kept = vmap_clients(
                        one, moving, leaves, batches[0], buffers, client, servers
                    )
                optimizer_step_(moving, moments, grads, masks, local, stacked=True, rates=rates)
                if phase.after_gradient:
                    tree.put_(own.client, now, moved(seen, client))
                if kept and own.wants_records:
                    self._keeping.add(slot)
                    real = weight[:, 0] if takes is None else weight[:, 0] * takes[:, None]
                    self._kept.append((kept, real.clone()))
            tree.put_(own.buffers, now, moved(after, buffers))
            self._total[now].add_(loss if takes is None else torch.where(takes, loss, 0.0))
            self._steps[now].add_(1 if takes is None else takes)
            if own.plan.by_sample:
                count = weight[:, 0].sum(1) if takes is None else weight[:, 0].sum(1) * takes
                self._by_sample[now].add_(loss * count)
                self._samples[now].add_(count)

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
        params, server = (
            tree.rebuild(self._own.start, leaves),
            servers.get("server", self._own.server),
        )
        params, loss = phase.step(server, client, bound, params, batch)
        return tree.leaves(params), loss, bound.buffers

    def _gradient(self, moving: list[int]) -> Callable[..., Any]:
        """One client's gradient at the leaves `moving`, loss, buffers, state (after the gradient)
        and what is kept.
        """
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
                params = tree.rebuild(
                    own.start, [replaced.get(i, leaf) for i, leaf in enumerate(leaves)]
                )
                bound = net.bind(buffers, training=True, weight=batch.weight)
                loss = objective(server, client, bound, params, batch)
                loss, kept = loss if isinstance(loss, tuple) else (loss, {})
                return loss, (bound.buffers, kept)

            grads, (loss, (after, kept)) = grad_and_value(loss_of, has_aux=True)(values)
            seen = {}
            if phase.after_gradient:
                now, gradient = (
                    tree.rebuild(own.start, part)
                    for part in (leaves, complete_gradients(grads, leaves, moving))
                )
                seen = phase.after_gradient(server, client, now, gradient, batch, loss, kept)
            return grads, loss, after, seen, kept

        return one


class CudaGraphs:
    """Capture into CUDA graphs of one device, which share one pool of memory: they are replayed one
    after another.
    """

    def __init__(self, device: torch.device):
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        """Capture what `step` does; return what does it again."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            step()
        return graph.replay

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Run what is within on the device and stream of the captures, which warms it up for them."""
        before = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            before.wait_stream(self._stream)


def captured_width(rows: int) -> int:
    """Return how many rows a captured step of `rows` takes: 1, 2, 3, 4, 6, 8, 12, 16, ..., so that
    few are captured.
    """
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if 4 * rows <= 3 * power else power
