"""Jobs of training and evaluation: rows of clients, and how jobs of a kind join into one program
and part again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.sgd import TrainPlan
from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods import Method, Phase


class ClientRow(NamedTuple):
    """One client in a job."""

    federation: Federation
    client: int


@dataclass(frozen=True)
class EvalJob:
    """Hold models to evaluate; row i of every stacked tree belongs to `rows[i]`.

    split: of the federation. metrics: as in EvalCall.
    """

    method: Method
    rows: list[ClientRow]
    draws: list[Draws]
    params: Tree
    buffers: dict[str, Tree]
    split: str = "test"
    metrics: tuple[str, ...] = ()

    def random(self) -> list[Tensor]:
        """Draw each row's numbers for its samples, `[samples, Method.randoms]`; none where nobody
        looks at them.
        """
        count = 0 if type(self.method).predict is Method.predict else self.method.randoms
        samples = [len(getattr(row.federation, self.split)[row.client]) for row in self.rows]
        return [
            draws.random(row.client, self.split, 0, number, count, "predict")
            for row, draws, number in zip(self.rows, self.draws, samples, strict=True)
        ]

    def kind(self) -> tuple[Any, ...]:
        """Say what jobs of one program have in common: the images, predictions and form of trees."""
        asker = None if type(self.method).predict is Method.predict else self.method
        anything = self.rows[0].federation.excluded_classes is None
        trees = _form(self.params), _form(self.buffers)
        return asker, self.split, self.metrics, anything, _images(self.rows), *trees


@dataclass(frozen=True)
class TrainJob:
    """Hold local training to do; row i of every stacked tree belongs to `rows[i]`.

    servers: `{"server": stacked}` where the rows have different ones, else None, and `server` is
    everyone's.
    joined: the rows' learning rates where they may differ, else that of the plan is everyone's.
    """

    method: Method
    rows: list[ClientRow]
    draws: list[Draws]
    plan: TrainPlan
    start: Tree
    server: Tree
    client: dict[str, Tree]
    buffers: dict[str, Tree]
    servers: dict[str, Tree] | None = None
    joined: list[float] | None = None

    @property
    def rates(self) -> list[float]:
        """The learning rate of each row."""
        return self.joined or [self.plan.local.lr] * len(self.rows)

    @property
    def randoms(self) -> int:
        """How many numbers each sample is given: none where nobody looks at them."""
        return 0 if self.plain else self.method.randoms

    @property
    def records(self) -> bool:
        """Whether anybody asks for what the losses keep of all steps."""
        return not self.plan.tuned and type(self.method).after_training is not Method.after_training

    @property
    def plain(self) -> bool:
        """Whether the loss looks at the trained tree alone, so that it does not matter whose method
        it is.
        """
        method = type(self.method)
        if method.loss is not Method.loss or method.predict is not Method.predict:
            return False
        return not any(
            phase.loss or phase.step or phase.after_gradient for phase in self.plan.phases
        )

    def kind(self) -> tuple[Any, ...]:
        """Say what jobs of one program have in common: the images, loss and steps, and form of
        trees.
        """
        # Whose functions they are, `asker` says.
        phases = [
            phase_structure(phase._replace(loss=None, step=None, after_gradient=None))
            for phase in self.plan.phases
        ]
        local = (
            replace(self.plan.local, lr=1.0) if self.plan.local.has_schedule else self.plan.local
        )
        asker, plan = (
            None if self.plain else self.method,
            (self.plan.tuned, self.plan.by_sample, local),
        )
        client = (
            {} if self.plain else self.client
        )  # in which what is Ragged has a length of its own
        return (
            asker,
            plan,
            _images(self.rows),
            phases,
            *map(_form, (self.start, self.buffers, client)),
        )


@dataclass(frozen=True)
class TrainResult:
    """Hold trained trees, states and buffers after a job, stacked.

    loss, sample_loss: mean over each client's steps, and over the samples of these (0 unless the
    plan asks for it).
    stepped: whether a client has made a step.
    kept: what each row's losses left beside the loss, of all its steps in turn; {} where it took
    none.
    """

    params: Tree
    client: dict[str, Tree]
    buffers: dict[str, Tree]
    loss: Tensor
    sample_loss: Tensor
    stepped: Tensor
    kept: list[Tree]


def run_by_kind(work: Callable[[list[Any]], list[Any]], items: Sequence[Any]) -> list[Any]:
    """Return the results of `work`, in order, which is given all items of a kind together."""
    kinds: list[tuple[Any, list[int]]] = []
    for place, item in enumerate(items):
        kind = item.kind()
        group = next((places for known, places in kinds if known == kind), None)
        if group is None:
            kinds.append((kind, group := []))
        group.append(place)
    results: dict[int, Any] = {}
    for _, places in kinds:
        results |= zip(places, work([items[place] for place in places]), strict=True)
    return [results[place] for place in range(len(items))]


def join_jobs(jobs: list[TrainJob]) -> tuple[TrainJob, Tensor]:
    """Make jobs of one kind one, the clients with most samples first; and say where each row went,
    `[rows]`.
    """
    first = jobs[0]
    rows = [row for job in jobs for row in job.rows]
    draws = [draws for job in jobs for draws in job.draws]
    rates = [rate for job in jobs for rate in job.rates]
    sizes = torch.tensor([int(row.federation.train_sizes[row.client]) for row in rows])
    order = sizes.argsort(descending=True, stable=True)

    def joined(trees: Sequence[Tree]) -> Tree:
        return tree.take(concatenate_rows(trees), order)

    def joined_masks(*leaves: Any) -> Any:
        return joined(leaves) if isinstance(leaves[0], Tensor) else leaves[0]

    masks = [[job.plan.phases[i].mask for job in jobs] for i in range(len(first.plan.phases))]
    once = {
        (*map(id, own),): tree.map(joined_masks, *own) for own in masks
    }  # what phases share, they share still
    phases = [
        phase._replace(mask=once[(*map(id, own),)])
        for phase, own in zip(first.plan.phases, masks, strict=True)
    ]
    servers: dict[str, Tree] | None = None
    client: dict[str, Tree] = {}
    if not first.plain:
        servers = {"server": joined([tree.repeat(job.server, len(job.rows)) for job in jobs])}
        client = joined([job.client for job in jobs])
    places = order.tolist()
    job = replace(
        first,
        rows=[rows[i] for i in places],
        draws=[draws[i] for i in places],
        plan=replace(first.plan, phases=phases),
        start=joined([job.start for job in jobs]),
        server={},
        client=client,
        buffers=joined([job.buffers for job in jobs]),
        servers=servers,
        joined=[rates[i] for i in places],
    )
    return job, order.argsort()


def split_result(end: TrainResult, places: Tensor, jobs: list[TrainJob]) -> list[TrainResult]:
    """Undo `join`: return each job's own rows. The states of plain jobs have not changed."""
    stacked = {name: value for name, value in vars(end).items() if name != "kept"}
    counts, kept = (
        [len(job.rows) for job in jobs],
        iter([end.kept[place] for place in places.tolist()]),
    )
    return [
        TrainResult(
            **{**own, "client": job.client if job.plain else own["client"]},
            kept=list(islice(kept, len(job.rows))),
        )
        for job, own in zip(jobs, divide_rows(tree.take(stacked, places), counts), strict=True)
    ]


def phase_structure(phase: Phase) -> Phase:
    """Return a phase with all that a program depends on: of its masks it is not the values."""
    mask = [
        (name, Tensor if isinstance(leaf, Tensor) else leaf)
        for name, leaf in tree.items(phase.mask)
    ]
    return phase._replace(mask=mask, sgd=dict(phase.sgd))


def concatenate_rows(stacked: Sequence[Tree]) -> Tree:
    """Put stacked trees of one form one after another on axis 0; a single one stays as it is."""
    return tree.map(lambda *leaves: torch.cat(leaves), *stacked) if len(stacked) > 1 else stacked[0]


def divide_rows(stacked: Tree, counts: list[int]) -> list[Tree]:
    """Undo `concatenate`: return views of `counts` rows each."""
    ends = torch.tensor(counts).cumsum(0).tolist()
    return [
        tree.take(stacked, slice(end - count, end)) for count, end in zip(counts, ends, strict=True)
    ]


def _images(rows: list[ClientRow]) -> tuple[Any, ...]:
    federation = rows[0].federation
    return id(federation.x), federation.mean, federation.std, federation.augment


def _form(stacked: Tree) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, leaf.shape[1:], leaf.dtype) for name, leaf in tree.items(stacked)]
