"""Intervals of one client's own score, from its test samples."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

LEVEL = 0.05
"""Of two-sided tests, and of what 95 % intervals leave out."""
LOW, HIGH = "_low", "_high"
"""Stand behind a score in clients.csv, at the ends of its interval."""


def wilson_interval(correct: Any, samples: Any, level: float = LEVEL) -> tuple[Any, Any]:
    """Compute Wilson's interval (1927) of a share of few samples.

    Args:
        correct: how many of the samples are right, a number or a tensor.
        samples: their number, at least 1.
        level: 0.05 for a 95 % interval.

    Returns:
        The lower and the upper end, between 0 and 1.
    """
    z = NormalDist().inv_cdf(1 - level / 2)
    share = correct / samples
    centre = (share + z * z / (2 * samples)) / (1 + z * z / samples)
    spread = share * (1 - share) / samples + z * z / (4 * samples * samples)
    half_width = z * spread**0.5 / (1 + z * z / samples)
    return centre - half_width, centre + half_width
