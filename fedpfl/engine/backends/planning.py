"""The samples of many clients' steps laid side by side, `[steps, rows, ...]`; short ones are padded
with weight 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.training.jobs import TrainJob
from fedpfl.engine.training.sgd import plan_steps
from fedpfl.ground import tree
from fedpfl.methods import Batch, Phase

CHUNK = 128  # samples per client and forward pass of an evaluation, at least
PASS = 16_384  # and of all clients together, where a GPU has room


def plan_training_steps(
    job: TrainJob, phase: Phase, epochs: range, batch_size: int, width: int = 0
) -> tuple[list[Tensor], list[int]]:
    """Plan all steps of a phase, and count the leading rows that take each; the rows of a job are
    sorted by steps.

    Returns the samples' indices and places together, `[steps, rows, 2, minibatches, batch]`, their
    weights `[steps, rows, minibatches, batch]`, random numbers and views `[..., numbers]`. width:
    the least `batch`.
    """
    plans = [
        plan_steps(
            phase,
            epochs,
            batch_size,
            draws,
            row.federation,
            row.client,
            job.plan.local.steps,
            job.randoms,
        )
        for row, draws in zip(job.rows, job.draws, strict=True)
    ]
    counts = [len(plan.positions) for plan in plans]
    assert counts == sorted(counts, reverse=True), "the rows of a job are sorted by their steps"
    batch = max([width, *(plan.positions.shape[2] for plan in plans if len(plan.positions))])
    chosen, random, views = [], [], []
    for row, plan in zip(job.rows, plans, strict=True):
        short = batch - plan.positions.shape[2]
        indices = torch.where(
            plan.positions < 0, -1, row.federation.train[row.client][plan.positions]
        )
        chosen.append(F.pad(torch.stack([indices, plan.positions], 1), (0, short), value=-1))
        random.append(F.pad(plan.random, (0, 0, 0, short)))
        views.append(F.pad(plan.views, (0, 0, 0, short)))
    indices, weight = _real(_beside(chosen))
    parts = [indices, weight[:, :, 0], _beside(random), _beside(views)]
    return parts, [sum(n > step for n in counts) for step in range(counts[0])]


def evaluation_batches(
    federation: Federation, owned: Sequence[Tensor], random: Sequence[Tensor]
) -> Iterator[tuple[slice | Tensor, Batch]]:
    """Give rows of clients with a batch of each one's samples, until all that they own have been
    given.

    random: numbers of each one's samples, `[samples, numbers]`.
    """
    device = federation.x.device
    size = CHUNK if device.type == "cpu" else max(CHUNK, PASS // max(1, len(owned)))
    size = min(size, max([1, *map(len, owned)]))
    chunks = [F.pad(own, (0, -len(own) % size), value=-1).view(-1, size) for own in owned]
    counts = torch.tensor([len(own) for own in chunks])
    numbers = [
        F.pad(drawn, (0, 0, 0, -len(drawn) % size)).view(len(own), size, drawn.shape[1])
        for own, drawn in zip(chunks, random, strict=True)
    ]
    parts = [*_real(_beside(chunks)), _beside(numbers)]
    for step, (index, weight, drawn) in enumerate(
        zip(*(tree.send(part, device) for part in parts), strict=True)
    ):
        active = (counts > step).nonzero()[:, 0]
        leading = int(active[-1]) == len(active) - 1
        rows = slice(len(active)) if leading else tree.send(active, device)
        chosen, shares = index[rows], weight[rows]
        place = torch.arange(step * size, (step + 1) * size, device=device) * (shares > 0)
        x, y = federation.normalize(federation.x[chosen]), federation.y[chosen]
        yield rows, Batch(x, y, shares, drawn[rows], place)


def _beside(plans: Sequence[Tensor]) -> Tensor:
    """Stack plans `[own steps, ...]` on axis 1; rows that end early are filled with -1."""
    whole = plans[0].new_full((max(map(len, plans)), len(plans), *plans[0].shape[1:]), -1)
    for row, plan in enumerate(plans):
        whole[: len(plan), row] = plan
    return whole


def _real(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices with 0 in place of -1, and the weight that tells them apart."""
    return indices.clamp(min=0), (indices >= 0).float()
