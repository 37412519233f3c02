"""FedSPU and its baselines: what freezes, what is averaged, what travels."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fedpfl import models
from fedpfl.engine import make_initial_state
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.ground.traffic import count_traffic
from fedpfl.methods import (
    Batch,
    FedMP,
    FedRolex,
    FedSPU,
    FjORD,
    Hermes,
    HeteroFL,
    PruneFL,
    RandomDropout,
)
from fedpfl.methods.shared.neurons import entry_masks, prefix_neurons, sum_incoming
from tests.conftest import (
    COHORTS,
    CPU,
    LOCAL,
    assert_close,
    assert_same,
    client_row,
    participate,
    record_rounds,
    record_states,
    tiny,
)

EVERYONE = list(range(10))
PRUNED = [Hermes, FedMP, PruneFL]
FIXED = {"widths": (0.3, 0.6, 1.0)}


@pytest.mark.parametrize(
    "method",
    [FedSPU(**FIXED), RandomDropout(**FIXED, judge="own"), FjORD(**FIXED), Hermes(**FIXED)],
)
def test_entries_that_are_not_active_do_not_move(method, backend, federation):
    """Frozen at a client, and at the server where nobody trained them; with momentum and weight
    decay.
    """
    net = tiny(norm=True)
    cohort = [0, 1, 2, 4] if backend == "loop" else [0, 1, 2]  # narrow ones alone in the latter
    old, new = record_states(method, net, federation, [[0, 2, 5], cohort], engine=backend)[1:]
    untouched = 0
    any_active = tree.full_like(net.params, False)
    for client in cohort:
        own = old.client(client) | method.sample(old.server, Draws(0, "train", 2).server(client))
        if isinstance(method, Hermes):
            own |= {"own": new.clients["own"][client]}
        own = method.prepare(old.server, own)
        start, end = method._begin(old.server, own), client_row(new.clients["model"], client)
        for name, mask in own["mask"].items():
            assert torch.equal(start[name][~mask], end[name][~mask])
            if not isinstance(method, FedSPU):
                assert not end[name][~mask].any()
            any_active[name] |= mask
    for name, mask in any_active.items():
        assert torch.equal(old.server["model"][name][~mask], new.server["model"][name][~mask])
        untouched += int((~mask).sum())
        assert not torch.equal(old.server["model"][name][mask], new.server["model"][name][mask])
    assert untouched > 0 or 4 in cohort


def test_an_entry_is_averaged_over_those_who_trained_it(backend, net, federation):
    method = FjORD(widths=(0.5, 1.0))
    narrow, wide = 0, 9 - 3  # 40 and 50 samples
    states = record_states(method, net, federation, [[narrow, wide]], engine=backend)
    a, b = (
        client_row(states[1].clients["model"], narrow),
        client_row(states[1].clients["model"], wide),
    )
    active = prefix_neurons(states[0].server["plan"], torch.tensor(0.5, dtype=torch.float64))
    for name, shared in entry_masks(states[0].server["plan"], active, net.params).items():
        merged = states[1].server["model"][name]
        assert_close(merged[shared], (40 * a[name] + 50 * b[name])[shared] / 90)
        assert torch.equal(merged[~shared], b[name][~shared])


@pytest.mark.parametrize("method", [FjORD(widths=(0.5,)), Hermes(widths=(0.5,), ranking_epochs=0)])
def test_with_one_width_and_one_choice_it_is_fedavg_on_the_small_network(
    method, backend, net, federation
):
    """The ranking of the common initial model is everyone's."""
    start, *states = record_states(method, net, federation, engine=backend)
    part = participate(method, net, federation, start, COHORTS[0], engine=backend)
    mask = client_row(part.uploads["model"].mask, 0)
    assert_same(
        tree.map(lambda m: m.any(0) == m.all(0), part.uploads["model"].mask),
        tree.full_like(mask, True),
    )
    for state in states:
        for name, own in mask.items():
            assert torch.equal(state.server["model"][name][~own], net.params[name][~own])
    weight = federation.train_sizes[COHORTS[0]].double()
    mean = tree.mean(part.uploads["model"].values, (weight / weight.sum()).float())
    for name, own in mask.items():
        assert torch.equal(states[0].server["model"][name][own], mean[name][own])


# What travels


@pytest.mark.parametrize(
    ("name", "shape", "classes", "values"),
    [
        ("fedspu_emnist", (1, 28, 28), 62, (12418, 25062, 37994, 51214, 64722)),
        ("fedspu_cifar10", (3, 32, 32), 10, (5228, 20542, 45942, 81428, 134902)),
        ("fedspu_speech", (1, 32, 32), 35, (3685, 8135, 13385, 19435, 26285)),
    ],
)
@pytest.mark.parametrize("kind", [FedSPU, RandomDropout, FjORD])
def test_values_that_travel_are_the_papers(kind, name, shape, classes, values):
    net, method = models.build_network(name, shape, classes, 0), kind()
    state = make_initial_state(method, net, 5, CPU)
    for client, expected in enumerate(values):
        own = state.client(client) | method.sample(
            state.server, Draws(0, "train", 1).server(client)
        )
        own = method.prepare(state.server, own)
        down = count_traffic(method.download(state.server, own))
        up = count_traffic(method.finish(state.server, own, net.params, net.params)[0])
        neurons = len(state.server["plan"]["group"])
        assert (int(down.values), int(up.values)) == (expected, expected)
        assert int(down.bits) == 32 * expected + (0 if kind is FjORD else neurons)
        assert int(up.bits) == 32 * expected


