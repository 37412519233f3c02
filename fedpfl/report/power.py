"""Statistics of few seeds: what they can tell, how many a difference needs, and intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from fedpfl.ground.decile import worst_decile_size

LEVEL = 0.05
"""Probability of a difference where only chance made it (two-sided)."""
POWER = 0.8
"""Probability of finding a difference that is there."""
MOST_SEEDS = 200
QUANTILES = 4000
RESAMPLES = 2000

Statistic = Callable[[np.ndarray], np.ndarray]
"""A number per row of `[rows, clients]`."""


def mean_of_clients(rows: np.ndarray) -> np.ndarray:
    """Compute the mean over clients of each row."""
    return rows.mean(1)


def mean_of_worst_decile(rows: np.ndarray) -> np.ndarray:
    """Compute the mean of the worst tenth of each row's clients, at least one."""
    return np.sort(rows, 1)[:, : worst_decile_size(rows.shape[1])].mean(1)


def compute_power(effect: float, pairs: int, level: float = LEVEL) -> float:
    """Compute the power of the paired t-test (Cohen 1988, section 2.3).

    Args:
        effect: the mean of the paired differences over their standard deviation.
        pairs: their number, at least 2.
        level: of the two-sided test.

    Returns:
        The probability that the test finds the difference.
    """
    from scipy import special  # which loads faster than scipy.stats

    freedom = pairs - 1
    critical = special.stdtrit(freedom, 1 - level / 2)
    # Given the sample's deviation, the mean is normal: average over quantiles of the deviation.
    # scipy's noncentral t is nan for large effects.
    shares = (np.arange(QUANTILES) + 0.5) / QUANTILES
    deviations = np.sqrt(2 * special.gammaincinv(freedom / 2, shares) / freedom)
    shift = effect * math.sqrt(pairs)
    rejected = special.ndtr(shift - critical * deviations)
    rejected += special.ndtr(-shift - critical * deviations)
    return float(rejected.mean())


def find_detectable_effect(pairs: int, level: float = LEVEL) -> float:
    """Find the effect, in standard deviations, that so many pairs find with POWER."""
    from scipy import optimize, special

    largest = 2 * special.stdtrit(pairs - 1, 1 - level / 2) / math.sqrt(pairs)
    return float(optimize.brentq(lambda e: compute_power(e, pairs, level) - POWER, 0, largest))


def count_needed_pairs(effect: float, level: float = LEVEL) -> int | None:
    """Count the pairs that find an effect with POWER; None for more than MOST_SEEDS."""
    for pairs in range(2, MOST_SEEDS + 1):
        if compute_power(abs(effect), pairs, level) >= POWER:
            return pairs
    return None


def student_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """Compute the t interval of the mean; nan for fewer than two values."""
    from scipy import special  # which loads faster than scipy.stats

    count = len(values)
    if count < 2:
        return math.nan, math.nan
    half_width = special.stdtrit(count - 1, 1 - level / 2) * np.std(values, ddof=1)
    half_width = float(half_width) / math.sqrt(count)
    mean = float(np.mean(values))
    return mean - half_width, mean + half_width


def hierarchical_interval(
    values_by_seed: Sequence[np.ndarray],
    statistic: Statistic = mean_of_clients,
    level: float = LEVEL,
) -> tuple[float, float]:
    """Compute an interval over seeds and clients by the hierarchical bootstrap.

    A resample draws seeds with replacement, then clients within each drawn seed (Davison and
    Hinkley 1997, section 3.8). With few seeds percentiles are too narrow; so the interval is the
    estimate plus and minus a t quantile times the resamples' standard deviation.

    Args:
        values_by_seed: the clients' values `[clients]` of each seed.
        statistic: of the clients of one seed; the estimate is its mean over seeds.
        level: 0.05 for a 95 % interval.

    Returns:
        The lower and the upper end. With one seed it covers the choice of clients alone.
    """
    from scipy import special

    # ---- Step 1: the statistic of each seed in each resample of its clients.
    generator = np.random.default_rng(0)
    seeds = len(values_by_seed)
    drawn_seeds = generator.integers(seeds, size=(RESAMPLES, seeds))
    resampled = np.empty((RESAMPLES, seeds))
    for seed, values in enumerate(values_by_seed):
        places = drawn_seeds == seed
        size = (int(places.sum()), len(values))
        resampled[places] = statistic(values[generator.integers(len(values), size=size)])

    # ---- Step 2: the interval around the estimate.
    estimates = [float(statistic(values[None])[0]) for values in values_by_seed]
    deviation = float(resampled.mean(1).std(ddof=1))
    freedom = len(values_by_seed[0]) - 1
    if seeds > 1:
        # Resamples of few seeds spread less than the seeds do.
        deviation = max(deviation, float(np.std(estimates, ddof=1)) / math.sqrt(seeds))
        freedom = seeds - 1
    if freedom < 1:
        return math.nan, math.nan
    half_width = float(special.stdtrit(freedom, 1 - level / 2)) * deviation
    estimate = float(np.mean(estimates))
    return estimate - half_width, estimate + half_width


def wilson_interval(correct: float, samples: int, level: float = LEVEL) -> tuple[float, float]:
    """Compute Wilson's interval (1927) of a share of few samples.

    Args:
        correct: how many of the samples are right.
        samples: their number, at least 1.
        level: 0.05 for a 95 % interval.

    Returns:
        The lower and the upper end, between 0 and 1.
    """
    from scipy import special

    z = float(special.ndtri(1 - level / 2))
    share = correct / samples
    centre = (share + z * z / (2 * samples)) / (1 + z * z / samples)
    spread = share * (1 - share) / samples + z * z / (4 * samples * samples)
    half_width = z * math.sqrt(spread) / (1 + z * z / samples)
    return centre - half_width, centre + half_width
