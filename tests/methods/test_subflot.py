"""SubFLOT: what its transport keeps and finds, what travels, what a part left out changes."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linprog
from torch import Tensor, nn

from fedpfl import models
from fedpfl.engine import make_initial_state
from fedpfl.ground import tree
from fedpfl.methods import FjORD, SubFLOT
from fedpfl.methods.shared import neurons, transport
from fedpfl.models import Net
from fedpfl.models.norm import BatchNorm2d
from tests.conftest import (
    CPU,
    LOCAL,
    assert_close,
    assert_same,
    differing,
    keep_quick,
    record_rounds,
    record_states,
    tiny,
)

MODES = ("one", "balanced")
modes = pytest.mark.parametrize("mode", MODES)
GENTLE = dataclasses.replace(LOCAL, lr=0.01)


def received(method, server, client):
    """The client's state as it enters a round, in which the server looks at no data."""
    client = {"participated": torch.tensor(False), **client}
    return method.prepare(server, client | method.before_training(server, client, None, None))


class Deep(nn.Module):
    """Two convolutions, one with BatchNorm, two linear layers: 8, 12 and 20 neurons, 4 entries per
    channel behind.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3)
        self.norm = BatchNorm2d(8)
        self.second = nn.Conv2d(8, 12, 3, bias=False)
        self.fc = nn.Linear(48, 20)
        self.classifier = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.norm(self.first(x)))))
        return self.classifier(torch.tanh(self.fc(F.avg_pool2d(x, 2).flatten(1))))


GROUPS = {"first": 8, "second": 12, "fc": 20}


def deep(seed: int = 0) -> Net:
    """With all values drawn, those of BatchNorm too."""
    generator = torch.Generator().manual_seed(seed)
    net = Net(Deep())
    net.params = {
        name: torch.randn(leaf.shape, generator=generator) for name, leaf in net.params.items()
    }
    return net


class World:
    """A network, its plan, and its alignments."""

    def __init__(self, net: Net):
        self.net, self.plan = net, neurons.build_plan(net.params, net.parts)
        self.writers = transport.writing_weights(net.params, net.parts)

    def active(self, share: float, seed: int = 0) -> Tensor:
        """A random choice."""
        lots = torch.rand(len(self.plan["group"]), generator=torch.Generator().manual_seed(seed))
        return neurons.top_neurons(
            self.plan, torch.tensor(share, dtype=torch.float64), lots, "round"
        )

    def cut(self, params, active):
        return transport.cut_dense(self.plan, active, params)

    def align(self, source, target, mode):
        return transport.align_neurons(self.plan, self.writers, source, target, mode)


@pytest.fixture(scope="module")
def world() -> World:
    return World(deep())


def orders(counts: dict[str, int], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {group: torch.randperm(size, generator=generator) for group, size in counts.items()}


def permuted(params, order):
    """The same function with hidden neurons in another order."""
    behind = (4 * order["second"].unsqueeze(1) + torch.arange(4)).flatten()
    return {
        "first.weight": params["first.weight"][order["first"]],
        "first.bias": params["first.bias"][order["first"]],
        "norm.weight": params["norm.weight"][order["first"]],
        "norm.bias": params["norm.bias"][order["first"]],
        "second.weight": params["second.weight"][order["second"]][:, order["first"]],
        "fc.weight": params["fc.weight"][order["fc"]][:, behind],
        "fc.bias": params["fc.bias"][order["fc"]],
        "classifier.weight": params["classifier.weight"][:, order["fc"]],
        "classifier.bias": params["classifier.bias"],
    }


def noisy(params, scale: float = 0.3, seed: int = 5):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: leaf + scale * torch.randn(leaf.shape, generator=generator)
        for name, leaf in params.items()
    }


def same(a, b, mode):
    """One to one nothing is computed with values; mixtures add up in another order."""
    if mode == "one":
        assert_same(a, b)
    else:
        assert_close(a, b)


# Alignment


def test_the_permutation_keeps_the_function(world):
    x = torch.randn(6, 1, 8, 8)
    turned = permuted(world.net.params, orders(GROUPS, 1))
    bound = world.net.bind({"main": world.net.buffers}, training=True)  # statistics of the batch
    assert_close(bound(turned, x), bound(world.net.params, x), atol=1e-5)
    assert len(differing(turned, world.net.params)) == 8


@pytest.mark.parametrize(("share", "turned"), [(0.25, True), (0.5, False), (1.0, False)])
def test_some_of_the_neurons_are_found_again(share, turned, world):
    """Behind the flattening too; also once the global model's neurons stand elsewhere."""
    small = world.cut(world.net.params, world.active(share))
    model = permuted(world.net.params, orders(GROUPS, 1)) if turned else world.net.params
    aligned, covered = world.align(model, small, "one")
    assert_same(aligned, small)
    assert_same(covered, tree.full_like(small, True))
    mixed, _ = world.align(model, small, "balanced")
    assert bool(differing(mixed, small)) == (share < 1)


