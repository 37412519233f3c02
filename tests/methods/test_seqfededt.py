"""SeqFedEDT (Du et al., IEEE Trans. Mobile Computing 2025): the order of clients, selections,
limits.
"""

import dataclasses
import itertools
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from fedpfl.engine import make_initial_state
from fedpfl.engine.keys import generator
from fedpfl.ground import tree
from fedpfl.methods import FedAvg, SeqFedEDT, Turn
from fedpfl.methods.shared import importance
from tests.conftest import (
    COHORTS,
    CPU,
    HEAD,
    assert_same,
    client_row,
    differing,
    keep_quick,
    participate,
    record_rounds,
    record_states,
    tiny,
)

UNSEEN = 7  # until round 3
SCORES = ("difference", "squared", "importance")


@dataclass(frozen=True)
class Passing(FedAvg):
    """Plain sequential learning."""

    def turns(self, played, cohort, clients, generator):
        return [Turn([client]) for client in order(played + 1)]

    def buffers(self):
        return {"main": "local"}


@pytest.fixture(scope="module")
def played(net, federation):
    """The states of three rounds, and the outcomes, computed once: nobody changes them."""
    return cache(
        lambda method, backend="loop": record_rounds(method, net, federation, engine=backend)
    )


def order(t: int) -> list[int]:
    """Clients of round t in their order."""
    cohort = COHORTS[t - 1]
    return [
        cohort[place]
        for place in torch.randperm(len(cohort), generator=generator(0, "turns", t)).tolist()
    ]


def last(state, client):
    """A client's last model, in the order of the parameters."""
    own = state.client(client)
    return {name: {**own["scored"], **own["rest"]}[name] for name in state.server}


@pytest.mark.parametrize("values", keep_quick([{}, {"classifier_only": True}]), ids=str)
def test_with_q_one_it_is_plain_sequential_learning(values, backend, federation):
    net = tiny(norm=True)
    own, plain = (
        record_states(m, net, federation, engine=backend)
        for m in (SeqFedEDT(q=1.0, **values), Passing())
    )
    for ours, theirs in zip(own, plain, strict=True):
        assert_same((ours.server, ours.client_buffers), (theirs.server, theirs.client_buffers))
    together = record_states(FedAvg(), net, federation, engine=backend)[-1]
    assert differing(plain[-1].server, together.server)


@pytest.mark.parametrize("score", SCORES)
def test_with_q_zero_only_the_least_scores_are_taken_from_the_travelling_model(
    score, net, federation
):
    method = SeqFedEDT(score, 0.0)
    state = record_states(method, net, federation, COHORTS[:2])[-1]
    client = method.prepare(state.server, state.client(0))
    start = method._begin(state.server, client)
    own = client["scored"]
    by = {
        "difference": lambda w, own: (w - own).abs(),
        "squared": lambda w, own: (w - own) ** 2,
        "importance": lambda w, own: (own * (w - own)).abs(),
    }[score]
    scores = tree.map(by, state.server, own)
    least = tree.ravel(scores).amin()
    taken = tree.map(lambda leaf: leaf == least, scores)
    assert 1 <= int(tree.ravel(taken).sum()) < 10
    assert_same(start, tree.where(taken, state.server, own))
    assert differing(start, state.server)


def test_the_model_goes_round_in_a_drawn_order_and_the_last_clients_begins_the_next_round(
    backend, net, federation
):
    method = SeqFedEDT(q=0.8)
    states = record_states(method, net, federation, engine=backend)
    assert order(1) != sorted(order(1))
    places = [[COHORTS[t - 1].index(client) for client in order(t)] for t in (1, 2, 3)]
    assert places[0] != places[1] != places[2]
    for t in (1, 2, 3):
        state = states[t - 1]
        for client in order(t):
            part = participate(method, net, federation, state, [client], engine=backend)
            assert_same(
                client_row(states[t].clients["scored"], client),
                client_row(part.client_states["scored"], 0),
            )
            state = dataclasses.replace(state, server=client_row(part.uploads, 0))
        assert_same(states[t].server, state.server)
        assert_same(states[t].server, client_row(states[t].clients["scored"], order(t)[-1]))


