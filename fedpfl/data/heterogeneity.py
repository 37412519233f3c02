"""How far a federation is from iid, in two numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Heterogeneity:
    """How much clients differ.

    Attributes:
        label_skew: Mean total variation distance between a client's labels and everybody's, from 0
            (iid) to 1; each client counts once. None where labels are no classes.
        size_gini: Gini coefficient of the clients' numbers of samples, from 0 (all equal) to 1.
    """

    label_skew: float | None
    size_gini: float

    def __str__(self) -> str:
        """Describe the measures in words."""
        if self.label_skew is None:
            return f"size Gini {self.size_gini:.2f}"
        return f"label skew {self.label_skew:.2f}, size Gini {self.size_gini:.2f}"


def measure_heterogeneity(label_counts: np.ndarray) -> Heterogeneity:
    """Measure how much clients differ in their labels and sizes.

    Args:
        label_counts: Samples by label, `[clients, classes]`; clients without samples are left out.
    """
    counts = label_counts[label_counts.sum(1) > 0].astype(float)
    sizes = counts.sum(1)
    overall = counts.sum(0) / sizes.sum()
    # Total variation: half the sum of differences, from 0 to 1.
    distances = np.abs(counts / sizes[:, None] - overall).sum(1) / 2
    return Heterogeneity(float(distances.mean()), gini_coefficient(sizes))


def gini_coefficient(values: np.ndarray) -> float:
    """Return the mean absolute difference of all pairs over twice the mean."""
    ascending = np.sort(values)
    ranks = np.arange(1, len(values) + 1)
    # In ascending order the pairs' differences are a sum by rank.
    weighted = float((ranks * ascending).sum())
    total = float(ascending.sum())
    return 2 * weighted / (len(values) * total) - (len(values) + 1) / len(values)
