"""FedSPU and its baselines: published sizes, rankings, FjORD's ordered version."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad_and_value

from fedpfl import models
from fedpfl.engine import make_initial_state
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.ground.traffic import count_traffic
from fedpfl.methods import Batch, FedRolex, FedSPU, FjORD, HeteroFL, PruneFL, RandomDropout
from fedpfl.methods.shared.neurons import entry_masks, prefix_neurons
from tests.conftest import CPU, LOCAL, assert_close, keep_quick, participate, record_rounds

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


def test_widths_come_in_blocks_or_at_random(net):
    blocks = make_initial_state(FedSPU(), net, 100, CPU).clients["width"]
    assert [blocks[i].item() for i in (0, 19, 20, 59, 60, 99)] == [0.2, 0.2, 0.4, 0.6, 0.8, 1.0]
    drawn = make_initial_state(FedSPU(assign="random"), net, 1000, CPU, seed=5).clients["width"]
    assert all(150 < int((drawn == width).sum()) < 250 for width in (0.2, 0.4, 0.6, 0.8, 1.0))


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
    for seed in range(8):
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


@pytest.mark.parametrize(
    "method",
    keep_quick(
        [PruneFL, partial(HeteroFL, rounding="floor"), FedSPU, RandomDropout, FjORD, FedRolex], 2
    ),
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
