"""The samples of many clients' steps laid side by side, `[steps, rows, ...]`; short ones are padded with weight 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.jobs import TrainJob
from fedpfl.engine.sgd import steps
from fedpfl.ground import tree
from fedpfl.methods import Batch, Phase

CHUNK = 128  # samples per client and forward pass of an evaluation, at least
PASS = 16_384  # and of all clients together, where a GPU has room


def train_steps(
    job: TrainJob, phase: Phase, epochs: range, batch_size: int, width: int = 0
) -> tuple[list[Tensor], list[int]]:
    """Plan all steps of a phase, and count the leading rows that take each; the rows of a job are sorted by steps.

    Returns sample indices and weights `[steps, rows, minibatches, batch]`, random numbers `[steps, rows, numbers]` and
    views `[steps, rows, minibatches, batch, numbers]`. width: the least `batch`.
    """
    plans = [
        steps(phase, epochs, batch_size, draws, row.federation, row.client, job.plan.local.steps)
        for row, draws in zip(job.rows, job.draws, strict=True)
    ]
    counts = [len(plan.positions) for plan in plans]
    assert counts == sorted(counts, reverse=True), "the rows of a job are sorted by their steps"
    batch = max([width, *(plan.positions.shape[2] for plan in plans if len(plan.positions))])
    chosen, views = [], []
    for row, plan in zip(job.rows, plans, strict=True):
        short = batch - plan.positions.shape[2]
        indices = torch.where(plan.positions < 0, -1, row.federation.train[row.client][plan.positions])
        chosen.append(F.pad(indices, (0, short), value=-1))
        views.append(F.pad(plan.views, (0, 0, 0, short)))
    indices, weight = _real(_beside(chosen))
    parts = [indices, weight, _beside([plan.random for plan in plans]), _beside(views)]
    return parts, [sum(n > step for n in counts) for step in range(counts[0])]


def passes(federation: Federation, owned: Sequence[Tensor]) -> Iterator[tuple[slice | Tensor, Batch]]:
    """Give rows of clients with a batch of each one's samples, until all that they own have been given."""
    device = federation.x.device
    size = CHUNK if device.type == "cpu" else max(CHUNK, PASS // max(1, len(owned)))
    size = min(size, max([1, *map(len, owned)]))
    chunks = [F.pad(own, (0, -len(own) % size), value=-1).view(-1, size) for own in owned]
    counts = torch.tensor([len(own) for own in chunks])
    for step, (index, weight) in enumerate(
        zip(*(tree.send(part, device) for part in _real(_beside(chunks))), strict=True)
    ):
        active = (counts > step).nonzero()[:, 0]
        leading = int(active[-1]) == len(active) - 1
        rows = slice(len(active)) if leading else tree.send(active, device)
        chosen, shares = index[rows], weight[rows]
        none = shares.new_empty(len(shares), 0)
        yield rows, Batch(federation.normalize(federation.x[chosen]), federation.y[chosen], shares, none)


def _beside(plans: Sequence[Tensor]) -> Tensor:
    """Stack plans `[own steps, ...]` on axis 1; rows that end early are filled with -1."""
    whole = plans[0].new_full((max(map(len, plans)), len(plans), *plans[0].shape[1:]), -1)
    for row, plan in enumerate(plans):
        whole[: len(plan), row] = plan
    return whole


def _real(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices with 0 in place of -1, and the weight that tells them apart."""
    return indices.clamp(min=0), (indices >= 0).float()
