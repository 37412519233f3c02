"""FLOCO and FLOCO+ (arXiv:2403.03333): points of the simplex, the projection, FedAvg and Ditto as
limits.
"""

import dataclasses
import math

import pytest
import torch
from torch.func import grad

from fedpfl import models
from fedpfl.engine import make_backend, make_initial_state
from fedpfl.engine.calls import TrainCall
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import Batch, Floco, FlocoPlus
from fedpfl.methods.shared.simplex import (
    client_centres,
    params_at,
    principal_components,
    project_to_simplex,
)
from tests.conftest import (
    CLASSES,
    COHORTS,
    CPU,
    LOCAL,
    as_engine,
    assert_close,
    assert_same,
    client_row,
    participate,
    record_rounds,
    record_states,
    tiny,
    with_client_states,
)

NAME = "classifier.weight"
EVERYONE = list(range(10))


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def point(method, client, seed=0):
    """The alpha of one step."""
    random = torch.rand(method.endpoints + 1, generator=torch.Generator().manual_seed(seed))
    return method._point(Batch(torch.empty(0), torch.empty(0), random=random[None]), client)


def state_of(beta, projected=True):
    return {"beta": torch.tensor(beta), "projected": torch.tensor(projected)}


# One endpoint, equal endpoints


def test_of_equal_endpoints_every_point_is_the_same(net):
    equal = {"shared": {}, "endpoints": {NAME: net.params[NAME].expand(4, -1, -1)}}
    for seed in range(5):
        alpha = draw(4, seed=seed).float().softmax(0)
        assert_close(params_at(equal, alpha)[NAME], net.params[NAME], atol=1e-7)


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


def test_making_endpoints_leaves_the_global_generator_alone(net):
    before = torch.get_rng_state()
    Floco().init(net.params, net.parts)
    assert torch.equal(before, torch.get_rng_state())


# The random point


def test_before_the_projection_points_are_uniform_on_the_simplex():
    method = Floco(endpoints=4)
    points = torch.stack([point(method, state_of([0.25] * 4, False), seed) for seed in range(4000)])
    assert (points >= 0).all()
    assert_close(points.sum(1), torch.ones(4000), atol=1e-6)
    # A flat Dirichlet of four: mean 1/4, variance 3/80, P(first < 1/2) = 1 - (1/2)^3.
    assert_close(points.mean(0), torch.full((4,), 0.25), atol=0.01)
    assert_close(points.var(0), torch.full((4,), 3 / 80), atol=0.003)
    assert float((points[:, 0] < 0.5).float().mean()) == pytest.approx(7 / 8, abs=0.02)


def test_after_it_points_lie_around_the_centre():
    method, beta = Floco(endpoints=4, rho=0.3), [0.7, 0.1, 0.1, 0.1]
    points = torch.stack([point(method, state_of(beta), seed) for seed in range(2000)])
    away = (points - torch.tensor(beta)).abs().sum(1)
    assert (away <= 0.3 + 1e-6).all()
    assert float(away.mean()) == pytest.approx(0.15, abs=0.01)  # r is uniform in [0, rho)
    assert (points < 0).any()  # the published code leaves the simplex
    inside = torch.stack(
        [
            point(dataclasses.replace(method, stay_inside=True), state_of(beta), s)
            for s in range(500)
        ]
    )
    assert (inside >= 0).all()
    assert_close(inside.sum(1), torch.ones(500), atol=1e-6)


def test_a_radius_of_zero_is_the_centre():
    for seed in range(3):
        assert_close(
            point(Floco(endpoints=3, rho=0.0), state_of([0.5, 0.3, 0.2]), seed),
            torch.tensor([0.5, 0.3, 0.2]),
        )


def test_numbers_at_the_ends_of_their_range_give_points(net):
    for value in (0.0, 1 - 2**-24, 0.5):
        batch = Batch(torch.empty(0), torch.empty(0), random=torch.full((1, 4), value))
        for projected in (False, True):
            alpha = Floco(endpoints=3)._point(batch, state_of([1 / 3] * 3, projected))
            assert alpha.isfinite().all(), (value, projected)