# Choices


def test_random_neurons_are_new_every_round_and_for_every_client(net, federation):
    method = FedSPU(widths=(0.5,))
    state = make_initial_state(method, net, 10, CPU)
    seen = set()
    for t in (1, 2, 3):
        for client in (0, 1, 2):
            own = state.client(client) | method.sample(
                state.server, Draws(0, "train", t).server(client)
            )
            active = method.prepare(state.server, own)["active"]
            assert int(active[:4].sum()) == 2
            assert int(active[4:16].sum()) == 6
            seen.add(tuple(active.tolist()))
    assert len(seen) == 9


@pytest.mark.parametrize("kind", PRUNED)
def test_neurons_are_ranked_once(kind, backend, net, federation):
    states = record_states(
        kind(widths=(0.5,)), net, federation, [[0, 1], [0, 2], [0, 1]], engine=backend
    )
    own = [state.clients["own"] for state in states]
    assert torch.equal(own[1][0], own[3][0])
    assert torch.equal(own[1][1], own[3][1])
    assert own[1][2].all()
    assert not own[2][2].all()
    assert [int(state.client(range(10))["participated"].sum()) for state in states] == [0, 2, 3, 3]
    assert not torch.equal(own[3][0], own[3][1]) or kind is not PruneFL


@pytest.mark.parametrize(("kind", "best"), [(Hermes, 0), (FedMP, 1), (PruneFL, 2)])
def test_neurons_are_ranked_by_the_norm_that_the_method_names(kind, best, net):
    """Unit 0 has the largest L2 norm of weights (Hermes), unit 1 their largest L1 norm (FedMP),
    unit 2 the largest L2 norm of gradients (PruneFL), whose L1 norm unit 3 has the largest of.
    """
    weights, slopes = (tree.full_like(net.params, 0.0) for _ in range(2))
    weights["fc.weight"][:3, :4] = torch.tensor([[-5.0, 0, 0, 0], [2, 2, -2, 2], [1, 0, 0, 0]])
    slopes["fc.weight"][1:4, :4] = torch.tensor([[1.0, 0, 0, 0], [0, 5, 0, 0], [2, -2, 2, 2]])
    method = kind(widths=(0.1,))
    plan = make_initial_state(method, net, 1, CPU).server["plan"]
    score = sum_incoming(plan, method._scores(weights, slopes))[4:]
    assert int(score.argmax()) == best


def test_norms_do_not_see_signs_orders_or_common_factors(net, federation):
    """Ranking without training: flipped filters, permuted inputs and a scaled layer rank the same."""
    changed = dict(net.params)
    changed["conv.weight"] = -3.0 * changed["conv.weight"]
    changed["fc.weight"] = changed["fc.weight"].flip(1)
    for kind in (Hermes, FedMP):
        method = kind(widths=(0.5,), ranking_epochs=0)
        found = []
        for params in (net.params, changed):
            own = tiny()
            own.params = params
            found.append(record_states(method, own, federation, [[0]])[-1].clients["own"][0])
        assert torch.equal(*found)
        assert not found[0].all()


def test_a_neuron_without_gradient_is_pruned_first(backend, federation):
    net = tiny()
    net.params["classifier.weight"] = net.params["classifier.weight"].clone()
    net.params["classifier.weight"][:, [3, 7]] = (
        0  # what units 3 and 7 do has no effect, nor any gradient
    )
    method = PruneFL(widths=(10 / 12,), ranking_lr=1e-12)
    own = record_states(method, net, federation, [[0]], engine=backend)[-1].clients["own"][0]
    assert (~own[4:]).nonzero().flatten().tolist() == [3, 7]


def test_dropout_judges_by_the_global_model_or_the_own_part(net, federation):
    whole, part = (
        record_states(RandomDropout(**FIXED, judge=j), net, federation)[-1]
        for j in ("global", "own")
    )
    assert set(whole.clients) == {"width"}
    for client in EVERYONE:
        a, b = (
            m.personal(s.server, client_row(s.clients, client))
            for m, s in ((RandomDropout(), whole), (RandomDropout(judge="own"), part))
        )
        assert_same(a, whole.server["model"])
        if client == 8:  # never drawn but with one step; narrow clients have zeros
            assert b["fc.weight"].any()
    assert (part.clients["model"]["fc.weight"][0] == 0).any()


