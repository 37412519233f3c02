"""Statistics of few seeds: their power, how many a difference needs, and intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedpfl.ground.decile import worst_decile_size
from fedpfl.ground.intervals import LEVEL
from fedpfl.report.table import confidence_half_width, mean_and_std

POWER = 0.8
"""Probability of finding a difference that is there."""
MOST_SEEDS = 200
QUANTILES = 4000
RESAMPLES = 2000
_HALF_WIDTH = "half-width of the 95 % confidence interval"
INTERVAL_TEXTS = {
    "seed": f"{_HALF_WIDTH} (Student's t)",
    "client": f"{_HALF_WIDTH} for the choice of clients (bootstrap over clients of these seeds)",
    "both": f"{_HALF_WIDTH} (bootstrap over seeds and clients)",
}

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


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """Compute the 95 % t interval of the mean; nan for fewer than two values."""
    mean, std = mean_and_std(values)
    half_width = confidence_half_width(std, len(values))
    return mean - half_width, mean + half_width


def hierarchical_interval(
    values_by_seed: Sequence[np.ndarray],
    statistic: Statistic = mean_of_clients,
    draws_seeds: bool = True,
) -> tuple[float, float]:
    """Compute an interval over seeds and clients by the hierarchical bootstrap.

    A resample draws seeds with replacement, then clients within each drawn seed (Davison and
    Hinkley 1997, section 3.8). With few seeds percentiles are too narrow; so the interval is the
    estimate plus and minus a t quantile times the resamples' standard deviation.

    Args:
        values_by_seed: the clients' values `[clients]` of each seed.
        statistic: of the clients of one seed; the estimate is its mean over seeds.
        draws_seeds: False holds the seeds, so that it covers the choice of clients alone, as it
            does with one seed.

    Returns:
        The lower and the upper end of a 95 % interval.
    """
    from scipy import special

    # ---- Step 1: the statistic of each seed in each resample of its clients.
    generator = np.random.default_rng(0)
    seeds = len(values_by_seed)
    drawn_seeds = generator.integers(seeds, size=(RESAMPLES, seeds))
    if not draws_seeds:
        drawn_seeds[:] = range(seeds)
    resampled = np.empty((RESAMPLES, seeds))
    for seed, values in enumerate(values_by_seed):
        places = drawn_seeds == seed
        size = (int(places.sum()), len(values))
        resampled[places] = statistic(values[generator.integers(len(values), size=size)])

    # ---- Step 2: the interval around the estimate.
    estimates = [float(statistic(values[None])[0]) for values in values_by_seed]
    deviation = float(resampled.mean(1).std(ddof=1))
    freedom = len(values_by_seed[0]) - 1
    if seeds > 1 and draws_seeds:
        # Resamples of few seeds spread less than the seeds do.
        deviation = max(deviation, float(np.std(estimates, ddof=1)) / math.sqrt(seeds))
        freedom = seeds - 1
    if freedom < 1:
        return math.nan, math.nan
    half_width = float(special.stdtrit(freedom, 1 - LEVEL / 2)) * deviation
    estimate = float(np.mean(estimates))
    return estimate - half_width, estimate + half_width


def half_width_over_clients(
    values_by_seed: Sequence[np.ndarray], is_of_worst: bool, interval: str
) -> float:
    """Return half the interval of clients' mean or worst tenth, nan without any.

    Args:
        values_by_seed: the clients' values of each seed.
        is_of_worst: whether it is about the worst tenth.
        interval: of INTERVAL_TEXTS: `client` or `both`.
    """
    if not values_by_seed or not all(map(len, values_by_seed)):
        return math.nan
    statistic = mean_of_worst_decile if is_of_worst else mean_of_clients
    low, high = hierarchical_interval(values_by_seed, statistic, draws_seeds=interval == "both")
    return (high - low) / 2


def describe_interval(caption: str, interval: str) -> str:
    """Name the interval in a caption, in place of the deviation."""
    if not interval:
        return caption
    plain_caption = caption.replace(" and sample standard deviation", "")
    return f"{plain_caption} In square brackets: {INTERVAL_TEXTS[interval]}."


class SeedScore(NamedTuple):
    """Hold a score over seeds: its mean, sample standard deviation and number of seeds."""

    mean: float
    deviation: float
    seeds: int


def compute_games_howell_p(a: SeedScore, b: SeedScore, rivals: int) -> float:
    """Compute the p value of a difference by the test of Games and Howell (1976).

    It takes spreads for unequal and corrects for all pairs.

    Args:
        a: a score.
        b: another score.
        rivals: how many scores are compared with each other.

    Returns:
        The p value; nan where neither score has a spread.
    """
    variances = [one.deviation**2 / one.seeds for one in (a, b)]
    if min(a.seeds, b.seeds) < 2 or not sum(variances) > 0:
        return math.nan
    from scipy import stats  # slow to load

    parts = [v * v / (one.seeds - 1) for v, one in zip(variances, (a, b), strict=True)]
    error = math.sqrt(sum(variances) / 2)
    freedom = sum(variances) ** 2 / sum(parts)
    return float(stats.studentized_range.sf(abs(a.mean - b.mean) / error, rivals, freedom))


def number_groups(scores: Sequence[SeedScore]) -> list[int]:
    """Number the groups of scores, the best first: a group's members do not differ from its first.

    Two scores differ where Games and Howell's p is below LEVEL.
    """
    numbers: list[int] = []
    first = 0
    for place, score in enumerate(scores):
        if place and compute_games_howell_p(scores[first], score, len(scores)) < LEVEL:
            first = place
        is_first = first == place
        numbers.append(numbers[-1] + is_first if numbers else 1)
    return numbers


def describe_parting(names: Sequence[str], gap: float, deviation: float) -> str:
    """Describe the seeds that would part the first two methods.

    Args:
        names: of the two.
        gap: the difference of their means.
        deviation: of their difference over seeds.
    """
    text = f"{names[0]} and {names[1]}, the first two, differ by {abs(gap):.3g}"
    if not deviation > 0:
        return f"{text}, without a spread over seeds to tell how many would part them."
    needed = count_needed_pairs(gap / deviation) or f"more than {MOST_SEEDS}"
    text += f" with a deviation of {deviation:.3g}"
    return f"{text}: {needed} seeds would part them ({POWER:.0%} power)."
