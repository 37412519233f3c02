"""The samples of many clients' steps laid side by side, `[steps, rows, ...]`.

Short steps are padded with weight 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedpfl.data.federation import Federation
from fedpfl.engine.training.jobs import TrainJob
from fedpfl.engine.training.minibatches import plan_steps
from fedpfl.ground import tree
from fedpfl.ground.tasks import SURVIVAL
from fedpfl.methods import LONGEST_CHUNK, Batch, Phase

CHUNK = 128  # samples per client and forward pass of an evaluation, at least
PASS = 16_384  # and of all clients together, where a GPU has room


def plan_training_steps(
    job: TrainJob, phase: Phase, epochs: range, width: int = 0
) -> tuple[list[Tensor], list[int]]:
    """Plan all steps of a phase, and count the leading rows that take each.

    Args:
        job: Its rows are sorted by their steps.
        phase: Of the job.
        epochs: Their numbers.
        width: The least `batch`.

    Returns:
        The counts, behind the samples' indices and places together `[steps, rows, 2, minibatches,
        batch]`, their weights `[steps, rows, minibatches, batch]`, random numbers and views `[...,
        numbers]`.
    """
    # ---- Step 1: each row's own plan
    plans = [
        plan_steps(job.sample_source(row, phase), phase, epochs) for row in range(len(job.rows))
    ]
    counts = [len(plan.positions) for plan in plans]
    assert counts == sorted(counts, reverse=True), "the rows of a job are sorted by their steps"

    # ---- Step 2: minibatches are padded to the largest.
    batch = max([width, *(plan.positions.shape[2] for plan in plans if len(plan.positions))])
    numbers = []
    random = []
    views = []
    for row, plan in zip(job.rows, plans, strict=True):
        missing = batch - plan.positions.shape[2]
        samples = row.federation.train[row.client][plan.positions]
        indices = torch.where(plan.positions < 0, -1, samples)
        numbers.append(F.pad(torch.stack([indices, plan.positions], 1), (0, missing), value=-1))
        random.append(F.pad(plan.random, (0, 0, 0, missing)))
        views.append(F.pad(plan.views, (0, 0, 0, missing)))

    # ---- Step 3: and rows to the longest.
    indices, weight = _without_padding_marks(pad_sequence(numbers, padding_value=-1))
    parts = [indices, weight[:, :, 0], pad_sequence(random), pad_sequence(views)]
    active_rows = [sum(count > step for count in counts) for step in range(counts[0])]
    return parts, active_rows


def evaluation_batches(
    federation: Federation, samples: Sequence[Tensor], random: Sequence[Tensor]
) -> Iterator[tuple[slice | Tensor, Batch]]:
    """Yield rows of clients with a batch of each one's samples.

    Args:
        federation: Has the samples.
        samples: Indices of each client's samples.
        random: Numbers of each client's samples, `[samples, numbers]`.
    """
    # ---- Step 1: each client's samples are cut into chunks of one size.
    device = federation.x.device
    size = CHUNK
    if federation.task is SURVIVAL:
        # Its loss compares the samples of a chunk, as on the loop backend.
        size = LONGEST_CHUNK
    elif device.type != "cpu":
        size = max(CHUNK, PASS // max(1, len(samples)))
    sizes = torch.tensor([len(indices) for indices in samples])
    longest = int(sizes.max())
    size = min(size, max(1, longest))
    width = longest + -longest % size
    parts = []
    for part in (*_without_padding_marks(_pad_rows(samples, -1)), _pad_rows(random, 0)):
        padded = F.pad(part, (*[0, 0] * (part.dim() - 2), 0, width - longest))
        parts.append(padded.unflatten(1, (width // size, size)).transpose(0, 1))

    # ---- Step 2: a chunk of each client that still has one
    steps = zip(*[tree.send(part, device) for part in parts], strict=True)
    for step, (index, weight, numbers) in enumerate(steps):
        active = (sizes > step * size).nonzero()[:, 0]
        # A slice is a view, an index tensor a copy of models.
        is_leading = int(active[-1]) == len(active) - 1
        rows = slice(len(active)) if is_leading else tree.send(active, device)
        batch_indices = index[rows]
        batch_weight = weight[rows]
        positions = torch.arange(step * size, (step + 1) * size, device=device)
        yield (
            rows,
            Batch(
                federation.normalize(federation.x[batch_indices]),
                federation.y[batch_indices],
                batch_weight,
                numbers[rows],
                positions * (batch_weight > 0),
            ),
        )


def _pad_rows(rows: Sequence[Tensor], value: float) -> Tensor:
    return pad_sequence(list(rows), batch_first=True, padding_value=value)


def _without_padding_marks(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices with 0 in place of -1, and the weight that tells them apart."""
    return indices.clamp(min=0), (indices >= 0).float()