def test_widths_come_in_blocks_or_at_random(net):
    blocks = make_initial_state(FedSPU(), net, 100, CPU).clients["width"]
    assert [blocks[i].item() for i in (0, 19, 20, 59, 60, 99)] == [0.2, 0.2, 0.4, 0.6, 0.8, 1.0]
    drawn = make_initial_state(FedSPU(assign="random"), net, 1000, CPU, seed=5).clients["width"]
    assert all(150 < int((drawn == width).sum()) < 250 for width in (0.2, 0.4, 0.6, 0.8, 1.0))


# FjORD's ordered version


def test_ordered_dropout_draws_among_the_widths_a_client_can_hold(backend, net, federation):
    """Entries beyond a step's width have no gradient: with one step, those that moved tell the
    width.
    """
    method, local = (
        FjORD(ordered=True),
        dataclasses.replace(LOCAL, epochs=1, batch_size=512, momentum=0, weight_decay=0),
    )
    widest, seen = {}, {}
    state = make_initial_state(method, net, 10, CPU)
    for seed in range(12):
        part = participate(
            method, net, federation, state, EVERYONE, engine=backend, local=local, seed=seed
        )
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
    method = FjORD(widths=(0.5, 1.0), ordered=True, distill=0.25)
    state = make_initial_state(method, net, 2, CPU)
    server, client = state.server, method.prepare(state.server, state.client(1))
    x, y = federation.normalize(federation.x[:20]), federation.y[:20]
    bound = net.bind({})
    half = entry_masks(
        server["plan"],
        prefix_neurons(server["plan"], torch.tensor(0.5, dtype=torch.float64)),
        net.params,
    )
    wide, narrow = bound(net.params, x), bound(tree.map(lambda p, m: p * m, net.params, half), x)
    teacher = wide.softmax(1)
    expected = F.cross_entropy(wide, y) + 0.75 * F.cross_entropy(narrow, y)
    expected += 0.25 * (teacher * (teacher.log() - narrow.log_softmax(1))).sum(1).mean()
    drawn = method.loss(
        server, client, bound, net.params, Batch(x, y, random=torch.tensor([[0.49]]))
    )
    assert float(drawn) == pytest.approx(float(expected), abs=1e-5)
    whole = method.loss(
        server, client, bound, net.params, Batch(x, y, random=torch.tensor([[0.51]]))
    )
    assert float(whole) == pytest.approx(1.75 * float(F.cross_entropy(wide, y)), abs=1e-5)


def test_distillation_does_not_differentiate_the_teacher(net, federation):
    """The widest model's soft labels are constants (arXiv:2102.13451): all of its gradient is that
    of its own cross-entropy, in the entries that the drawn width lacks.
    """
    method = FjORD(widths=(0.5, 1.0), ordered=True, distill=0.25)
    state = make_initial_state(method, net, 2, CPU)
    server, client = state.server, method.prepare(state.server, state.client(1))
    x, y = federation.normalize(federation.x[:20]), federation.y[:20]
    bound = net.bind({})
    half = entry_masks(
        server["plan"],
        prefix_neurons(server["plan"], torch.tensor(0.5, dtype=torch.float64)),
        net.params,
    )
    batch = Batch(x, y, random=torch.tensor([[0.49]]))
    got = torch.func.grad(lambda params: method.loss(server, client, bound, params, batch))(
        net.params
    )
    teacher = bound(net.params, x).detach().softmax(1)

    def apart(params):
        narrow = bound(tree.map(lambda p, m: p * m, params, half), x)
        divergence = (teacher * (teacher.log() - narrow.log_softmax(1))).sum(1).mean()
        return (
            F.cross_entropy(bound(params, x), y)
            + 0.75 * F.cross_entropy(narrow, y)
            + 0.25 * divergence
        )

    assert_close(got, torch.func.grad(apart)(net.params), atol=1e-6)
    alone = torch.func.grad(lambda params: F.cross_entropy(bound(params, x), y))(net.params)
    assert_close(got["fc.weight"][6:], alone["fc.weight"][6:], atol=1e-6)


@pytest.mark.parametrize(
    "method",
    [FedSPU, RandomDropout, FjORD, *PRUNED, partial(HeteroFL, rounding="floor"), FedRolex],
    ids=lambda kind: kind().__class__.__name__,
)
def test_the_trained_share_is_the_mean_over_the_cohort_of_the_sub_models_entries(
    method, net, federation
):
    """Of widths 1/4, 1/2 and 1 Tiny has 1, 2, 4 channels and 3, 6, 12 units: 60, 169 and 549
    scalars.
    """
    cohort = [0, 4, 8, 1]
    _, outcomes = record_rounds(method(widths=(0.25, 0.5, 1.0)), net, federation, [cohort] * 2)
    for outcome in outcomes:
        assert outcome.metrics == {"trained_share": pytest.approx((60 + 169 + 549 + 60) / 4 / 549)}


# Ranges
