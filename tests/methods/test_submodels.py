"""Methods with sub-models: neurons, published sizes, costs of transport, what travels."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linprog
from torch import Tensor
from torch.func import grad_and_value

from fedpfl import models
from fedpfl.engine import make_initial_state
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.ground.traffic import count_traffic
from fedpfl.methods import Batch, FedProto, FedRolex, FedSPU, FjORD, FlexFL, HeteroFL, SubFLOT
from fedpfl.methods.shared import neurons, transport
from fedpfl.methods.shared.neurons import entry_masks, prefix_neurons
from fedpfl.testing.toy import CPU, tiny
from tests.conftest import (
    COHORTS,
    PLAIN,
    assert_close,
    assert_same,
    find_eval_job,
    participate,
    record_rounds,
)

NET = tiny(norm=True)  # conv 4, norm 4, fc 12 over 4 x 9, classifier 5
PLAN = neurons.build_plan(NET.params, NET.parts)


def share(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize(
    ("width", "rounding", "expected"),
    [
        *((1.0, "floor", [4, 12]), (0.6, "floor", [2, 7]), (0.6, "ceil", [3, 8])),
        *((0.6, "round", [2, 7]), (0.625, "round", [3, 8]), (0.25, "floor", [1, 3])),
        *((0.2, "floor", [1, 2]), (0.01, "ceil", [1, 1]), (0.25, "ceil", [1, 3])),  # one at least
    ],
)
def test_kept(width, rounding, expected):
    kept = neurons.neuron_counts(PLAN, share(width), rounding)
    assert [own.unique().tolist() for own in kept.split([4, 12])] == [[own] for own in expected]


def test_exact_shares_are_not_rounded_away():
    plan = {"width": torch.full((100,), 100)}
    for hundredths in range(1, 101):
        for rounding in ("floor", "ceil", "round"):
            kept = neurons.neuron_counts(plan, share(hundredths / 100), rounding)
            assert kept.unique().tolist() == [hundredths]


EVERYONE = list(range(10))


@pytest.mark.parametrize(
    ("name", "shape", "classes", "values"),
    [
        ("fedspu_emnist", (1, 28, 28), 62, (12418, 25062, 37994, 51214, 64722)),
        ("fedspu_cifar10", (3, 32, 32), 10, (5228, 20542, 45942, 81428, 134902)),
        ("fedspu_speech", (1, 32, 32), 35, (3685, 8135, 13385, 19435, 26285)),
    ],
)
@pytest.mark.parametrize("kind", [FedSPU, FjORD])
def test_values_that_travel_are_the_papers(kind, name, shape, classes, values):
    net, method = models.build_network(name, shape, classes, 0), kind()
    state = make_initial_state(method, net, 5, CPU)
    for client, expected in enumerate(values):
        drawn = method.sample(state.server, Draws(0, "train", 1).server(client))
        own = method.prepare(state.server, state.client(client) | drawn)
        down = count_traffic(method.download(state.server, own))
        up = count_traffic(method.finish(state.server, own, net.params, net.params)[0])
        places = 0 if kind is FjORD else len(state.server["plan"]["group"])
        assert (int(down.values), int(up.values)) == (expected, expected)
        assert int(down.bits) == 32 * expected + places
        assert int(up.bits) == 32 * expected


@pytest.mark.parametrize(
    ("method", "entry", "wanted"),
    [
        (FedSPU(), "width", dict.fromkeys((0.2, 0.4, 0.6, 0.8, 1.0), 20)),
        (FlexFL(), "device", {0: 40, 1: 30, 2: 30}),
        (SubFLOT(), "rate", dict.fromkeys((0.0, 0.25, 0.5, 0.75), 25)),
    ],
    ids=["fedspu", "flexfl", "subflot"],
)
def test_sizes_come_in_blocks_or_at_random(method, entry, wanted, net):
    """wanted: of a hundred clients."""
    in_blocks, at_random = (
        make_initial_state(replace(method, assign=how), net, 1000, CPU, seed=5).clients[entry]
        for how in ("blocks", "random")
    )
    blocks = [size for size, count in wanted.items() for _ in range(10 * count)]
    assert in_blocks.tolist() == blocks != at_random.tolist()
    for size, count in wanted.items():
        assert abs(int((at_random == size).sum()) - 10 * count) < 60
    assert {*at_random.tolist()} == {*wanted}


def test_ordered_dropout_draws_among_the_widths_a_client_can_hold(backend, net, federation):
    """Entries beyond a step's width have no gradient: with one step, those that moved tell the
    width.
    """
    method, widest, seen = FjORD(ordered=True), {}, {}
    state = make_initial_state(method, net, 10, CPU)
    values = {"engine": backend, "local": PLAIN}
    for seed in range(8):
        part = participate(method, net, federation, state, EVERYONE, seed=seed, **values)
        for client in EVERYONE[:9]:
            moved = part.uploads["model"].values["fc.bias"][client] != net.params["fc.bias"]
            held = part.uploads["model"].mask["fc.bias"][client]
            widest[client] = int(held.sum())
            seen.setdefault(client, set()).add(int((moved & held).sum()))
    kept = [2, 4, 7, 9, 12]
    for client in EVERYONE[:9]:
        assert seen[client] <= set(kept[: client // 2 + 1])
        assert widest[client] == kept[client // 2]
        assert len(seen[client]) == 1 if client < 2 else len(seen[client]) > 1


def test_distillation_is_the_formula(net, federation):
    """The widest model's soft labels are constants (arXiv:2102.13451): all of its gradient is that
    of its own cross-entropy, in the entries that the drawn width lacks.
    """
    method, half = FjORD(widths=(0.5, 1.0), ordered=True, distill=0.25), torch.tensor(0.5).double()
    state = make_initial_state(method, net, 2, CPU)
    server, client = state.server, method.prepare(state.server, state.client(1))
    x, y = federation.normalize(federation.x[:20]), federation.y[:20]
    bound, plan = net.bind({}), server["plan"]
    masks = entry_masks(plan, prefix_neurons(plan, half), net.params)
    teacher = bound(net.params, x).detach().softmax(1)

    def formula(params):
        narrow = bound(tree.map(lambda p, m: p * m, params, masks), x)
        apart = (teacher * (teacher.log() - narrow.log_softmax(1))).sum(1).mean()
        widest, own = F.cross_entropy(bound(params, x), y), F.cross_entropy(narrow, y)
        return widest + 0.75 * own + 0.25 * apart

    def loss(number):
        batch = Batch(x, y, random=torch.tensor([[number]]))
        return lambda params: method.loss(server, client, bound, params, batch)

    drawn, expected = (grad_and_value(own)(net.params) for own in (loss(0.49), formula))
    assert_close(drawn, expected, atol=1e-6)
    alone, value = grad_and_value(lambda params: F.cross_entropy(bound(params, x), y))(net.params)
    assert_close(drawn[0]["fc.weight"][6:], alone["fc.weight"][6:], atol=1e-6)
    assert float(loss(0.51)(net.params)) == pytest.approx(1.75 * float(value), abs=1e-5)


JUDGED = [(HeteroFL(), "labels"), (FedRolex(), "labels"), (FedProto(judge="nearest_own"), "seen")]


@pytest.mark.parametrize(("method", "entry"), JUDGED, ids=str)
def test_a_client_is_judged_on_its_classes_before_it_trains(method, entry, net, federation):
    state = make_initial_state(method, net, federation.clients, CPU)
    if entry == "seen":  # by others
        state.server["seen"].fill_(True)
    for client in EVERYONE:
        labels = federation.y[federation.train[client]].tolist()
        judged = find_eval_job(method, net, federation, state, client).params[entry]
        assert judged.tolist() == [c in labels for c in range(5)]


def shares(net, **values):
    """Share of the network's scalars between each level's neurons, counted on masks, and the
    levels.
    """
    server, _ = FlexFL(**values).init(net.params, net.parts)
    counts = []
    for active in server["levels"]:
        masks = neurons.entry_masks(server["plan"], active, net.params)
        counts.append(sum(int(mask.sum()) for mask in masks.values()) / tree.size(net.params))
    return counts, server["levels"]


def test_flexfl_a_device_cuts_down_what_it_cannot_hold(backend, net, federation):
    states, outcomes = record_rounds(FlexFL(), net, federation, engine=backend)
    size = [round(share * tree.size(net.params)) for share in shares(net)[0]]
    devices, has_cut = states[0].clients["device"], False
    for t, cohort in enumerate(COHORTS):
        state, traffic = states[t + 1], outcomes[t].traffic
        draws = Draws(0, "train", t + 1)
        sent = [int(FlexFL().sample(state.server, draws.server(i))["sent"]) for i in cohort]
        own = torch.minimum(torch.tensor(sent), devices[cohort]).tolist()
        assert state.clients["level"][cohort].tolist() == own
        assert traffic.values_down == sum(size[level] for level in sent)
        assert traffic.values_up == sum(size[level] for level in own)
        assert traffic.bits_down == 32 * traffic.values_down
        assert traffic.bits_up == 32 * traffic.values_up
        has_cut |= sent != own
    assert has_cut


@pytest.mark.parametrize(
    ("name", "shape", "values"),
    [
        ("resnet8", (3, 32, 32), {"norm": "group", "stem": "small"}),
        ("cnn4", (1, 28, 28), {}),
        ("text", (16,), {"vocabulary": 50}),
    ],
)
def test_subflot_neurons_are_found_again_in_streams_and_embeddings(name, shape, values):
    """Layers that write to one stream move together."""
    net = models.build_network(name, shape, 10, 0, **values)
    plan = neurons.build_plan(net.params, net.parts)
    writers = transport.writing_weights(net.params, net.parts)
    lots = torch.rand(len(plan["group"]), generator=torch.Generator().manual_seed(0))
    active = neurons.top_neurons(plan, share(0.5), lots, "round")
    small = transport.cut_dense(plan, active, net.params)
    assert tree.size(small) < 0.6 * tree.size(net.params)
    down, _ = transport.align_neurons(plan, writers, net.params, small, "one")
    assert_same(down, small)
    up, covered = transport.align_neurons(plan, writers, small, net.params, "one")
    for leaf, mask, full in zip(*map(tree.leaves, (up, covered, net.params)), strict=True):
        assert torch.equal(leaf[mask], full[mask])
        assert not leaf[~mask].any()
    assert sum(int(mask.sum()) for mask in tree.leaves(covered)) == tree.size(small)


def costs(sources: int, targets: int) -> Tensor:
    return torch.rand(sources, targets, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize(("sources", "targets"), [(5, 5), (8, 4), (4, 8), (8, 6), (1, 7)])
def test_subflot_transport_costs_least(sources, targets):
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


def test_subflot_dense_networks_travel_and_nothing_else(backend, net, federation):
    """Of Tiny's 4 channels and 12 units the share that is not pruned, rounded to the nearest, halves
    up, and at least one, with their share of columns.
    """
    for rate, a, b in ((0.0, 4, 12), (0.4, 2, 7), (0.375, 3, 8), (0.99, 1, 1)):
        method, size = SubFLOT(rates=(rate,)), 10 * a + (9 * a + 1) * b + 5 * b + 5
        for outcome in record_rounds(method, net, federation, [[0, 2], [0, 4]], engine=backend)[1]:
            assert outcome.traffic.values_down == outcome.traffic.values_up == 2 * size
            assert outcome.traffic.bits_down == outcome.traffic.bits_up == 64 * size
            assert outcome.metrics["trained_share"] == pytest.approx(size / 549)
