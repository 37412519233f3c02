"""How far a federation is from iid, in two numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Heterogeneity:
    """How much clients differ.

    Attributes:
        label_skew: Mean total variation distance between a client's labels and everybody's, from 0
            (iid) to 1; each client counts once.
        size_gini: Gini coefficient of the clients' numbers of samples, from 0 (all equal) to 1.
    """

    label_skew: float
    size_gini: float


def measure_heterogeneity(y: np.ndarray, parts: Sequence[np.ndarray]) -> Heterogeneity:
    """Measure how much the clients' training parts differ.

    Args:
        y: Labels of all samples, `[samples]`.
        parts: The sample numbers of each client; clients without samples are left out.
    """
    parts = [part for part in parts if len(part)]
    classes = int(y.max()) + 1
    counts = np.stack([np.bincount(y[part], minlength=classes) for part in parts]).astype(float)
    shares = counts / counts.sum(1, keepdims=True)
    overall = counts.sum(0) / counts.sum()
    label_skew = float(np.abs(shares - overall).sum(1).mean() / 2)
    return Heterogeneity(label_skew, gini_coefficient(counts.sum(1)))


def gini_coefficient(values: np.ndarray) -> float:
    """Return the mean absolute difference of all pairs over twice the mean."""
    ascending = np.sort(values)
    ranks = np.arange(1, len(values) + 1)
    weighted = float((ranks * ascending).sum())
    total = float(ascending.sum())
    return 2 * weighted / (len(values) * total) - (len(values) + 1) / len(values)
