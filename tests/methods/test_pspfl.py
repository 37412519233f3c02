"""Update-magnitude personalisation: what its reconstruction says."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedpfl.ground import tree
from fedpfl.methods import PSPFL, FedSelect
from fedpfl.methods.shared import importance
from fedpfl.models import Net
from tests.conftest import (
    CLASSES,
    COHORTS,
    TRAIN,
    assert_close,
    assert_same,
    client_row,
    differing,
    make_federation,
    participate,
    record_rounds,
    record_states,
)

UNSEEN = 7  # until round 3
OFTEN = [[0, 2, 4]] * 3
UPLOADS = pytest.mark.parametrize("upload", ["shared", "all"])


@pytest.fixture(scope="module")
def played(net, federation):
    """The states of three rounds, and the outcomes, computed once: nobody changes them."""
    return cache(
        lambda method, backend="loop": record_rounds(method, net, federation, engine=backend)
    )


def masks(method, state, client):
    return method.prepare(state.server, state.client(client))["mask"]


class Straight(nn.Module):
    """Without biases, which FedSelect never selects."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, bias=False)
        self.fc = nn.Linear(36, CLASSES, bias=False)

    def forward(self, x):
        return self.fc(F.avg_pool2d(torch.tanh(self.conv(x)), 2).flatten(1))


def test_with_q_zero_all_but_the_least_moved_is_personal(played):
    """Nearly Local-Only: a client starts where it stopped, but for the entries that moved least."""
    method = PSPFL(0.0)
    state = played(method)[0][2]
    for client in (0, 2, 8):
        own = state.client(client)
        least = tree.ravel(own["score"]).amin()
        start = method._begin(state.server, method.prepare(state.server, own))
        shared = tree.map(lambda score, least=least: score == least, own["score"])
        assert 1 <= int(tree.ravel(shared).sum()) < 10
        assert_same(start, tree.where(shared, state.server, own["model"]))
        assert differing(own["model"], state.server)


def test_the_first_selection_is_fedselects_by_one_ranking():
    """Full participation, equal clients; the masks of FedSelect then go on to grow."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        net = Net(Straight())
    federation, everyone = make_federation((40,) * 4, (8,) * 4), [[0, 1, 2, 3]]
    size = tree.size(net.params)
    assert size == 216
    p = importance.personal_count(0.7, size) / size
    first = record_states(FedSelect(p=p, scope="all"), net, federation, everyone)[-1]
    method = PSPFL(0.7, "all")
    state = record_states(method, net, federation, everyone)[-1]
    assert_same(state.server, first.server)
    for client in range(4):
        mask = masks(method, state, client)
        assert int(tree.ravel(mask).sum()) == importance.personal_count(0.7, size)
        assert_same(mask, client_row(first.clients["mask"], client))


def test_the_score_is_that_of_the_last_participation(backend, played, net, federation):
    """However long ago: client 6 trains in round 2 alone."""
    method = PSPFL(0.5)
    states, _ = played(method, backend)
    part = participate(method, net, federation, states[1], [6], engine=backend)
    moved = tree.map(
        lambda end, start: (end[0] - start).abs(), part.uploads.values, states[1].server
    )
    assert_close(client_row(states[3].clients["score"], 6), moved, atol=1e-7)
    assert_same(
        client_row(states[3].clients["score"], 6), client_row(states[2].clients["score"], 6)
    )
    scores = tree.ravel(client_row(states[3].clients["score"], 6))
    assert int(tree.ravel(masks(method, states[3], 6)).sum()) == importance.personal_count(
        0.5, scores.numel()
    )
    assert torch.equal(
        tree.ravel(masks(method, states[3], 6)), scores > scores.median()
    )  # of an odd number


def test_entries_that_did_not_move_are_shared(net, federation):
    """Ties at zero; client 9 has one sample and never moves."""
    method = PSPFL(0.0)
    state = record_states(method, net, federation, [[2, 9]])[-1]
    assert not tree.ravel(masks(method, state, 9)).any()
    client = state.client(2)
    dead = {**client["score"], "fc.weight": torch.zeros(12, 36)}
    mask = method.prepare(state.server, {**client, "score": dead})["mask"]
    assert not mask["fc.weight"].any()
    assert mask["conv.weight"].any()


def test_an_entry_is_averaged_over_those_who_sent_it(backend, net, federation):
    method = PSPFL(0.3)
    states = record_states(method, net, federation, OFTEN, engine=backend)
    part = participate(method, net, federation, states[2], OFTEN[0], engine=backend)
    nobody = 0
    for name, leaf in part.uploads.values.items():
        sent = part.uploads.mask[name]
        share = torch.tensor([TRAIN[client] for client in OFTEN[0]]).double()
        share = share.view(-1, *[1] * (leaf.dim() - 1)) * sent
        mean = (leaf.double() * share).sum(0) / share.sum(0)
        expected = torch.where(sent.any(0), mean, states[2].server[name].double()).float()
        assert_close(states[3].server[name], expected, atol=1e-7)
        nobody += int((~sent.any(0)).sum())
        assert torch.equal(
            states[3].server[name][~sent.any(0)], states[2].server[name][~sent.any(0)]
        )
    assert nobody > 0


def test_who_is_judged_by_what(backend, played, net, federation):
    method = PSPFL(0.5)
    states, _ = played(method, backend)
    part = participate(method, net, federation, states[1], COHORTS[1], engine=backend)
    for k, client in enumerate(COHORTS[1]):
        own = method.personal(states[2].server, states[2].client(client))
        assert_same(own, client_row(part.uploads.values, k))
    client = states[2].client(UNSEEN)
    assert_same(method.personal(states[2].server, client), states[2].server)
    assert_same(
        method._begin(states[2].server, method.prepare(states[2].server, client)), states[2].server
    )


@UPLOADS
def test_shared_entries_travel(upload, backend, net, federation):
    size = tree.size(net.params)
    method = PSPFL(0.5, upload)
    _, outcomes = record_rounds(method, net, federation, OFTEN, engine=backend)
    shared = size - importance.personal_count(0.5, size)
    assert [o.traffic.values_down for o in outcomes] == [3 * size, 3 * shared, 3 * shared]
    assert [o.traffic.bits_down - 32 * o.traffic.values_down for o in outcomes] == [
        0,
        3 * size,
        3 * size,
    ]
    up = 3 * (shared if upload == "shared" else size)
    assert [o.traffic.values_up for o in outcomes] == [3 * size, up, up]
    assert [o.traffic.bits_up for o in outcomes] == [32 * o.traffic.values_up for o in outcomes]
    told = [sum(v for k, v in o.metrics.items() if k.startswith("personal/")) for o in outcomes]
    assert told == pytest.approx([0, size - shared, size - shared])
    assert outcomes[1].metrics["personal_share"] == pytest.approx((size - shared) / size)
