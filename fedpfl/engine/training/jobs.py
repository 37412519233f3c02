"""Jobs of training and evaluation, and how those of one kind join into one program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.kinds import function_key, method_key
from fedpfl.engine.training.minibatches import SampleSource
from fedpfl.engine.training.train_plan import TrainPlan
from fedpfl.ground import tree
from fedpfl.ground.survival import Horizon
from fedpfl.ground.tree import Entries, Tree
from fedpfl.methods import Method, Phase

Autocast = Callable[[], AbstractContextManager]
"""Enters the precision of losses and forward passes."""


class ClientRow(NamedTuple):
    """Name one client in a job."""

    federation: Federation
    client: int


@dataclass(frozen=True)
class EvalJob:
    """Hold models to evaluate; row i of every stacked tree belongs to `rows[i]`.

    Attributes:
        split: Of the federation.
        metrics: Names of measures, as in EvalCall.
        horizon: At which survival is judged, its hazard `[rows]` if there are several.
    """

    method: Method
    rows: list[ClientRow]
    draws: list[Draws]
    params: Tree
    buffers: Entries
    split: str = "test"
    metrics: tuple[str, ...] = ()
    horizon: Horizon | None = None

    @property
    def has_own_predict(self) -> bool:
        """Whether predictions depend on the method, and not on the model alone."""
        return type(self.method).predict is not Method.predict

    def random(self) -> list[Tensor]:
        """Return each row's numbers for its samples, `[samples, Method.randoms]`.

        Methods that do not look at them have 0 numbers.
        """
        count = self.method.randoms if self.has_own_predict else 0
        numbers = []
        for row, draws in zip(self.rows, self.draws, strict=True):
            samples = len(getattr(row.federation, self.split)[row.client])
            numbers.append(draws.random(row.client, self.split, 0, samples, count, "predict"))
        return numbers

    def kind(self) -> tuple[Any, ...]:
        """Return the key of jobs that share a program: samples, predictions and form of trees."""
        return (
            method_key(self.method) if self.has_own_predict else None,
            self.split,
            self.metrics,
            self.horizon and (self.horizon.time, self.horizon.hazard is None),
            self.rows[0].federation.excluded_classes is None,
            _sample_key(self.rows),
            _stacked_form(self.params),
            _stacked_form(self.buffers),
        )


@dataclass(frozen=True)
class TrainJob:
    """Hold local training to do; row i of every stacked tree belongs to `rows[i]`.

    Attributes:
        servers: `{"server": stacked}` where the rows have different servers; else None, and
            `server` is everyone's.
        row_rates: Learning rates where they may differ; else that of the plan is everyone's.
        surroundings: Of a sub-model that is trained at its true size, if the loss looks at them:
            `entries` of Subnetwork, and `params` and `buffers` at full size.
    """

    method: Method
    rows: list[ClientRow]
    draws: list[Draws]
    plan: TrainPlan
    start: Tree
    server: Tree
    client: Entries
    buffers: Entries
    servers: Entries | None = None
    row_rates: list[float] | None = None
    surroundings: Tree = field(default_factory=dict)

    @property
    def rates(self) -> list[float]:
        """Return the learning rate of each row."""
        return self.row_rates or [self.plan.local.lr] * len(self.rows)

    @property
    def randoms(self) -> int:
        """Return the count of random numbers of each sample: 0 where the loss ignores them."""
        return 0 if self.is_plain else self.method.randoms

    def sample_source(self, row: int, phase: Phase) -> SampleSource:
        """Return the samples of a row, and how a phase makes minibatches of them."""
        federation, client = self.rows[row]
        local = self.plan.local.for_phase(phase)
        return SampleSource(
            federation=federation,
            client=client,
            draws=self.draws[row],
            batch_size=local.batch_size,
            fixed=local.steps,
            randoms=self.randoms,
        )

    @property
    def wants_records(self) -> bool:
        """Check whether the method asks for the records of all steps."""
        return not self.plan.tuned and type(self.method).after_training is not Method.after_training

    @property
    def is_plain(self) -> bool:
        """Check whether the loss looks at the trained tree alone."""
        method = type(self.method)
        if method.loss is not Method.loss or method.predict is not Method.predict:
            return False
        return not any(
            phase.loss or phase.step or phase.after_gradient for phase in self.plan.phases
        )

    def kind(self) -> tuple[Any, ...]:
        """Return the key of jobs that share a program: samples, loss, steps and form of trees."""
        phases = [
            phase_structure(phase)._replace(
                loss=function_key(phase.loss, self.method),
                step=function_key(phase.step, self.method),
                after_gradient=function_key(phase.after_gradient, self.method),
            )
            for phase in self.plan.phases
        ]
        local = self.plan.local
        if local.has_schedule:  # runs of one program may be in different rounds
            local = replace(local, lr=1.0)
        # Ragged entries of client states differ in length.
        client = {} if self.is_plain else self.client
        return (
            None if self.is_plain else method_key(self.method),
            (self.plan.tuned, self.plan.by_sample, local),
            self.draws[0].protection and self.draws[0].protection.clip,
            _sample_key(self.rows),
            phases,
            _stacked_form(self.start),
            _stacked_form(self.buffers),
            _stacked_form(client),
        )


@dataclass(frozen=True)
class TrainResult:
    """Hold trained trees, states and buffers after a job, stacked.

    Attributes:
        loss: Mean over each client's steps.
        sample_loss: Mean over the samples of these steps; 0 unless the plan asks for it.
        has_stepped: Whether a client has made a step.
        records: What each row's losses left beside the loss, of all its steps in turn; {} where it
            took none.
    """

    params: Tree
    client: Entries
    buffers: Entries
    loss: Tensor
    sample_loss: Tensor
    has_stepped: Tensor
    records: list[Tree]


def run_by_kind(work: Callable[[list[Any]], list[Any]], jobs: Sequence[Any]) -> list[Any]:
    """Return the results of `work`, which is given all jobs of a kind together."""
    kinds: list[tuple[Any, ...]] = []
    positions_by_kind: list[list[int]] = []
    for position, job in enumerate(jobs):
        kind = job.kind()
        if kind not in kinds:
            kinds.append(kind)
            positions_by_kind.append([])
        positions_by_kind[kinds.index(kind)].append(position)
    results: dict[int, Any] = {}
    for positions in positions_by_kind:
        kind_results = work([jobs[position] for position in positions])
        results |= zip(positions, kind_results, strict=True)
    return [results[position] for position in range(len(jobs))]


def join_jobs(jobs: list[TrainJob]) -> tuple[TrainJob, Tensor]:
    """Make one job of jobs of one kind, the clients with most samples first.

    Returns:
        The job, and where each row went, `[rows]`.
    """
    template = jobs[0]

    # ---- The order of rows
    rows = [row for job in jobs for row in job.rows]
    draws = [row_draws for job in jobs for row_draws in job.draws]
    rates = [rate for job in jobs for rate in job.rates]
    sizes = torch.tensor([int(row.federation.train_sizes[row.client]) for row in rows])
    # Programs step leading rows: the longest come first, as in each job.
    order = sizes.argsort(descending=True, stable=True)
    positions = order.tolist()

    def join_trees(trees: Sequence[Tree]) -> Tree:
        return tree.take(concatenate_rows(trees), order)

    # ---- Servers and clients' states, where the loss looks at them
    servers: Entries | None = None
    client: Entries = {}
    if not template.is_plain:
        repeated = [tree.repeat(job.server, len(job.rows)) for job in jobs]
        servers = {"server": join_trees(repeated)}
        client = join_trees([job.client for job in jobs])
    joined_job = replace(
        template,
        rows=[rows[i] for i in positions],
        draws=[draws[i] for i in positions],
        plan=replace(template.plan, phases=_join_phases(jobs, join_trees)),
        start=join_trees([job.start for job in jobs]),
        server={},
        client=client,
        buffers=join_trees([job.buffers for job in jobs]),
        servers=servers,
        row_rates=[rates[i] for i in positions],
    )
    return joined_job, order.argsort()


def _join_phases(jobs: list[TrainJob], join_trees: Callable[[Sequence[Tree]], Tree]) -> list[Phase]:
    """Return the common phases with joined masks; masks that phases share stay shared."""

    def join_leaves(leaves: list[Any]) -> Any:
        return join_trees(leaves) if isinstance(leaves[0], Tensor) else leaves[0]

    joined_masks: dict[tuple[int, ...], Tree] = {}
    phases = []
    for i, phase in enumerate(jobs[0].plan.phases):
        masks = [job.plan.phases[i].mask for job in jobs]
        key = tuple(map(id, masks))
        if key not in joined_masks:
            joined_masks[key] = tree.combine(join_leaves, masks)
        phases.append(phase._replace(mask=joined_masks[key]))
    return phases


def split_result(result: TrainResult, positions: Tensor, jobs: list[TrainJob]) -> list[TrainResult]:
    """Undo `join_jobs`: return each job's own rows. The states of plain jobs have not changed."""
    stacked = {name: value for name, value in vars(result).items() if name != "records"}
    records = iter([result.records[position] for position in positions.tolist()])
    counts = [len(job.rows) for job in jobs]
    results = []
    for job, fields in zip(jobs, divide_rows(tree.take(stacked, positions), counts), strict=True):
        if job.is_plain:
            fields = {**fields, "client": job.client}
        results.append(TrainResult(**fields, records=list(islice(records, len(job.rows)))))
    return results


