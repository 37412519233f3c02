"""FLOCO and FLOCO+ (arXiv:2403.03333): endpoints, points of the simplex, the projection."""

import dataclasses
import math

import pytest
import torch

from fedpfl import models
from fedpfl.engine import make_initial_state
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import Batch, Floco, FlocoPlus
from fedpfl.methods.shared.simplex import client_centres, params_at
from tests.conftest import COHORTS, CPU, assert_close, assert_same, record_states

NAME = "classifier.weight"


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def point(method, client, seed=0):
    """The alpha of one step."""
    random = torch.rand(method.endpoints + 1, generator=torch.Generator().manual_seed(seed))
    return method._point(Batch(torch.empty(0), torch.empty(0), random=random[None]), client)


def state_of(beta, projected=True):
    return {"beta": torch.tensor(beta), "projected": torch.tensor(projected)}


def test_endpoints_are_the_networks_head_and_xavier_normals(net):
    server, client = Floco(endpoints=6).init(net.params, net.parts)
    ends = server["endpoints"][NAME]
    assert_same(ends[0], net.params[NAME])
    assert client["beta"].tolist() == pytest.approx([1 / 6] * 6)
    few = Floco(endpoints=3).init(net.params, net.parts)[0]["endpoints"][NAME]
    assert_same(ends[:3], few)
    big = models.build_network("cnn4", (3, 32, 32), 10, 5)
    ends = Floco().init(big.params, big.parts)[0]["endpoints"]["classifier.weight"]
    for end in ends[1:]:
        assert float(end.std()) == pytest.approx((2 / 522) ** 0.5, rel=0.05)
    other = models.build_network("cnn4", (3, 32, 32), 10, 6)
    assert not torch.equal(
        ends[1], Floco().init(other.params, other.parts)[0]["endpoints"]["classifier.weight"][1]
    )


def test_points_may_stay_inside_the_simplex():
    """The published code leaves it."""
    method, beta = Floco(endpoints=4, rho=0.3), [0.7, 0.1, 0.1, 0.1]
    inside = dataclasses.replace(method, stay_inside=True)
    free, near = (
        torch.stack([point(own, state_of(beta), seed) for seed in range(50)])
        for own in (method, inside)
    )
    assert (free < 0).any()
    assert (near >= 0).all()
    assert_close(near.sum(1), torch.ones(50), atol=1e-6)


def test_numbers_at_the_ends_of_their_range_give_points():
    for value in (0.0, 1 - 2**-24, 0.5):
        batch = Batch(torch.empty(0), torch.empty(0), random=torch.full((1, 4), value))
        for projected in (False, True):
            alpha = Floco(endpoints=3)._point(batch, state_of([1 / 3] * 3, projected))
            assert alpha.isfinite().all(), (value, projected)


def test_fewer_clients_than_endpoints():
    beta = client_centres(draw(2, 30), 5)
    assert_close(beta.sum(1), torch.ones(2, dtype=torch.float64), atol=1e-9)
    assert not torch.equal(beta[0], beta[1])


def test_who_never_took_part_has_the_initial_private_copy_or_the_common_simplex(net, federation):
    for cold_start in ("initial", "global"):
        method = FlocoPlus(endpoints=3, cold_start=cold_start)
        first, *_, last = record_states(method, net, federation, COHORTS[:2])
        source = first.server if cold_start == "initial" else last.server
        never = last.client(7)
        assert_same(method.personal(last.server, never), params_at(source, never["beta"]))
        assert_same(
            method.personal(last.server, last.client(2)),
            params_at(last.client(2)["v"], never["beta"]),
        )


def test_numbers_that_are_not_finite_are_one_line(net, federation):
    method = Floco(endpoints=3, tau=1)
    state = make_initial_state(method, net, 10, CPU)
    uploads = tree.repeat(state.server, 10)
    uploads["endpoints"][NAME][4] = math.nan
    with pytest.raises(FedpflError, match=r"not finite; lower local\.lr"):
        method.turns(1, COHORTS[1], 10, None)[0].survey(state.server, state.clients, uploads)
