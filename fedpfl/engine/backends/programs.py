"""The training steps of a job as one vectorised program."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value

from fedpfl.engine.backends.graphs import AttemptedCapture, Capture, CaptureAttempts, captured_width
from fedpfl.engine.backends.planning import plan_training_steps
from fedpfl.engine.training.jobs import TrainJob, TrainResult, phase_structure
from fedpfl.engine.training.local import Local
from fedpfl.engine.training.protected import explaining_failure, sum_clipped_gradients
from fedpfl.engine.training.sgd import (
    complete_gradients,
    initial_moments,
    masked_moments,
    optimizer_step_,
    per_client_shape,
)
from fedpfl.engine.training.train_plan import (
    TrainableLeaves,
    clients_without_trainable_entries,
    find_trainable_leaves,
    streams_with_differing_masks,
    with_epoch_numbers,
)
from fedpfl.engine.training.vectorize import vmap_clients
from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods import Batch, Phase
from fedpfl.models import Net

_ClientStates = tuple[dict[str, Tree], dict[str, Tree], dict[str, Tree]]
"""Buffers, client states, and servers where they differ, stacked."""

_Gradients = tuple[list[Tensor], Tensor, dict[str, Tree], dict[str, Tree], Tree]
"""Gradients, losses, new buffers, client states, and records of losses."""


class ProgramCache:
    """Run jobs eagerly, or by graphs that are captured once.

    A graph is captured once per kind of job, kind of phase and width.

    Args:
        net: The network.
        autocast: Makes the context of the engine's precision.
        capture: Records a call, and returns a function that replays it in the same memory; None
            runs every step eagerly. Where it fails, steps run eagerly from then on, in the same shapes, so
            that no bit of a result depends on it.
        room: Bytes of memory of their own that programs may keep for the next round.
    """

    def __init__(
        self,
        net: Net,
        autocast: Callable[[], AbstractContextManager],
        capture: Capture | None = None,
        room: float = math.inf,
    ):
        self._net = net
        self._autocast = autocast
        # Programs hold this instead of the cache: in a cycle they would outlive it, and with them
        # the memory of their graphs, until garbage is collected.
        self._capture = capture and CaptureAttempts(capture)
        self._room = room
        self._programs: list[tuple[Any, Program]] = []  # with their keys, the latest first

    def run(self, job: TrainJob) -> TrainResult:
        """Take all steps of a job; its rows are sorted, the longest first."""
        if self._capture is None:
            return Program(self._net, self._autocast, job).run(job)

        # ---- Step 1: the program of this kind, perhaps of an earlier round
        key = (len(job.rows), *job.kind())
        program = next((cached for other, cached in self._programs if other == key), None)
        if program is None:
            program = Program(self._net, self._autocast, job, self._capture)
        else:
            program.load(job)

        # ---- Step 2: the latest programs stay, as far as there is room for them.
        programs = [(key, program)]
        programs += [entry for entry in self._programs if entry[1] is not program]
        totals = accumulate(cached.nbytes for _, cached in programs)
        fitting = [
            entry for entry, total in zip(programs, totals, strict=True) if total <= self._room
        ]
        self._programs = fitting or programs[:1]

        # ---- Step 3: the next job overwrites the program's memory, so results are copies.
        result = program.run(job)
        return replace(
            result,
            params=tree.clone(result.params),
            client=result.client if job.is_plain else tree.clone(result.client),
            buffers=tree.clone(result.buffers),
        )

    def forget(self) -> bool:
        """Drop all programs; return whether there were any."""
        had_programs = bool(self._programs)
        self._programs = []
        return had_programs


@dataclass(frozen=True)
class _StepKind:
    """Describe the steps of a phase on the same rows.

    Attributes:
        slot: Position of the phase that owns the inputs and graphs.
        phase: The phase, with masks in the program's memory.
        trainable: The leaves that it trains.
        local: The optimizer's settings in it.
        rows: How many leading rows take the step.
        has_idle_rows: Whether some rows have no trainable entry in the phase.
    """

    slot: int
    phase: Phase
    trainable: TrainableLeaves
    local: Local
    rows: int
    has_idle_rows: bool


class Program:
    """Take the steps of jobs of one kind and width, in private memory."""

    def __init__(
        self,
        net: Net,
        autocast: Callable[[], AbstractContextManager],
        job: TrainJob,
        capture: AttemptedCapture | None = None,
    ):
        # ---- Step 1: the job in private memory, and its phases.
        self._net = net
        self._autocast = autocast
        self._capture = capture
        self._job = _with_own_memory(job, is_captured=capture is not None)
        self._phases = [phase for phase, _ in with_epoch_numbers(job.plan.phases)]
        self._slots = list(range(len(self._phases)))  # the phase that owns each phase's graphs
        if capture:
            structures = [phase_structure(phase)._replace(epochs=1) for phase in self._phases]
            self._slots = [structures.index(structure) for structure in structures]
            self._phases = [
                phase._replace(mask=tree.map(_clone_tensor, phase.mask)) for phase in self._phases
            ]

        # ---- Step 2: sums and inputs, in memory that stays in place.
        self._moments = initial_moments(job.plan, self._job.start, stacked=True)
        device = tree.leaves(self._job.start)[0].device
        row_count = len(job.rows)
        sums = torch.zeros(5, row_count, device=device)
        self._loss_sum, self._step_count, self._sample_loss_sum, self._sample_count = sums[:4]
        self._rates = sums[4]
        self._is_idle = torch.zeros(row_count, dtype=torch.bool, device=device)
        self._inputs: dict[int, list[Tensor]] = {}  # of a step, by slot
        # Where samples are protected: the noise on sums of gradients, by leaf, and how many
        # samples a minibatch has on average.
        self._noise: list[Tensor] = []
        if job.draws[0].protection:
            self._noise = [torch.zeros_like(leaf) for leaf in tree.leaves(self._job.start)]
        self._expected = torch.ones(row_count, device=device)

        # ---- Step 3: what steps leave, and their graphs.
        self._step_records: list[tuple[Tree, Tensor]] = []  # with the weights of their samples
        # A graph would overwrite the records of the step before, so these slots have none.
        self._slots_with_records: set[int] = set()
        self._graphs: dict[tuple[int, int, bool], Callable[[], None] | None] = {}

    @property
    def nbytes(self) -> int:
        """Return the size of the program's own trees, in bytes."""
        job = self._job
        trees = [
            job.start,
            self._moments,
            job.client,
            job.buffers,
            job.server,
            job.servers or {},
        ]
        return sum(map(tree.nbytes, trees))

    def _sums(self) -> list[Tensor]:
        """Return the sums over steps, by row."""
        return [self._loss_sum, self._step_count, self._sample_loss_sum, self._sample_count]

    def load(self, job: TrainJob) -> None:
        """Copy another job of the same kind into the program's memory."""
        parts = ["start", "buffers"]
        if not self._job.is_plain:
            parts += ["client", "server"]
        for part in parts:
            tree.map(
                Tensor.copy_,
                getattr(self._job, part),
                getattr(job, part),
            )
        if self._job.servers is not None:
            tree.map(Tensor.copy_, self._job.servers, job.servers)
        # A new job begins without the momentum of the one before.
        torch._foreach_zero_([*tree.leaves(self._moments), *self._sums()])

    def run(self, job: TrainJob) -> TrainResult:
        """Take all steps; the result lies in the program's memory."""
        # ---- Step 1: the round's learning rates, and rows for which a phase has nothing to train
        if job.plan.local.has_schedule:
            self._rates.copy_(tree.send(torch.tensor(job.rates), self._rates.device))
        phases = list(with_epoch_numbers(job.plan.phases))
        idle_rows = _find_idle_rows([phase for phase, _ in phases], len(job.rows))
        # In one transfer, as it waits for the GPU.
        idle_summaries = tree.fetch(
            {number: torch.stack([flags.all(), flags.any()]) for number, flags in idle_rows.items()}
        )

        # ---- Step 2: the phases
        masked_streams = streams_with_differing_masks(job.plan.phases)
        for number, (phase, epochs) in enumerate(phases):
            has_idle_rows = False
            if number in idle_rows:
                is_all_idle, has_idle_rows = idle_summaries[number].tolist()
                if is_all_idle:
                    continue
                self._is_idle.copy_(idle_rows[number])
            slot = self._slots[number]
            if self._capture:
                tree.map(_copy_tensor_, self._phases[slot].mask, phase.mask)
            kind = _StepKind(
                slot=slot,
                phase=self._phases[slot],
                trainable=find_trainable_leaves(self._phases[slot], self._job.start),
                local=job.plan.local.for_phase(self._phases[slot]),
                rows=len(job.rows),
                has_idle_rows=has_idle_rows,
            )
            moments = self._moments[phase.stream].of(kind.trainable.indices)
            masking: AbstractContextManager = nullcontext()
            if phase.stream in masked_streams:
                masking = masked_moments(moments, kind.trainable.masks, kind.local)
            with masking:
                self._train_phase(job, kind, epochs)

        # ---- Step 3: mean losses
        return TrainResult(
            params=self._job.start,
            client=job.client if job.is_plain else self._job.client,
            buffers=self._job.buffers,
            loss=self._loss_sum / self._step_count.clamp(min=1),
            sample_loss=self._sample_loss_sum / self._sample_count.clamp(min=1),
            has_stepped=self._step_count > 0,
            records=self._take_records(),
        )

    def _train_phase(self, job: TrainJob, kind: _StepKind, epochs: range) -> None:
        """Take the steps of a phase, each of the leading rows that still have one."""
        # ---- Step 1: all steps are planned, and the memory that a step reads is made.
        device = self._loss_sum.device
        batch_size = kind.local.batch_size
        # Graphs want one shape in every round, also where no client has a full batch.
        least_batch = batch_size if self._capture else 0
        if self._noise:
            sizes = [len(row.federation.train[row.client]) for row in job.rows]
            expected = torch.tensor(sizes).clamp(max=batch_size).float()
            self._expected.copy_(tree.send(expected, device))
        planned, active_rows = plan_training_steps(job, kind.phase, epochs, batch_size, least_batch)
        inputs = self._inputs.get(kind.slot, [])
        has_shapes = [part.shape[1:] for part in planned] == [part.shape for part in inputs]
        if active_rows and not has_shapes:
            inputs = [part.new_zeros(part.shape[1:], device=device) for part in planned]
            self._inputs[kind.slot] = inputs
            # Graphs of other slots read memory of their own, which stays.
            self._graphs = {
                key: graph for key, graph in self._graphs.items() if key[0] != kind.slot
            }

        # ---- Step 2: the steps. A captured one may be wider than the rows that have a step left;
        # it runs over finished rows too, and their memory is put back afterwards.
        finished: list[tuple[Tensor, Tensor]] = []
        rows_before = len(job.rows)
        steps = zip(*[tree.send(part, device) for part in planned], strict=True)
        for number, (values, rows) in enumerate(zip(steps, active_rows, strict=True)):
            if self._noise:
                self._draw_noise(
                    job,
                    kind,
                    (f"{kind.phase.stream} {epochs.start}", number),
                    rows,
                )
            width = rows
            if self._capture:
                width = min(captured_width(rows), len(job.rows))
            end = min(width, rows_before)
            if rows < end:
                finished += self._save_rows(slice(rows, end))
            rows_before = rows
            for part, value in zip(inputs, values, strict=True):
                part.copy_(value)
            self._run_step(replace(kind, rows=width))
        for memory, saved in finished:
            memory.copy_(saved)

    def _draw_noise(self, job: TrainJob, kind: _StepKind, step: tuple[str, int], rows: int) -> None:
        """Draw the noise of a step for the leading rows, as the loop backend does."""
        for row in range(rows):
            draws = job.draws[row]
            assert draws.protection
            # By the loop backend's key, so that both backends draw the same noise.
            key = draws.purpose, draws.round, *step
            for i in kind.trainable.indices:
                noise = self._noise[i][row]
                noise.copy_(draws.protection.draw_noise(noise, job.rows[row].client, (*key, i)))

    def _take_records(self) -> list[Tree]:
        """Return the records of losses, per row, without the padding."""
        steps = self._step_records
        self._step_records = []
        counts = tree.fetch({step: weight.sum(1) for step, (_, weight) in enumerate(steps)})
        records_by_row: list[list[Tree]] = [[] for _ in self._job.rows]
        for step, (record, _) in enumerate(steps):
            for row, count in enumerate(counts[step].long().tolist()):
                row_record = tree.take(record, row)
                samples = slice(count)
                records_by_row[row].append(tree.take(row_record, samples))
        return [tree.concatenate_trees(records) if records else {} for records in records_by_row]

    def _save_rows(self, rows: slice) -> list[tuple[Tensor, Tensor]]:
        """Return the memory of rows without a step left, and copies of it."""
        job = self._job
        parts = [
            *tree.leaves(job.start),
            *tree.leaves(job.buffers),
            *tree.leaves(job.client),
            *tree.leaves(self._moments),
            *self._sums(),
        ]
        return [(part[rows], part[rows].clone()) for part in parts]

    def _run_step(self, kind: _StepKind) -> None:
        """Run a step eagerly once, which warms up, then capture it, then replay it."""
        key = (kind.slot, kind.rows, kind.has_idle_rows)
        is_first = key not in self._graphs
        if self._capture is None or is_first or kind.slot in self._slots_with_records:
            self._make_step(kind)()
            self._graphs[key] = None
            return
        graph = self._graphs[key] or self._capture(self._make_step(kind))
        if graph is None:
            self._make_step(kind)()
            return
        self._graphs[key] = graph
        graph()

    def _make_step(self, kind: _StepKind) -> Callable[[], None]:
        """Make a function that takes one step in the program's memory."""
        job = self._job
        phase = kind.phase
        rows = slice(kind.rows)
        leaves = [leaf[rows] for leaf in tree.leaves(job.start)]  # views of the leading rows
        trainable_leaves = [leaves[i] for i in kind.trainable.indices]
        moments = self._moments[phase.stream].of(kind.trainable.indices, rows)
        masks = [None if mask is None else mask[rows] for mask in kind.trainable.masks]
        rates: Tensor | None = None
        if kind.local.has_schedule and "lr" not in phase.sgd:
            # A graph would repeat the number that it was captured with.
            rates = self._rates[rows]

        def step() -> None:
            # ---- The step, captured into graphs: nothing in it may make the host wait.
            # In here, as a graph reads the flags of its round.
            is_active = ~self._is_idle[rows] if kind.has_idle_rows else None

            def unless_idle(new: Tree, old: Tree) -> Tree:
                return new if is_active is None else tree.by_row(is_active, new, old)

            batches = self._gather_batches(kind)
            weight = batches[0].samples
            buffers = tree.take(job.buffers, rows)
            client = tree.take(job.client, rows)
            states = (buffers, client, tree.take(job.servers or {}, rows))
            if phase.step:
                take_step = partial(self._phase_step, phase)
                with torch.no_grad(), self._autocast():
                    new_leaves, loss, new_buffers = vmap_clients(
                        take_step, leaves, batches, *states
                    )
                for leaf, value in zip(leaves, new_leaves, strict=True):
                    leaf.copy_(unless_idle(value, leaf))
            else:
                find_gradients = self._find_gradients
                if self._noise:
                    find_gradients = self._find_protected_gradients
                grads, loss, new_buffers, new_client, record = find_gradients(
                    kind, leaves, batches[0], states
                )
                # Ahead of the step: it may have kept parameters, which the step changes in place.
                if phase.after_gradient:
                    tree.put_(job.client, rows, unless_idle(new_client, client))
                optimizer_step_(
                    trainable_leaves, moments, grads, masks, kind.local, stacked=True, rates=rates
                )
                if record and job.wants_records:
                    self._add_record(kind.slot, record, weight, is_active)
            tree.put_(job.buffers, rows, unless_idle(new_buffers, buffers))
            self._add_loss(rows, loss, weight, is_active)

        return step

    def _find_gradients(
        self, kind: _StepKind, leaves: list[Tensor], batch: Batch, states: _ClientStates
    ) -> _Gradients:
        """Compute all clients' gradients, losses, new buffers and states, and records."""
        trainable_leaves = [leaves[i] for i in kind.trainable.indices]
        compute = partial(self._compute_gradient, kind.phase, kind.trainable.indices)
        with self._autocast():
            return vmap_clients(compute, trainable_leaves, leaves, batch, *states)

    def _find_protected_gradients(
        self, kind: _StepKind, leaves: list[Tensor], batch: Batch, states: _ClientStates
    ) -> _Gradients:
        """Compute the same with gradients that hide single samples, without losses."""
        rows = slice(kind.rows)
        indices = kind.trainable.indices
        masks = {i: mask[rows] for i, mask in enumerate(kind.trainable.masks) if mask is not None}
        trainable_leaves = [leaves[i] for i in indices]
        compute = partial(self._sum_clipped_gradients, kind.phase, indices)
        with self._autocast(), explaining_failure():
            sums = vmap_clients(compute, trainable_leaves, leaves, batch, masks, *states)
        grads = []
        for i, gradient in zip(indices, sums, strict=True):
            noised = gradient + self._noise[i][rows]
            grads.append(noised / per_client_shape(self._expected[rows], noised))
        # The loss would tell of samples.
        buffers, client, _ = states
        return grads, batch.x.new_zeros(kind.rows), buffers, client, {}

    def _gather_batches(self, kind: _StepKind) -> list[Batch]:
        """Return the minibatches of a step from its inputs, stacked `[rows, batch, ...]`."""
        federation = self._job.rows[0].federation
        numbers, weight, random, views = (part[: kind.rows] for part in self._inputs[kind.slot])
        samples, indices = numbers.unbind(1)
        x = federation.normalize(federation.x[samples])
        x = federation.apply_augmentation(x, views)
        y = federation.y[samples]
        batches = []
        for k in range(samples.shape[1]):
            batch = Batch(
                x=x[:, k],
                y=y[:, k],
                weight=weight[:, k],
                random=random[:, k],
                indices=indices[:, k],
            )
            batches.append(batch)
        return batches

    def _add_record(
        self, slot: int, record: Tree, weight: Tensor, is_active: Tensor | None
    ) -> None:
        """Keep the records of a step's losses, with the weights of their samples."""
        self._slots_with_records.add(slot)
        if is_active is not None:
            weight = weight * is_active[:, None]
        self._step_records.append((record, weight.clone()))

    def _add_loss(
        self, rows: slice, loss: Tensor, weight: Tensor, is_active: Tensor | None
    ) -> None:
        """Add a step's losses to the sums that mean losses are made of."""
        if is_active is None:
            self._loss_sum[rows].add_(loss)
            self._step_count[rows].add_(1)
        else:
            self._loss_sum[rows].add_(torch.where(is_active, loss, 0.0))
            self._step_count[rows].add_(is_active)
        if self._job.plan.by_sample:
            count = weight.sum(1)
            if is_active is not None:
                count = count * is_active
            self._sample_loss_sum[rows].add_(loss * count)
            self._sample_count[rows].add_(count)

    def _phase_step(
        self,
        phase: Phase,
        leaves: list[Tensor],
        batches: list[Batch],
        buffers: dict[str, Tree],
        client: dict[str, Tree],
        servers: dict[str, Tree],
    ) -> tuple[list[Tensor], Tensor, dict[str, Tree]]:
        """Take one client's step by `Phase.step`; return new leaves, loss and buffers."""
        assert phase.step is not None
        bound = self._net.bind(buffers, training=True, weight=batches[0].weight)
        batch = batches[0] if len(batches) == 1 else tuple(batches)
        params = tree.rebuild(self._job.start, leaves)
        server = servers.get("server", self._job.server)
        params, loss = phase.step(server, client, bound, params, batch)
        return tree.leaves(params), loss, bound.buffers

    def _compute_gradient(  # noqa: PLR0913 - vmap maps over arguments
        self,
        phase: Phase,
        indices: list[int],
        trainable_leaves: list[Tensor],
        leaves: list[Tensor],
        batch: Batch,
        buffers: dict[str, Tree],
        client: dict[str, Tree],
        servers: dict[str, Tree],
    ) -> tuple[list[Tensor], Tensor, dict[str, Tree], dict[str, Tree], Tree]:
        """Return one client's gradient at the leaves `indices`, and what comes with it.

        Returns:
            Gradient, loss, new buffers, the client's state by `Phase.after_gradient`, and the
            record of the loss.
        """
        # ---- Step 1: the loss as a function of the leaves that train
        like = self._job.start
        # Runs in lockstep have a server each.
        server = servers.get("server", self._job.server)
        objective = phase.loss or self._job.plan.loss

        def compute_loss(values: list[Tensor]) -> tuple[Tensor, tuple[dict[str, Tree], Tree]]:
            params = self._rebuild_params(leaves, indices, values)
            bound = self._net.bind(buffers, training=True, weight=batch.weight)
            loss = objective(server, client, bound, params, batch)
            record: Tree = {}
            if isinstance(loss, tuple):
                loss, record = loss
            return loss, (bound.buffers, record)

        # ---- Step 2: its gradient, and the method's use of it
        grads, (loss, (new_buffers, record)) = grad_and_value(compute_loss, has_aux=True)(
            trainable_leaves
        )
        new_client: dict[str, Tree] = {}
        if phase.after_gradient:
            params = tree.rebuild(like, leaves)
            gradient = tree.rebuild(like, complete_gradients(grads, leaves, indices))
            new_client = phase.after_gradient(server, client, params, gradient, batch, loss, record)
        return grads, loss, new_buffers, new_client, record

    def _rebuild_params(
        self, leaves: list[Tensor], indices: list[int], values: list[Tensor]
    ) -> Tree:
        """Return parameters of these leaves, with `values` at `indices`."""
        replaced = dict(zip(indices, values, strict=True))
        all_leaves = [replaced.get(position, leaf) for position, leaf in enumerate(leaves)]
        return tree.rebuild(self._job.start, all_leaves)

    def _sum_clipped_gradients(  # noqa: PLR0913 - vmap maps over arguments
        self,
        phase: Phase,
        indices: list[int],
        trainable_leaves: list[Tensor],
        leaves: list[Tensor],
        batch: Batch,
        masks: dict[int, Tensor],
        buffers: dict[str, Tree],
        client: dict[str, Tree],
        servers: dict[str, Tree],
    ) -> list[Tensor]:
        """Return the sum of one client's clipped gradients at the leaves `indices`."""
        protection = self._job.draws[0].protection
        assert protection
        server = servers.get("server", self._job.server)
        objective = phase.loss or self._job.plan.loss

        def compute_loss(values: list[Tensor], sample: Batch) -> Any:
            params = self._rebuild_params(leaves, indices, values)
            bound = self._net.bind(buffers, training=True)
            return objective(server, client, bound, params, sample)

        all_masks = [masks.get(position) for position in range(len(indices))]
        return sum_clipped_gradients(
            compute_loss, trainable_leaves, all_masks, batch, protection.clip
        )