def phase_structure(phase: Phase) -> Phase:
    """Return a phase with all that a program depends on: the values of its masks are left out."""
    mask = []
    for name, leaf in tree.items(phase.mask):
        mask.append((name, Tensor if isinstance(leaf, Tensor) else leaf))
    return phase._replace(mask=mask, sgd=dict(phase.sgd))


def concatenate_rows(stacked: Sequence[Tree]) -> Tree:
    """Concatenate stacked trees of one form on axis 0."""
    if len(stacked) == 1:
        return stacked[0]
    return tree.concatenate_trees(stacked)


def divide_rows(stacked: Tree, counts: list[int]) -> list[Tree]:
    """Undo `concatenate_rows`: return views of `counts` rows each."""
    starts = accumulate(counts, initial=0)
    return [
        tree.take(stacked, slice(start, start + count))
        for start, count in zip(starts, counts, strict=False)
    ]


def _sample_key(rows: list[ClientRow]) -> tuple[Any, ...]:
    """Return the key of samples that look and are numbered alike."""
    federation = rows[0].federation
    constants = (federation.mean, federation.std, federation.fill)
    return id(federation.x), id(federation.y), *constants, federation.augment


def _stacked_form(stacked: Tree) -> list[tuple[str, torch.Size, torch.dtype]]:
    """Return names, shapes and dtypes of one row of a stacked tree."""
    forms = []
    for name, leaf in tree.items(stacked):
        forms.append((name, leaf.shape[1:], leaf.dtype))
    return forms