def test_a_first_participation_compares_with_the_initial_model(net, federation):
    method = SeqFedEDT(q=0.9)
    state = record_states(method, net, federation, COHORTS[:2])[-1]
    client = method.prepare(state.server, state.client(UNSEEN))
    assert_same(client["scored"], net.params)
    moved = tree.ravel(tree.map(lambda w, old: (w - old).abs(), state.server, net.params))
    count = importance.personal_count(0.9, moved.numel())
    chosen = tree.ravel(client["mask"])
    assert int(chosen.sum()) == count
    assert moved[chosen].min() > moved[~chosen].max()
    start = tree.ravel(method._begin(state.server, client))
    assert torch.equal(start[chosen], tree.ravel(net.params)[chosen])
    first = make_initial_state(
        method, net, 10, CPU
    )  # where all models are equal, and nothing is personal
    assert not tree.ravel(method.prepare(first.server, first.client(0))["mask"]).any()


def test_neither_squares_nor_rescaling_change_the_selection(played):
    state = played(SeqFedEDT(q=0.5))[0][-1]
    for q, client in itertools.product((0.0, 0.3, 0.9), (0, 2, 6)):
        own = state.client(client)
        difference, squared = (
            SeqFedEDT(s, q).prepare(state.server, own)["mask"] for s in ("difference", "squared")
        )
        assert_same(difference, squared)
        scores = importance.movement_score(state.server, own["scored"])
        scaled = tree.unravel(importance.rescale_scores(tree.ravel(scores)), scores)
        assert_same(importance.mask_above_quantile(scaled, q), difference)
        assert 0 < int(tree.ravel(difference).sum()) == importance.personal_count(q, 549)


def test_scores_differ(played):
    state = played(SeqFedEDT(q=0.5))[0][-1]
    masks = [
        SeqFedEDT(s, 0.5).prepare(state.server, state.client(0))["mask"]
        for s in ("squared", "importance")
    ]
    assert differing(*masks)


def test_with_the_classifier_alone_the_quantile_counts_over_it(backend, played):
    method = SeqFedEDT(q=0.5, classifier_only=True)
    states, outcomes = played(method, backend)
    assert set(states[0].clients["scored"]) == set(HEAD)
    assert set(outcomes[0].metrics) == {"personal_share", *(f"personal/{name}" for name in HEAD)}
    assert outcomes[2].metrics["personal_share"] == pytest.approx(
        importance.personal_count(0.5, 65) / 549
    )
    client = method.prepare(states[-1].server, states[-1].client(2))
    assert int(tree.ravel(client["mask"]).sum()) == importance.personal_count(0.5, 65)
    start = method._begin(states[-1].server, client)
    body = {name: value for name, value in states[-1].server.items() if name not in HEAD}
    assert_same({name: start[name] for name in body}, body)
    assert differing(
        {name: start[name] for name in HEAD}, {name: states[-1].server[name] for name in HEAD}
    )
    assert_same(client_row(states[-1].clients["rest"], order(3)[-1]), body)


def test_who_is_judged_by_what(backend, played, net):
    for method in (SeqFedEDT(q=0.5), SeqFedEDT(q=0.5, classifier_only=True)):
        states, _ = played(method, backend)
        unseen = method.personal(states[2].server, states[2].client(UNSEEN))
        assert_same(unseen, states[2].server)
        assert list(unseen) == list(net.params)
        for state in states[1:]:
            assert_same(method.personal(state.server, state.client(3)), last(state, 3))
        assert_same(last(states[3], 3), last(states[1], 3))  # who trained in round 1 alone
        assert differing(last(states[3], 3), states[3].server)