@modes
@pytest.mark.parametrize("share", [0.25, 0.75])
def test_the_order_of_neurons_does_not_matter(mode, share, world):
    """Of the source: not at all. Of the target: the result has that order."""
    model, small = world.net.params, world.cut(noisy(world.net.params), world.active(share))
    down, _ = world.align(model, small, mode)
    up, covered = world.align(small, model, mode)
    big = orders(GROUPS, 2)
    little = orders({group: max(1, round(share * size)) for group, size in GROUPS.items()}, 3)
    same(world.align(permuted(model, big), small, mode)[0], down, mode)
    same(world.align(model, permuted(small, little), mode)[0], permuted(down, little), mode)
    turned, mask = world.align(permuted(small, little), model, mode)
    same(turned, up, mode)
    assert_same(mask, covered)
    turned, mask = world.align(small, permuted(model, big), mode)
    same(turned, permuted(up, big), mode)
    assert_same(mask, permuted(covered, big))


@pytest.mark.parametrize("ratio", [2, 4])
def test_balanced_what_is_expanded_is_extracted_again(ratio, world):
    small = world.cut(world.net.params, world.active(1 / ratio))
    big, covered = world.align(small, noisy(world.net.params, 1.0), "balanced")
    assert all(big[name].shape == leaf.shape for name, leaf in world.net.params.items())
    assert_same(covered, tree.full_like(big, True))
    assert len(big["first.bias"].unique()) == 8 // ratio
    assert_same(world.align(big, small, "balanced")[0], small)


# Other networks


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
    world = World(models.build_network(name, shape, 10, 0, **values))
    small = world.cut(world.net.params, world.active(0.5))
    assert tree.size(small) < 0.6 * tree.size(world.net.params)
    assert_same(world.align(world.net.params, small, "one")[0], small)
    up, covered = world.align(small, world.net.params, "one")
    for leaf, mask, full in zip(*map(tree.leaves, (up, covered, world.net.params)), strict=True):
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


@modes
@pytest.mark.parametrize(("sources", "targets"), [(4, 4), (7, 5), (5, 7)])
def test_without_distances_there_is_a_move(mode, sources, targets):
    for bad in (math.nan, math.inf):
        cost = costs(sources, targets)
        cost[2, 1] = bad
        move = transport.match_neurons(cost, mode)
        arrived = min(sources, targets) if mode == "one" else targets
        assert float(move.sum()) == pytest.approx(arrived)


# Limits


RATES = (0.75, 0.5, 0.25, 0.0)
PREFIX = SubFLOT(rates=RATES, assign="blocks", initial="prefix", alpha=1.0, sar=False)


@pytest.mark.parametrize("transported", keep_quick([True, False]))
def test_first_neurons_that_stay_in_place_are_averaged_as_fjords(transported, backend, federation):
    method = dataclasses.replace(PREFIX, otp=transported, ota=transported)
    other = FjORD(widths=tuple(1 - rate for rate in RATES), assign="blocks", rounding="round")
    net = tiny(norm=True)
    own, theirs = (
        record_states(m, net, federation, engine=backend, local=GENTLE) for m in (method, other)
    )
    for a, b in zip(own, theirs, strict=True):
        assert_same(a.server["model"], b.server["model"])
        assert_same(a.clients["model"], b.clients["model"])
        assert_same(a.client_buffers, b.client_buffers)
    assert not own[-1].clients["own"][0].all()


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
