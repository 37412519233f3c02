"""FedDyn (arXiv:2111.04263): FedProx and FedAvg as limits, duals by hand, and a problem whose
optimum is known.
"""

import types
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from fedpfl.ground import tree
from fedpfl.methods import FedAvg, FedDyn, FedProx
from tests.conftest import (
    COHORTS,
    assert_close,
    assert_same,
    client_row,
    differing,
    make_federation,
    participate,
    record_states,
    with_client_states,
)

ALL = [list(range(4))]
JUDGED = {"cloud": "model", "cohort": "judged", "all": "judged"}


@pytest.fixture(scope="module")
def even():
    """Four clients of equal size."""
    return make_federation((32,) * 4, (8,) * 4)


def test_without_duals_local_training_is_fedproxs(backend, net, federation):
    """Bit for bit, in round 1 and for a client that first trains in the third."""
    states = record_states(FedDyn(alpha=0.5), net, federation, engine=backend)
    for t, cohort in ((0, COHORTS[0]), (2, [7, 9])):
        part = participate(FedDyn(alpha=0.5), net, federation, states[t], cohort, engine=backend)
        prox = replace(
            record_states(FedProx(mu=0.5), net, federation, [])[0],
            server=states[t].server["model"],
            round=t,
        )
        assert_same(
            part.uploads,
            participate(FedProx(mu=0.5), net, federation, prox, cohort, engine=backend).uploads,
        )
    both = [
        participate(FedDyn(alpha=0.5), net, federation, state, [2], engine=backend)
        for state in states[:2]
    ]
    zero = with_client_states(states[1], {"dual": tree.full_like(states[1].clients["dual"], 0.0)})
    assert differing(
        both[1].uploads, participate(FedDyn(alpha=0.5), net, federation, zero, [2]).uploads
    )


def test_alpha_zero_is_not_fedavg(backend, net, even):
    """All clients, round 1: th + 2 mean(Delta)."""
    own, fedavg = (
        record_states(m, net, even, ALL, engine=backend)[-1].server
        for m in (FedDyn(alpha=0.0), FedAvg())
    )
    twice = tree.map(lambda th, mean: th + 2 * (mean - th), net.params, fedavg)
    assert_close(own["model"], twice, atol=1e-6)
    assert differing(own["model"], fedavg)


def test_the_servers_dual_is_the_mean_of_all_clients(backend, net, federation):
    states = record_states(FedDyn(alpha=0.3), net, federation, engine=backend)
    for t, state in enumerate(states):
        mean = tree.map(lambda own: own.double().mean(0).float(), state.clients["dual"])
        assert_close(state.server["dual"], mean, atol=1e-6)
        for client in range(10):
            changed = t and differing(
                client_row(states[t - 1].clients["dual"], client),
                client_row(state.clients["dual"], client),
            )
            assert bool(changed) == bool(
                t and client in COHORTS[t - 1] and client != 9
            )  # 9 makes no step


def test_uploads_count_alike_whatever_the_samples(net, federation):
    state = record_states(FedDyn(), net, federation, COHORTS[:1])[0]
    part = participate(FedDyn(), net, federation, state, COHORTS[0])
    mean = tree.map(lambda own: own.double().mean(0).float(), part.uploads)
    new = record_states(FedDyn(), net, federation, COHORTS[:1])[-1].server
    assert_close(tree.map(torch.sub, new["model"], new["dual"]), mean, atol=1e-6)


def test_it_finds_the_common_optimum_where_fedavg_does_not():
    """Clients of different curves, solved exactly: the minimiser of their uniform mean; g_i is the
    gradient there.
    """
    g = torch.Generator().manual_seed(0)
    count, alpha = 5, 0.7
    curves = [
        torch.diag(0.2 + 3 * torch.rand(3, generator=g, dtype=torch.double)) for _ in range(count)
    ]
    centres = [torch.randn(3, generator=g, dtype=torch.double) for _ in range(count)]
    method, one = FedDyn(alpha=alpha), torch.eye(3, dtype=torch.double)

    class Quadratic(NamedTuple):
        """A client's curve, as network and minibatch."""

        x: torch.Tensor
        curve: torch.Tensor

        def __call__(self, params, x):
            return params["x"] - x

        def loss(self, away):
            return away @ self.curve @ away / 2

    server, clients = method.init(
        {"x": torch.zeros(3, dtype=torch.double)}, types.SimpleNamespace(clients=count)
    )
    clients = tree.repeat(clients, count)
    for _ in range(300):
        ends, kept = [], []
        for i in range(count):
            client = tree.take(clients, i)
            th, lam = server["model"]["x"], client["dual"]["x"]
            end = torch.linalg.solve(
                curves[i] + alpha * one, curves[i] @ centres[i] + alpha * (th - lam)
            ).requires_grad_()
            batch = Quadratic(centres[i], curves[i])
            slope = torch.autograd.grad(method.loss(server, client, batch, {"x": end}, batch), end)[
                0
            ]
            assert slope.abs().max() < 1e-9  # the method's loss is minimal there
            end, state = method.finish(server, client, server["model"], {"x": end.detach()})
            gradient = curves[i] @ (end["x"] - centres[i])
            assert_close(-alpha * state["dual"]["x"], gradient, atol=1e-9)
            ends.append(end)
            kept.append(state)
        weight = torch.full((count,), 1 / count, dtype=torch.double)
        server, clients = method.aggregate(
            server, tree.stack(kept), None, tree.stack(ends), weight, None
        )
    best = torch.linalg.solve(sum(curves), sum(c @ x for c, x in zip(curves, centres, strict=True)))
    assert_close(server["model"]["x"], best, atol=1e-9)
    assert (sum(centres) / count - best).abs().max() > 0.1


def test_models_of_evaluation(backend, net, federation):
    states = {
        judge: record_states(FedDyn(judge=judge), net, federation, engine=backend)
        for judge in JUDGED
    }
    for judge, own in states.items():
        assert_same(own[-1].server["model"], states["cloud"][-1].server["model"])
        method, state = FedDyn(judge=judge), own[-1]
        assert_same(
            [method.personal(state.server, state.client(i)) for i in (2, 4)],
            [state.server[JUDGED[judge]]] * 2,
        )
    latest = tree.map(lambda own: own.double().mean(0).float(), states["all"][-1].clients["last"])
    assert_close(states["all"][-1].server["judged"], latest, atol=1e-6)
    assert_same(client_row(states["all"][2].clients["last"], 7), net.params)
