"""FedPAC (arXiv:2306.11867): mixtures of heads, and classes that nobody has."""

import dataclasses

import pytest
import torch

from fedpfl.methods import FedPAC
from fedpfl.methods.fedpac import minimal_shares, mixture_shares
from tests.conftest import CLASSES, COHORTS, assert_close, record_states


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("count", "width"), [(1, 3), (2, 5), (5, 2), (10, 60), (40, 7)])
def test_the_least_shares_meet_the_optimality_conditions(seed, count, width):
    factor = draw(count, width, seed=seed)
    quadratic = factor @ factor.T + torch.diag(draw(count, seed=seed + 50).abs() * 0.1)
    shares = minimal_shares(quadratic)
    slope, value = quadratic @ shares, shares @ quadratic @ shares
    assert (shares >= 0).all()
    assert float(shares.sum()) == pytest.approx(1, abs=1e-12)
    assert (slope >= value * (1 - 1e-6)).all()  # nothing to gain anywhere
    assert_close(
        {"": slope[shares > 1e-9]}, {"": value.expand(int((shares > 1e-9).sum()))}, rtol=1e-6
    )
    others = [
        torch.full((count,), 1 / count, dtype=torch.float64),
        *torch.eye(count, dtype=torch.float64),
    ]
    for other in others:
        assert value <= other @ quadratic @ other * (1 + 1e-9)


def test_without_any_error_heads_are_shared_alike():
    shares = mixture_shares(
        torch.zeros(4, CLASSES, 12, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    )
    assert_close({"": shares}, {"": torch.full((4, 4), 0.25, dtype=torch.float64)})


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_diverged_statistics_raise_nothing_here(value):
    """Whoever plays the round says which client diverged."""
    means, variance = draw(3, CLASSES, 12), draw(3, seed=1).abs()
    for leaf in (means, variance):
        broken = leaf.clone()
        broken.view(-1)[-1] = value
        shares = (
            mixture_shares(broken, variance) if leaf is means else mixture_shares(means, broken)
        )
        assert_close({"": shares.sum(1)}, {"": torch.ones(3, dtype=torch.float64)}, atol=1e-12)


def test_a_class_that_nobody_has_loses_its_prototype_or_keeps_it(net, federation):
    y = federation.y.clone()
    for client in (1, 8):
        y[federation.train[client]] = 0
    federation = dataclasses.replace(federation, y=y)
    for keep in (False, True):
        method = FedPAC(keep_prototypes=keep)
        first, second = record_states(method, net, federation, [COHORTS[0], [1, 8]])[1:]
        assert first.server["prototypes"]["seen"].all()
        assert second.server["prototypes"]["seen"].tolist() == [True] + [keep] * 4
        if keep:
            old, new = (state.server["prototypes"]["mean"] for state in (first, second))
            assert torch.equal(old[1:], new[1:])
            assert not torch.equal(old[0], new[0])
