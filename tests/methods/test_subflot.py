"""SubFLOT: neurons in streams, costs of transport, what travels, shares of the layers."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from fedpfl import models
from fedpfl.engine import make_initial_state
from fedpfl.ground import tree
from fedpfl.methods import SubFLOT
from fedpfl.methods.shared import neurons, transport
from tests.conftest import (
    CPU,
    assert_same,
    record_rounds,
)


def received(method, server, client):
    """The client's state as it enters a round, in which the server looks at no data."""
    client = {"participated": torch.tensor(False), **client}
    return method.prepare(server, client | method.before_training(server, client, None, None))


@pytest.mark.parametrize(
    ("name", "shape", "values"),
    [
        ("resnet8", (3, 32, 32), {"norm": "group", "stem": "small"}),
        ("cnn4", (1, 28, 28), {}),
        ("text", (16,), {"vocabulary": 50}),
        ("lstm", (16,), {"vocabulary": 50, "width": 32}),
    ],
)
def test_neurons_are_found_again_in_streams_and_embeddings(name, shape, values):
    """Layers that write to one stream move together."""
    net = models.build_network(name, shape, 10, 0, **values)
    plan = neurons.build_plan(net.params, net.parts)
    writers = transport.writing_weights(net.params, net.parts)
    lots = torch.rand(len(plan["group"]), generator=torch.Generator().manual_seed(0))
    active = neurons.top_neurons(plan, torch.tensor(0.5, dtype=torch.float64), lots, "round")
    small = transport.cut_dense(plan, active, net.params)
    assert tree.size(small) < 0.6 * tree.size(net.params)
    down, _ = transport.align_neurons(plan, writers, net.params, small, "one")
    assert_same(down, small)
    up, covered = transport.align_neurons(plan, writers, small, net.params, "one")
    for leaf, mask, full in zip(*map(tree.leaves, (up, covered, net.params)), strict=True):
        assert torch.equal(leaf[mask], full[mask])
        assert not leaf[~mask].any()
    assert sum(int(mask.sum()) for mask in tree.leaves(covered)) == tree.size(small)


# Matching


def costs(sources: int, targets: int, seed: int = 0) -> Tensor:
    return torch.rand(
        sources, targets, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize(
    ("sources", "targets"), [(5, 5), (8, 4), (4, 8), (8, 6), (1, 7), (7, 1), (11, 13)]
)
def test_transport_costs_least(sources, targets):
    """Against a linear program between uniform marginals; by assignment of copies and by linear
    program alike.
    """
    cost = costs(sources, targets).numpy()
    amounts = transport.solve_transport(costs(sources, targets)).numpy()
    whole = math.lcm(sources, targets)
    assert amounts.sum(1).tolist() == [whole // sources] * sources
    assert amounts.sum(0).tolist() == [whole // targets] * targets
    given = [np.kron(np.eye(sources), np.ones(targets)), np.kron(np.ones(sources), np.eye(targets))]
    shares = np.repeat([1 / sources, 1 / targets], [sources, targets])
    best = linprog(cost.ravel(), A_eq=np.concatenate(given), b_eq=shares)
    assert (amounts * cost).sum() / whole == pytest.approx(best.fun, abs=1e-9)


@pytest.mark.parametrize("mode", ["one", "balanced"])
@pytest.mark.parametrize(("sources", "targets"), [(4, 4), (7, 5), (5, 7)])
def test_without_distances_there_is_a_move(mode, sources, targets):
    for bad in (math.nan, math.inf):
        cost = costs(sources, targets)
        cost[2, 1] = bad
        move = transport.match_neurons(cost, mode)
        arrived = min(sources, targets) if mode == "one" else targets
        assert float(move.sum()) == pytest.approx(arrived)


# Limits


# What travels


def test_dense_networks_travel_and_nothing_else(backend, net, federation):
    """4 channels and 12 units of Tiny with their share of columns."""
    sizes = []
    for rate, a, b in ((0.0, 4, 12), (0.25, 3, 9), (0.5, 2, 6), (0.75, 1, 3)):
        _, (first, second) = record_rounds(
            SubFLOT(rates=(rate,)), net, federation, [[0, 2], [0, 4]], engine=backend
        )
        size = 10 * a + (9 * a + 1) * b + 5 * b + 5
        sizes.append(size)
        for outcome in (first, second):
            assert outcome.traffic.values_down == outcome.traffic.values_up == 2 * size
            assert outcome.traffic.bits_down == outcome.traffic.bits_up == 64 * size
            assert outcome.metrics["trained_share"] == pytest.approx(size / tree.size(net.params))
    assert sizes[0] == tree.size(net.params)


@pytest.mark.parametrize("initial", ["random", "prefix"])
@pytest.mark.parametrize(
    ("rate", "channels", "units"), [(0.0, 4, 12), (0.1, 4, 11), (0.375, 3, 8), (0.99, 1, 1)]
)
def test_a_client_begins_with_the_share_of_each_layer_that_is_not_pruned(
    rate, channels, units, initial, net
):
    """(1 - rho) M neurons of M, rounded to the nearest, halves up, and at least one: of 4 and 12
    these.
    """
    method = SubFLOT(rates=(rate,), initial=initial)
    state = make_initial_state(method, net, 1, CPU)
    client = state.client(0) | method.sample(state.server, torch.Generator().manual_seed(3))
    own = received(method, state.server, client)["own"]
    assert [int(own[:4].sum()), int(own[4:].sum())] == [channels, units]
    if initial == "prefix":
        assert own[:channels].all()
        assert own[4 : 4 + units].all()


def test_rates_come_in_blocks_or_at_random(net):
    blocks = make_initial_state(SubFLOT(assign="blocks"), net, 20, CPU).clients["rate"]
    assert blocks.tolist() == [0.0] * 5 + [0.25] * 5 + [0.5] * 5 + [0.75] * 5
    drawn = make_initial_state(SubFLOT(), net, 1000, CPU, seed=5).clients["rate"]
    assert all(200 < int((drawn == rate).sum()) < 300 for rate in (0.0, 0.25, 0.5, 0.75))
