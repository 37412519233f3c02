"""The training steps of a job as one vectorised program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedpfl.engine.backends.graphs import AttemptedCapture, Capture, CaptureAttempts, captured_width
from fedpfl.engine.backends.planning import plan_training_steps
from fedpfl.engine.training.jobs import Autocast, TrainJob, TrainResult, phase_structure
from fedpfl.engine.training.sgd import (
    initial_moments,
    masked_moments,
    optimizer_step_,
    per_client_shape,
)
from fedpfl.engine.training.step import Gradient, PureStep, StepState
from fedpfl.engine.training.train_plan import (
    clients_without_trainable_entries,
    find_trainable_leaves,
    streams_with_differing_masks,
    with_epoch_numbers,
)
from fedpfl.engine.training.vectorize import vmap_clients
from fedpfl.ground import tree
from fedpfl.ground.tree import Entries, Tree
from fedpfl.methods import Batch, Phase
from fedpfl.models import Net

MOST_PROGRAMS = 16
"""How many programs are kept with their graphs, the latest ones; all go where memory runs out."""


class ProgramCache:
    """Run jobs eagerly, or by graphs that are captured once.

    A graph is captured once per kind of job, kind of phase and width.

    Args:
        net: The network.
        autocast: Makes the context of the engine's precision.
        capture: Records a call, and returns a function that replays it in the same memory; None
            runs every step eagerly. Where it fails, steps run eagerly from then on, in the same shapes, so
            that no bit of a result depends on it.
    """

    def __init__(
        self,
        net: Net,
        autocast: Autocast,
        capture: Capture | None = None,
    ):
        self._net = net
        self._autocast = autocast
        # Programs hold this instead of the cache: in a cycle they would outlive it, and with them
        # the memory of their graphs, until garbage is collected.
        self._capture = capture and CaptureAttempts(capture)
        self._programs: list[tuple[Any, Program]] = []  # with their keys, the latest first

    def run(self, job: TrainJob) -> TrainResult:
        """Take all steps of a job; its rows are sorted, the longest first."""
        if self._capture is None:
            return Program(self._net, self._autocast, job).run(job)

        # ---- Step 1: the program of this kind, perhaps of an earlier round; it comes first
        key = (len(job.rows), job.servers is None, *job.kind())
        program = next((cached for kind, cached in self._programs if kind == key), None)
        if program is None:
            program = Program(self._net, self._autocast, job, self._capture)
        else:
            program.load(job)
        earlier = [entry for entry in self._programs if entry[1] is not program]
        self._programs = [(key, program), *earlier][:MOST_PROGRAMS]

        # ---- Step 2: the next job overwrites the program's memory, so results are copies.
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
        step: A client's step, with masks in the program's memory.
        rows: How many leading rows take the step.
        has_idle_rows: Whether some rows have no trainable entry in the phase.
    """

    slot: int
    step: PureStep
    rows: int
    has_idle_rows: bool