def test_an_endpoints_gradient_is_its_share_of_the_heads(net, federation):
    """And the shares, weighted by ones, add up to the gradient's sum."""
    method = Floco(endpoints=4)
    server, client = method.init(net.params, net.parts)
    x, y = federation.normalize(federation.x[:30]), federation.y[:30]
    batch = Batch(x, y, random=torch.rand(1, 5, generator=torch.Generator().manual_seed(3)))
    bound, alpha = net.bind({"main": {}}), method._point(batch, client)
    slopes = grad(lambda s: method.loss(server, client, bound, s, batch))(server)["endpoints"][NAME]

    def loss_of_head(weight):
        return torch.nn.functional.cross_entropy(bound({**server["shared"], NAME: weight}, x), y)

    head = grad(loss_of_head)(params_at(server, alpha)[NAME])
    assert_close(slopes, alpha.view(-1, 1, 1) * head, atol=1e-7)
    assert float(slopes.sum()) == pytest.approx(float(head.sum()), abs=1e-6)


# The projection


@pytest.mark.parametrize("total", [0.01, 0.5, 1.0])
def test_the_nearest_point_of_a_simplex(total):
    for seed in range(20):
        point = draw(6, seed=seed)
        got = project_to_simplex(point, total)
        assert (got >= 0).all()
        assert float(got.sum()) == pytest.approx(total, abs=1e-12)
        # Optimality: where it is positive, point - got is one number, elsewhere it is no more than
        # that.
        gap = point - got
        assert_close(gap[got > 0], gap.amax().expand(int((got > 0).sum())), atol=1e-12)
    assert_close(project_to_simplex(torch.tensor([0.2, 0.3, 0.5])), torch.tensor([0.2, 0.3, 0.5]))


