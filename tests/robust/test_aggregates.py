"""Robust aggregates: beside plain loops; what f and f + 1 hostile uploads can do."""

import numpy as np
import pytest
import torch

from fedpfl.robust import defence
from tests.conftest import assert_same

GENERATOR = torch.Generator()
RULES = {
    "median": defence.Median(),
    "trimmed_mean": defence.TrimmedMean(f=2),
    "krum": defence.Krum(f=2),
    "multi_krum": defence.MultiKrum(f=2),
    "bulyan": defence.Bulyan(f=2),
    "geometric_median": defence.GeometricMedian(steps=500),
    "centered_clipping": defence.CenteredClipping(radius=1.5, steps=3),
    "norm_bound": defence.NormBound(radius=1.5, deviation=0.0),
    "flame": defence.Flame(noise=0.0),
}


def draw_rows(seed, clients=11, entries=6):
    return torch.from_numpy(np.random.default_rng(seed).normal(1.0, 1.0, (clients, entries)))


def combine(rule, rows):
    return rule.combine_rows(rows, GENERATOR)


# Plain loops


def loop_median(rows):
    values = []
    for column in rows.T:
        ordered = sorted(column)
        middle = len(ordered) // 2
        is_odd = len(ordered) % 2
        values.append(ordered[middle] if is_odd else (ordered[middle - 1] + ordered[middle]) / 2)
    return np.array(values)


def loop_trimmed_mean(rows, f=2):
    return np.array([np.mean(sorted(column)[f : len(column) - f]) for column in rows.T])


def loop_scores(rows, f=2):
    scores = []
    for i, row in enumerate(rows):
        gaps = sorted(np.sum((row - peer) ** 2) for j, peer in enumerate(rows) if i != j)
        scores.append((sum(gaps[: max(1, len(rows) - f - 2)]), sum(gaps)))
    return scores


def loop_krum(rows):
    scores = loop_scores(rows)
    return rows[scores.index(min(scores))]


def loop_multi_krum(rows, f=2):
    scores = loop_scores(rows)
    best = sorted(range(len(rows)), key=lambda i: scores[i])
    return np.mean(rows[best[: len(rows) - f]], axis=0)


def loop_bulyan(rows, f=2):
    remaining, selected = list(rows), []
    for _ in range(len(rows) - 2 * f):
        scores = loop_scores(np.array(remaining))
        selected.append(remaining.pop(scores.index(min(scores))))
    middle = loop_median(np.array(selected))
    values = []
    for column, center in zip(np.array(selected).T, middle, strict=True):
        nearest = sorted(column, key=lambda value, center=center: abs(value - center))
        values.append(np.mean(nearest[: len(selected) - 2 * f]))
    return np.array(values)


def loop_centered_clipping(rows, radius=1.5, steps=3):
    center = np.zeros(rows.shape[1])
    for _ in range(steps):
        moves = []
        for row in rows:
            length = np.sqrt(np.sum((row - center) ** 2))
            moves.append((row - center) * min(1, radius / length))
        center = center + np.mean(moves, axis=0)
    return center


LOOPS = {
    "median": loop_median,
    "trimmed_mean": loop_trimmed_mean,
    "krum": loop_krum,
    "multi_krum": loop_multi_krum,
    "bulyan": loop_bulyan,
    "centered_clipping": loop_centered_clipping,
    "norm_bound": lambda rows: loop_centered_clipping(rows, steps=1),
}


@pytest.mark.parametrize("name", LOOPS)
def test_aggregates_are_those_of_plain_loops(name):
    for seed in range(20):
        rows = draw_rows(seed, clients=11 + seed % 3)
        expected = torch.from_numpy(LOOPS[name](rows.numpy()))
        torch.testing.assert_close(combine(RULES[name], rows), expected)


def test_the_geometric_median_is_of_least_summed_distance():
    """No step into any direction comes nearer, and its own distances are those of its definition."""
    rows = draw_rows(3)
    point = combine(RULES["geometric_median"], rows)
    total = (rows - point).norm(dim=1).sum()
    for direction in torch.eye(6).double():
        for step in (-1e-3, 1e-3):
            assert (rows - point - step * direction).norm(dim=1).sum() > total
    pull = ((rows - point) / (rows - point).norm(dim=1, keepdim=True)).sum(0)
    assert float(pull.norm()) < 1e-5


def test_unset_radii_are_the_median_of_lengths():
    rows = draw_rows(0)
    radius = float(np.median(rows.norm(dim=1)))
    for kind in (defence.CenteredClipping, defence.NormBound):
        extra = {"deviation": 0.0} if kind is defence.NormBound else {}
        assert_same(combine(kind(**extra), rows), combine(kind(radius=radius, **extra), rows))


def test_noise_has_its_deviation():
    """Flame's is a share of the median length, here 200."""
    rows = torch.ones(3, 40_000)
    rules = {defence.NormBound(1e3, deviation=0.02): 0.02, defence.Flame(noise=0.5): 100}
    for rule, deviation in rules.items():
        noise = combine(rule, rows) - 1
        assert float(noise.std()) == pytest.approx(deviation, rel=0.02)
        assert abs(float(noise.mean())) < 5 * deviation / 200


@pytest.mark.parametrize("hostile", [-5.0, 1e30, float("nan")])
def test_flame_averages_the_clipped_majority_of_one_direction(hostile):
    """Five of eleven go elsewhere together; the median length is of all that are finite."""
    rows, is_hostile = 1 + draw_rows(7) / 10, torch.arange(11) % 5 < 2
    rows[is_hostile] = hostile * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0]).double()
    expected = np.zeros(6)
    limit = np.median(np.linalg.norm(rows.numpy(), axis=1))
    for row in rows[~is_hostile].numpy():
        expected += row * min(1, limit / np.linalg.norm(row)) / 6
    if np.isfinite(limit):
        torch.testing.assert_close(combine(RULES["flame"], rows), torch.from_numpy(expected))
    assert_same(defence.find_majority(rows), ~is_hostile)


BREAKDOWN = {
    **dict.fromkeys(("trimmed_mean", "krum", "multi_krum", "bulyan"), 2),
    **dict.fromkeys(("median", "geometric_median"), 5),
}


@pytest.mark.parametrize(("name", "most"), BREAKDOWN.items())
def test_as_many_as_promised_do_little(name, most):
    """However far away they are, the aggregate stays in a ball around the honest uploads."""
    rows = draw_rows(5)
    honest = rows[most:]
    radius = float((honest - honest.mean(0)).norm(dim=1).max())
    for distance in (1e1, 1e3, 1e6):
        # However few steps it takes, a geometric median begins among the honest.
        rule = defence.GeometricMedian(steps=1) if name == "geometric_median" else RULES[name]
        rows[:most] = distance
        moved = combine(rule, rows) - honest.mean(0)
        assert float(moved.norm()) <= 2 * radius
        assert bool(moved.isfinite().all())


@pytest.mark.parametrize(
    "name", [name for name in defence.DEFENCES if hasattr(defence.DEFENCES[name], "rule")]
)
def test_the_least_cohort_is_what_the_rule_can_work_with(name):
    rule = defence.DEFENCES[name](f=2)
    assert rule.least_clients == {"trimmed_mean": 5, "bulyan": 11}.get(name, 7)
    assert combine(rule, draw_rows(0, clients=rule.least_clients)).shape == (6,)