def _find_idle_rows(phases: list[Phase], row_count: int) -> dict[int, Tensor]:
    """Find the rows without anything to train, by position of phases that some rows skip."""
    idle_rows: dict[int, Tensor] = {}
    for number, phase in enumerate(phases):
        flags = clients_without_trainable_entries(phase, row_count)
        if flags is not None:
            idle_rows[number] = flags
    return idle_rows


def _with_own_memory(job: TrainJob, is_captured: bool) -> TrainJob:
    """Copy the trees of a job that steps write to.

    Graphs read everything from where it was at first, so their trees are all copies.
    """
    own_job = replace(
        job,
        start=tree.clone(job.start),
        buffers=tree.clone(job.buffers),
    )
    changes_client = any(phase.after_gradient for phase in job.plan.phases)
    if job.is_plain:
        own_job = replace(own_job, client={}, server={})
    elif is_captured or changes_client:
        own_job = replace(own_job, client=tree.clone(job.client))
    if is_captured:
        servers = None if job.servers is None else tree.clone(job.servers)
        own_job = replace(own_job, server=tree.clone(own_job.server), servers=servers)
    return own_job


def _clone_tensor(leaf: Any) -> Any:
    """Return a copy of a mask's leaf, which may be a plain bool."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _copy_tensor_(leaf: Any, new_leaf: Any) -> Any:
    """Write a mask's leaf in place, if it is a tensor."""
    return leaf.copy_(new_leaf) if isinstance(leaf, Tensor) else leaf
