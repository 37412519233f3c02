"""pFedFDA (arXiv:2411.00329): discriminant analysis, the search for beta, statistics."""

import math

import pytest
import torch

from fedpfl.engine.keys import Draws
from fedpfl.engine.training.shard import make_shard
from fedpfl.methods import PFedFDA
from fedpfl.methods.pfedfda import Features
from fedpfl.methods.shared.gaussian import pack_symmetric
from tests.conftest import CLASSES, assert_same, record_states, tiny
from tests.methods.reference.pfedfda import objective

UNIFORM = torch.full((CLASSES,), 1 / CLASSES, dtype=torch.float64)


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def spread(seed=0, width=12):
    """A symmetric positive definite matrix."""
    factor = draw(width, width, seed=seed)
    return factor @ factor.T / width + 0.1 * torch.eye(width, dtype=torch.float64)


def problem(samples=60, seed=0):
    """Features of unlike classes, and global statistics."""
    mean, cov = draw(CLASSES, 12, seed=seed), spread(seed)
    y = torch.arange(samples) % 3
    z = draw(CLASSES, 12, seed=seed + 1)[y] + 0.7 * draw(samples, 12, seed=seed + 2)
    return z, y, UNIFORM, mean, cov


@pytest.mark.parametrize(("seed", "single"), [(0, False), (2, True)])
def test_beta_is_better_than_a_half_and_than_its_neighbours(seed, single):
    z, y, prior, mean, cov = problem(seed=seed)
    zeros, samples = torch.zeros(2, dtype=torch.float64), Features(z, y, prior)
    beta = PFedFDA(single_beta=single)._search_beta(samples, (mean, cov), zeros)
    value = objective(z, y, prior, mean, cov, 2)
    least = value(beta)
    assert ((beta >= 0) & (beta <= 1)).all()
    assert not single or beta[0] == beta[1]
    assert least < value(torch.full((2,), 0.5, dtype=torch.float64))
    steps = [(0.02, 0.02), (-0.02, -0.02)]
    if not single:
        steps = [(0.02, 0.0), (-0.02, 0.0), (0.0, 0.02), (0.0, -0.02)]
    for step in steps:
        near = (beta + torch.tensor(step, dtype=torch.float64)).clamp(0, 1)
        assert value(near) >= least - 1e-6 * least.abs()


def test_without_a_class_of_enough_samples_beta_is_zero():
    z, _, prior, mean, cov = problem(samples=4)
    samples = Features(z, torch.tensor([0, 0, 1, 2]), prior)
    found = PFedFDA(folds=3)._search_beta(samples, (mean, cov), torch.full((2,), 0.7))
    assert found.tolist() == [0, 0]


def test_where_the_search_fails_the_last_beta_stays():
    z, y, prior, mean, cov = problem()
    last = torch.tensor([0.2, 0.9], dtype=torch.float64)
    for features, covariance in ((z, -cov), (z * math.nan, cov)):
        samples = Features(features, y, prior)
        assert torch.equal(PFedFDA()._search_beta(samples, (mean, covariance), last), last)


def test_a_covariance_without_regularisation_is_made_positive_definite():
    z, y, prior, mean, cov = problem(samples=6)  # fewer samples than features: singular
    known, samples = {"mean": mean, "cov": pack_symmetric(cov)}, Features(z, y, prior)
    got = PFedFDA(cov_reg=0.0)._fit_statistics(samples, known, torch.zeros(2), 1)
    assert torch.linalg.eigvalsh(got[1]).min() > 0


def test_features_are_judged_in_evaluation_mode(federation):
    net, method = tiny(norm=True), PFedFDA()
    state = record_states(method, net, federation)[-1]
    shard, client = make_shard(federation, 4, 32, Draws(0, "adapt", 1)), state.client(4)
    training, judging = (net.bind(state.server_buffers, training=t) for t in (True, False))
    assert_same(
        method.before_evaluation(state.server, client, training, shard),
        method.before_evaluation(state.server, client, judging, shard),
    )
    assert_same(training.buffers, state.server_buffers)
