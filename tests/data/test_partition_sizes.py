"""Clients of unequal sizes, and of a few classes cut by Dir(alpha): against their definitions."""

from dataclasses import asdict

import numpy as np
import pytest

from fedpfl.data.heterogeneity import gini_coefficient, measure_heterogeneity
from fedpfl.data.partition import SCHEMES
from fedpfl.data.partition.sizes import apportion
from fedpfl.ground.errors import FedpflError
from fedpfl.record import rundir
from tests.command import TINY, read_summary, run_command
from tests.data.test_partition import owned, sizes

Y = np.random.default_rng(0).integers(0, 10, 2_000)
CLIENTS = 20
quantity, extended_dirichlet = SCHEMES["quantity"], SCHEMES["extended_dirichlet"]


def label_counts(parts: list[np.ndarray], y: np.ndarray = Y) -> np.ndarray:
    return np.stack([np.bincount(y[indices], minlength=y.max() + 1) for indices in parts])


def test_sizes_follow_a_power_law():
    found = sizes(quantity(Y, CLIENTS, 3, sizes="power", spread=1.5, min_samples=5))
    weights = np.arange(1, CLIENTS + 1) ** -1.5
    exact = 5 + (len(Y) - 5 * CLIENTS) * weights / weights.sum()
    assert np.abs(np.sort(found)[::-1] - exact).max() < 1
    assert found.sum() == len(Y)


def test_sizes_are_lognormal():
    """The logarithm of what is above the least has the standard deviation that was asked for."""
    y = np.zeros(2_000_000, int)
    found = sizes(quantity(y, 2_000, 0, spread=0.7, min_samples=1))
    logarithms = np.log(found - 1 + 1e-9)
    assert logarithms.std() == pytest.approx(0.7, rel=0.05)
    centred = (logarithms - logarithms.mean()) / logarithms.std()
    assert abs((centred**3).mean()) < 0.15  # no skew: a normal distribution
    assert found.sum() == len(y)


def test_sizes_do_not_depend_on_the_label_skew():
    plain, skewed = (quantity(Y, CLIENTS, 4, alpha=alpha) for alpha in (None, 0.1))
    assert np.array_equal(sizes(plain), sizes(skewed))
    by_alpha = [
        measure_heterogeneity(label_counts(part.train)).label_skew for part in (plain, skewed)
    ]
    assert by_alpha[0] < 0.25 < 0.5 < by_alpha[1]
    everything = np.concatenate(owned(skewed))
    assert np.array_equal(np.sort(everything), np.arange(len(Y)))


def test_whole_numbers_are_apportioned_by_largest_remainders():
    assert apportion(np.array([5.0, 3.0, 2.0]), 7).tolist() == [4, 2, 1]  # 3.5, 2.1, 1.4
    assert apportion(np.array([1.0, 1.0, 1.0]), 2).tolist() == [1, 1, 0]


def test_each_client_holds_its_number_of_classes():
    parts = extended_dirichlet(Y, CLIENTS, 2, classes_per_client=3, alpha=5.0)
    assert all(len(np.unique(Y[indices])) <= 3 for indices in owned(parts))
    assert np.array_equal(np.sort(np.concatenate(owned(parts))), np.arange(len(Y)))
    holders = [sum(label in Y[indices] for indices in owned(parts)) for label in range(10)]
    assert set(holders) == {CLIENTS * 3 // 10}  # classes are dealt equally often


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"classes_per_client": 11},
            "classes_per_client must be at most the number of classes, 10",
        ),
        ({"min_samples": 200}, "with partition.min_samples=200 need 4000 samples"),
        ({"alpha": 0.01, "min_samples": 90, "max_attempts": 5}, "found no split in 5 attempts"),
    ],
)
def test_what_cannot_be_dealt_is_refused(options, text):
    with pytest.raises(FedpflError, match=text):
        extended_dirichlet(Y, CLIENTS, 0, **options)


def test_heterogeneity_by_hand():
    apart = measure_heterogeneity(np.array([[4, 0], [0, 4]]))
    assert (apart.label_skew, apart.size_gini) == (0.5, 0)
    alike = measure_heterogeneity(np.array([[1, 1], [1, 1], [0, 0]]))
    assert (alike.label_skew, alike.size_gini) == (0, 0)
    unequal = measure_heterogeneity(np.array([[1, 0], [3, 0]]))
    assert unequal.size_gini == pytest.approx(0.25)  # |1 - 3| over 2 x 2 clients x mean 2
    assert str(unequal) == "label skew 0.00, size Gini 0.25"


def test_ginis_coefficient_is_the_mean_difference_of_pairs():
    values = np.random.default_rng(1).exponential(size=50)
    pairs = np.abs(values[:, None] - values[None]).mean()
    assert gini_coefficient(values) == pytest.approx(pairs / (2 * values.mean()))


def test_header_summary_and_picture_say_how_far_from_iid(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(
        rundir, "partition_png", lambda counts, title, *names: titles.append(title) or b""
    )
    result = run_command(*TINY, "hydra.run.dir=run", "rounds=1", cwd=tmp_path)
    with np.load(tmp_path / "run" / "partition.npz") as archive:
        expected = measure_heterogeneity(archive["label_counts"])
    assert f"from iid    {expected} (0: none)" == (
        next(line for line in result.err.splitlines() if line.startswith("from iid"))
    )
    assert read_summary(tmp_path / "run")["heterogeneity"] == asdict(expected)
    assert titles[0].endswith(str(expected))