class Program:
    """Take the steps of jobs of one kind and width, in private memory."""

    def __init__(
        self,
        net: Net,
        autocast: Autocast,
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
        names = ("loss", "steps", "sample_loss", "samples")
        self._sums = {name: torch.zeros(row_count, device=device) for name in names}
        self._rates = torch.zeros(row_count, device=device)
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

    def _stepped_trees(self, job: TrainJob) -> Entries:
        """Return the trees that a client's step reads and writes, stacked."""
        return {
            "params": job.start,
            "buffers": job.buffers,
            "client": {} if self._job.is_plain else job.client,
            "servers": job.servers or {},
        }

    def load(self, job: TrainJob) -> None:
        """Copy another job of the same kind into the program's memory."""
        tree.map(Tensor.copy_, self._stepped_trees(self._job), self._stepped_trees(job))
        if not self._job.is_plain:
            tree.map(Tensor.copy_, self._job.server, job.server)
        # A new job begins without the momentum of the one before.
        torch._foreach_zero_(tree.leaves({"moments": self._moments, "sums": self._sums}))

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
            kind = self._make_kind(job, number, phase, has_idle_rows)
            moments = self._moments[phase.stream].of(kind.step.trainable.indices)
            masking: AbstractContextManager = nullcontext()
            if phase.stream in masked_streams:
                masking = masked_moments(moments, kind.step.trainable.masks, kind.step.local)
            with masking:
                self._train_phase(job, kind, epochs)

        # ---- Step 3: mean losses
        sums = self._sums
        return TrainResult(
            params=self._job.start,
            client=job.client if job.is_plain else self._job.client,
            buffers=self._job.buffers,
            loss=sums["loss"] / sums["steps"].clamp(min=1),
            sample_loss=sums["sample_loss"] / sums["samples"].clamp(min=1),
            has_stepped=sums["steps"] > 0,
            records=self._take_records(),
        )

    def _make_kind(
        self, job: TrainJob, number: int, phase: Phase, has_idle_rows: bool
    ) -> _StepKind:
        """Return the kind of a phase's steps, with its masks in the program's memory."""
        slot = self._slots[number]
        own_phase = self._phases[slot]
        if self._capture:
            tree.map(_copy_tensor_, own_phase.mask, phase.mask)
        step = PureStep(
            net=self._net,
            job=self._job,
            phase=own_phase,
            trainable=find_trainable_leaves(own_phase, self._job.start),
            local=job.plan.local.for_phase(own_phase),
            autocast=self._autocast,
        )
        return _StepKind(slot, step, rows=len(job.rows), has_idle_rows=has_idle_rows)

    def _train_phase(self, job: TrainJob, kind: _StepKind, epochs: range) -> None:
        """Take the steps of a phase, each of the leading rows that still have one."""
        # ---- Step 1: all steps are planned.
        batch_size = kind.step.local.batch_size
        if self._noise:
            sizes = [len(row.federation.train[row.client]) for row in job.rows]
            self._expected.copy_(torch.tensor(sizes).clamp(max=batch_size))
        # Graphs want one shape in every round, also where no client has a full batch.
        least_batch = batch_size if self._capture else 0
        planned, active_rows = plan_training_steps(job, kind.step.phase, epochs, least_batch)
        if active_rows:
            self._reserve_inputs(kind.slot, planned)

        # ---- Step 2: the steps. A captured one may be wider than the rows that have a step left;
        # it runs over finished rows too, and their memory is put back afterwards.
        finished_rows: list[tuple[Tensor, Tensor]] = []
        rows_before = len(job.rows)
        steps = zip(*[tree.send(part, self._rates.device) for part in planned], strict=True)
        for number, (values, rows) in enumerate(zip(steps, active_rows, strict=True)):
            if self._noise:
                step_key = f"{kind.step.phase.stream} {epochs.start}", number
                self._draw_noise(job, kind, step_key, rows)
            width = rows
            if self._capture:
                width = min(captured_width(rows), len(job.rows))
            finished_rows += self._save_rows(slice(rows, min(width, rows_before)))
            rows_before = rows
            for part, value in zip(self._inputs[kind.slot], values, strict=True):
                part.copy_(value)
            self._run_step(replace(kind, rows=width))
        for memory, saved in finished_rows:
            memory.copy_(saved)

    def _reserve_inputs(self, slot: int, planned: list[Tensor]) -> None:
        """Make the memory that a step reads its minibatch from, unless there is such."""
        shapes = [part.shape[1:] for part in planned]
        if [part.shape for part in self._inputs.get(slot, [])] == shapes:
            return
        device = self._rates.device
        self._inputs[slot] = [part.new_zeros(part.shape[1:], device=device) for part in planned]
        # Graphs of other slots read memory of their own, which stays.
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] != slot}

    def _draw_noise(self, job: TrainJob, kind: _StepKind, step: tuple[str, int], rows: int) -> None:
        """Draw the noise of a step for the leading rows, as the loop backend does."""
        for row in range(rows):
            draws = job.draws[row]
            assert draws.protection
            # By the loop backend's key, so that both backends draw the same noise.
            key = draws.purpose, draws.round, *step
            for i in kind.step.trainable.indices:
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
                records_by_row[row].append(tree.take(tree.take(record, row), slice(count)))
        return [tree.concatenate_trees(records) if records else {} for records in records_by_row]

    def _save_rows(self, rows: slice) -> list[tuple[Tensor, Tensor]]:
        """Return the memory of rows without a step left, and copies of it."""
        if rows.start >= rows.stop:
            return []
        own_trees = {**self._stepped_trees(self._job), "servers": {}}
        parts = tree.leaves({**own_trees, "moments": self._moments, "sums": self._sums})
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
        step = kind.step
        rows = slice(kind.rows)
        states = tree.take(self._stepped_trees(self._job), rows)  # views of the leading rows
        leaves = step.list_moving(states["params"])
        moments = self._moments[step.phase.stream].of(step.trainable.indices, rows)
        masks = [None if mask is None else mask[rows] for mask in step.trainable.masks]
        rates: Tensor | None = None
        if step.local.has_schedule and "lr" not in step.phase.sgd:
            # A graph would repeat the number that it was captured with.
            rates = self._rates[rows]

        def take_step() -> None:
            # Captured into graphs: nothing in here may make the host wait, and flags of idle rows
            # are read anew in each round.
            is_active = ~self._is_idle[rows] if kind.has_idle_rows else None
            batches = self._gather_batches(kind)
            weight = batches[0].samples
            if step.phase.step:
                params, loss, buffers = self._take_phase_steps(step, states, batches)
                _overwrite_rows(states["params"], params, is_active)
            else:
                find_gradients = self._find_gradients
                if self._noise:
                    find_gradients = self._find_protected_gradients
                grads, loss, buffers, client, record = find_gradients(kind, states, batches[0])
                # Ahead of the step: it may have kept parameters, which the step changes in place.
                if step.phase.after_gradient:
                    _overwrite_rows(states["client"], client, is_active)
                optimizer_step_(
                    leaves, moments, grads, masks, step.local, stacked=True, rates=rates
                )
                if record and self._job.wants_records:
                    self._add_record(kind.slot, record, weight, is_active)
            _overwrite_rows(states["buffers"], buffers, is_active)
            self._add_loss(kind, loss, weight, is_active)

        return take_step

    # ---- a step of all rows: one client's function of PureStep, vectorised

    def _take_phase_steps(
        self, step: PureStep, states: Entries, batches: list[Batch]
    ) -> tuple[Tree, Tensor, Entries]:
        """Take all clients' steps by `Phase.step`; return parameters, losses and buffers."""

        def take_step(states: Entries, batches: list[Batch]) -> tuple[Tree, Tensor, Entries]:
            state = self._bind_state(states)
            bound = self._net.bind(state.buffers, training=True, weight=batches[0].weight)
            params, loss = step.take_phase_step(state, bound, batches)
            return params, loss, bound.buffers

        with torch.no_grad():
            return vmap_clients(take_step, states, batches)

    def _find_gradients(self, kind: _StepKind, states: Entries, batch: Batch) -> Gradient:
        """Compute all clients' gradients."""

        def find_gradient(states: Entries, batch: Batch) -> Gradient:
            return kind.step.find_gradient(self._bind_state(states), batch)

        with self._autocast():
            return vmap_clients(find_gradient, states, batch)

    def _find_protected_gradients(self, kind: _StepKind, states: Entries, batch: Batch) -> Gradient:
        """Compute all clients' gradients that hide single samples, without losses."""
        step = kind.step
        rows = slice(kind.rows)
        masks = {i: mask[rows] for i, mask in enumerate(step.trainable.masks) if mask is not None}

        def sum_gradients(states: Entries, batch: Batch, masks: dict[int, Tensor]) -> list[Tensor]:
            leaf_masks = [masks.get(i) for i in range(len(step.trainable.indices))]
            return step.sum_clipped_gradients(self._bind_state(states), batch, leaf_masks)

        sums = vmap_clients(sum_gradients, states, batch, masks)
        grads = []
        for i, gradient in zip(step.trainable.indices, sums, strict=True):
            noised = gradient + self._noise[i][rows]
            grads.append(noised / per_client_shape(self._expected[rows], noised))
        # The loss would tell of samples.
        loss = batch.x.new_zeros(kind.rows)
        return Gradient(grads, loss, states["buffers"], states["client"], {})

    def _bind_state(self, states: Entries) -> StepState:
        """Return a client's tensors as its step takes them."""
        # Runs in lockstep have a server each.
        server = states["servers"].get("server", self._job.server)
        return StepState(
            params=states["params"],
            server=server,
            client=states["client"],
            buffers=states["buffers"],
        )

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
        self, kind: _StepKind, loss: Tensor, weight: Tensor, is_active: Tensor | None
    ) -> None:
        """Add a step's losses to the sums that mean losses are made of."""
        additions = {"loss": loss, "steps": torch.ones_like(loss)}
        if self._job.plan.by_sample:
            count = weight.sum(1)
            additions |= {"sample_loss": loss * count, "samples": count}
        for name, values in additions.items():
            if is_active is not None:
                values = torch.where(is_active, values, 0.0)
            self._sums[name][: kind.rows].add_(values)


def _overwrite_rows(target: Tree, values: Tree, is_active: Tensor | None) -> None:
    """Write values in place, but for idle rows."""
    if is_active is not None:
        values = tree.by_row(is_active, values, target)
    tree.map(Tensor.copy_, target, values)


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
