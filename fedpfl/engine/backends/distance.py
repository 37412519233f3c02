"""How far two answers to a call lie apart."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fedpfl.engine.calls import Participation
from fedpfl.ground import tree
from fedpfl.ground.tree import Tree


def answer_distance(answer: Any, reference: Any) -> float:
    """Measure the distance of two answers: 0 if equal, about 1 if one did not train.

    Uploads and states are compared by their distance, in shares of the spread of the reference's
    clients; losses by their relative difference. Values that are not finite must be so in both.
    """
    # ---- Step 1: losses and trees to compare
    losses = [(answer.loss, reference.loss)]
    trees: list[tuple[Tree, Tree]] = []
    if isinstance(reference, Participation):
        for counts, other_counts in (
            (answer.before, reference.before),
            (answer.after, reference.after),
        ):
            losses.append((counts.loss / counts.total, other_counts.loss / other_counts.total))
        trees = [
            (answer.uploads, reference.uploads),
            (answer.client_states, reference.client_states),
        ]

    # ---- Step 2: losses, by their relative difference; 0.1 keeps small ones from counting much.
    distances: list[Tensor] = []
    for pair in losses:
        loss, other_loss = _both_finite(pair)
        distances.append(((loss - other_loss).abs() / (other_loss.abs() + 0.1)).max())

    # ---- Step 3: uploads and states, in shares of how far clients lie apart.
    for one, other in trees:
        sums = []
        for pair in zip(tree.leaves(one), tree.leaves(other), strict=True):
            a, b = _both_finite(pair)
            parts = (a - b, b - b.mean(0), b)
            sums.append(torch.stack([part.square().sum() for part in parts]))
        if sums:
            distance, spread, size = torch.stack(sums).sum(0)
            # The size keeps the distance small where all clients of the reference are alike.
            distances.append((distance / (spread + 1e-6 * size).clamp(min=1e-30)).sqrt())
    return max(map(float, distances))


def _both_finite(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return both in float64, 0 where neither is finite, and infinity where one is."""
    one, other = (part.double() for part in pair)
    is_alike = one.isfinite() == other.isfinite()
    one = one.nan_to_num(0, 0, 0)
    other = other.nan_to_num(0, 0, 0)
    # Where one alone is finite, its distance from the other is infinite.
    return torch.where(is_alike, one, math.inf), other