def test_components_are_those_of_the_covariance():
    points = draw(12, 7) * torch.arange(1, 8)
    got = principal_components(points, 3)
    centred = points - points.mean(0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    for k in range(3):
        wanted = centred @ vectors[:, -1 - k]
        sign = torch.sign((wanted * got[:, k]).sum())
        assert_close(got[:, k], sign * wanted, atol=1e-9)
        loading = centred.T @ got[:, k]
        assert loading[loading.abs().argmax()] > 0
    assert not principal_components(points[:3], 5)[
        :, 3:
    ].any()  # of three points there are at most three


def test_centres_are_points_of_the_simplex_that_lie_apart():
    points = torch.cat([draw(5, 40, seed=k) * 0.1 + 5 * draw(40, seed=90 + k) for k in range(3)])
    beta = client_centres(points, 4)
    assert (beta >= 0).all()
    assert_close(beta.sum(1), torch.ones(15, dtype=torch.float64), atol=1e-9)
    distance = torch.cdist(beta, beta)
    same = torch.block_diag(*[torch.ones(5, 5)] * 3) > 0
    assert distance[~same].mean() > 1.5 * distance[same].mean()


def test_the_scale_is_that_of_least_energy():
    points, count = draw(8, 20), 3
    kappa, best, least = principal_components(points, count), None, math.inf
    for z in torch.linspace(1e-4, 1, 1000, dtype=torch.float64):
        beta = torch.stack([project_to_simplex(own, z) / z for own in kappa])
        energy = float(torch.pdist(beta).clamp(min=1e-4).pow(-2).mean().log())
        if energy < least:
            best, least = beta, energy
    assert_close(client_centres(points, count), best, atol=1e-9)


def test_centres_ignore_a_common_shift_and_keep_clients_in_order():
    points = draw(9, 30)
    beta = client_centres(points, 4)
    assert_close(client_centres(points + 10 * draw(30, seed=5), 4), beta, atol=1e-9)
    order = torch.tensor([3, 1, 8, 0, 2, 7, 6, 4, 5])
    assert_close(client_centres(points[order], 4), beta[order], atol=1e-9)


def test_fewer_clients_than_endpoints():
    beta = client_centres(draw(2, 30), 5)
    assert_close(beta.sum(1), torch.ones(2, dtype=torch.float64), atol=1e-9)
    assert not torch.equal(beta[0], beta[1])


def test_the_projection_changes_centres_alone(backend, net, federation):
    method = Floco(endpoints=3, tau=1)
    states = record_states(method, net, federation, engine=backend)
    before, after = states[1], states[2]
    assert not before.clients["projected"].any()
    assert after.clients["projected"].all()
    assert_same(after.clients["beta"], states[3].clients["beta"])
    assert len(after.clients["beta"].unique(dim=0)) > 5
    runner = make_backend(as_engine(backend), net, CPU)
    part = runner.participate(
        TrainCall(method, federation, before, EVERYONE, LOCAL, Draws(0, "gather", 2))
    )
    turn = method.turns(1, COHORTS[1], 10, None)[0]
    assert turn.clients == EVERYONE
    server, client = turn.survey(before.server, before.clients, part.uploads)
    assert_same(server, before.server)
    assert_same(client["beta"], after.clients["beta"])
    assert set(client) == set(before.clients)
    points = part.uploads["endpoints"][NAME].flatten(1).double()
    assert_close(client["beta"], client_centres(points, 3).float())
    # Round 2 itself goes on from the model before it.
    alone = runner.participate(
        TrainCall(
            method,
            federation,
            with_client_states(before, client=client),
            COHORTS[1],
            LOCAL,
            Draws(0, "train", 2),
        )
    )
    shares = federation.train_sizes[COHORTS[1]].double()
    weight = (shares / shares.sum()).float()
    assert_same(tree.mean(alone.uploads, weight), after.server)


def test_the_projection_leaves_private_copies_and_their_statistics_alone(backend, federation):
    """Of FLOCO+ clients that only took part in the gathering, not in the round after it."""
    method = FlocoPlus(endpoints=3, tau=1, pers_epochs=1)
    before, after = record_states(method, tiny(norm=True), federation, COHORTS[:2], engine=backend)[
        1:
    ]
    for client in set(EVERYONE) - set(COHORTS[1]):
        old, new = before.client(client), after.client(client)
        for part in ("v", "participated", "trained"):
            assert_same({part: old[part]}, {part: new[part]})
        assert bool(new["projected"])
        assert not torch.equal(old["beta"], new["beta"])
        assert_same(
            client_row(before.client_buffers, client), client_row(after.client_buffers, client)
        )


def test_before_the_projection_clients_are_judged_at_the_centre_and_after_it_at_their_own(
    net, federation
):
    method = Floco(endpoints=3, tau=1)
    states = record_states(method, net, federation)
    model = method.personal(states[1].server, states[1].client(0))
    assert_close(model[NAME], states[1].server["endpoints"][NAME].mean(0), atol=1e-7)
    never = states[2].client(7)  # was not sampled yet, but took part in the projection
    model = method.personal(states[2].server, never)
    assert_close(
        model[NAME],
        torch.einsum("j,jcd->cd", never["beta"], states[2].server["endpoints"][NAME]),
        atol=1e-6,
    )


# FLOCO+


def test_the_private_copy_does_not_change_the_simplex(net, federation):
    plain = record_states(Floco(endpoints=3, tau=1), net, federation)[-1]
    for epochs in (1, 3):
        method = FlocoPlus(endpoints=3, tau=1, pers_epochs=epochs)
        plus = record_states(method, net, federation)[-1]
        assert_same(plus.server, plain.server)
        assert_same(plus.clients["beta"], plain.clients["beta"])
        judged = method.personal(plus.server, client_row(plus.clients, 2))
        assert_close(
            judged, params_at(client_row(plus.clients["v"], 2), plus.clients["beta"][2]), atol=1e-7
        )


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


def test_without_a_pull_the_private_copy_is_local_training(net, federation):
    """From the initial model, at the points that a FLOCO client would draw."""
    state = make_initial_state(Floco(endpoints=3), net, 10, CPU)
    plus = participate(
        FlocoPlus(endpoints=3, pers_epochs=2, lam=0.0),
        net,
        federation,
        make_initial_state(FlocoPlus(endpoints=3, pers_epochs=2), net, 10, CPU),
        [0],
    )
    plain = participate(Floco(endpoints=3), net, federation, state, [0])
    assert_same(tree.take(plus.client_states["v"], 0), tree.take(plain.uploads, 0))


# The rest


def test_what_travels(net, federation):
    big = models.build_network("cnn4", (3, 32, 32), 10, 0)
    server, _ = Floco().init(big.params, big.parts)
    assert tree.size(server) == 873_408 + 51_200 + 10
    assert tree.size(server) == 924_618
    outcomes = record_rounds(Floco(endpoints=3, tau=1), net, federation, COHORTS)[1]
    size = tree.size(net.params) + 2 * CLASSES * 12
    assert [o.traffic.values_up for o in outcomes] == [5 * size, 15 * size, 5 * size]
    assert [o.traffic.values_down for o in outcomes] == [
        5 * size,
        15 * size + 5 * 3,
        5 * (size + 3),
    ]


def test_numbers_that_are_not_finite_are_one_line(net, federation):
    method = Floco(endpoints=3, tau=1)
    state = make_initial_state(method, net, 10, CPU)
    uploads = tree.repeat(state.server, 10)
    uploads["endpoints"][NAME][4] = math.nan
    with pytest.raises(FedpflError, match=r"not finite; lower local\.lr"):
        method.turns(1, COHORTS[1], 10, None)[0].survey(state.server, state.clients, uploads)
