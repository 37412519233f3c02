"""FedFomo (arXiv:2012.08565): nobody to mix with, how candidates are chosen, weights, and what
travels.
"""

import itertools
from functools import cache

import pytest
import torch

from fedpfl.engine.keys import Draws
from fedpfl.engine.training.shard import make_shard
from fedpfl.ground import tree
from fedpfl.methods import FedFomo, LocalOnly
from fedpfl.methods.shared.pool import choose_candidates, validation_loss
from tests.conftest import (
    assert_close,
    assert_same,
    client_row,
    differing,
    hold_out_quarter,
    record_states,
)

OFTEN = [[0, 2, 4]] * 4


@pytest.fixture(scope="module")
def held(federation):
    return hold_out_quarter(federation)


@pytest.fixture(scope="module")
def played(net, held):
    """Rounds on what is not held out, computed once: nobody changes them."""
    return cache(
        lambda method, backend="loop": record_states(method, net, held, OFTEN, engine=backend)
    )


def begun(method, net, federation, state, client, **more):
    """What a client finds out before it trains, given what the server sends it."""
    shard = make_shard(federation, client, 32, Draws(0, "train", 9))
    return method.before_training(
        state.server, state.client(client) | more, net.bind({"main": {}}, True), shard
    )


def offer(models):
    """Candidates 1, 2, ... of these models."""
    sent = {
        "model": tree.stack(models),
        "statistics": {},
        "number": torch.arange(1, len(models) + 1),
    }
    return {"sent": sent, "there": torch.ones(len(models), dtype=torch.bool)}


def loss(method, net, federation, model, client):
    shard = make_shard(federation, client, 32, Draws(0, "train", 9))
    return float(validation_loss(net.bind({"main": {}}), model, {}, shard))


def test_the_last_training_is_undone_where_it_did_not_help(net, held, played):
    """Alone a client starts from its old model or its new one, and the loss on V_i of where it
    starts never rises.
    """
    method, undone = FedFomo(candidates=0), set()
    states = played(method)
    for client in OFTEN[0]:
        losses = []
        for before, after in itertools.pairwise(states[1:]):
            start = client_row(after.clients["old"]["model"], client)
            old, new = (
                client_row(before.clients["old"]["model"], client),
                client_row(before.clients["model"], client),
            )
            undone.add(not differing(start, old))
            assert_same(start, old) if not differing(start, old) else assert_same(start, new)
            losses.append(loss(method, net, held, start, client))
        assert losses == sorted(losses, reverse=True)
    assert False in undone


def test_a_client_that_has_nothing_held_out_keeps_its_model(net, held, played):
    """Else its training would be undone each time, for want of a gain."""
    state = record_states(FedFomo(), net, held, [[2, 8], [2, 8]])[-1]
    assert not len(held.validation[8])
    assert_same(
        client_row(state.clients["old"]["model"], 8),
        client_row(record_states(FedFomo(), net, held, [[2, 8]])[-1].clients["model"], 8),
    )


@pytest.mark.parametrize("fallback", ["baseline", "keep"])
def test_weights(fallback, net, held, played):
    method = FedFomo(candidates=2, fallback=fallback)
    state = played(method)[1]
    own = state.client(2)
    old, new = own["old"]["model"], own["model"]
    better = played(LocalOnly())[3].client(2)["model"]
    worse = tree.map(lambda leaf: -3 * leaf, old)
    gain = {
        k: loss(method, net, held, old, 2) - loss(method, net, held, m, 2)
        for k, m in (("b", better), ("n", new))
    }
    w = {
        k: gain[k] / float(tree.squared_distance(m, old).sqrt())
        for k, m in (("b", better), ("n", new))
    }
    assert min(w.values()) > 0

    found = begun(method, net, held, state, 2, **offer([better, worse]))
    share = w["b"] / (w["b"] + w["n"])
    assert_close(
        found["begun"]["model"], tree.map(lambda b, n: share * b + (1 - share) * n, better, new)
    )
    assert_close(found["gains"][:2], torch.tensor([w["n"], w["b"]]), rtol=1e-4)
    assert float(found["affinity"][1]) == pytest.approx(w["b"], rel=1e-4)
    assert found["affinity"][2] < 0  # as it is, below 0 too
    assert found["affinity"][3:].tolist() == [0.0] * 7

    bad = state.client(2) | {"model": worse} | offer([better, worse])
    assert_same(
        begun(method, net, held, state, 2, **bad)["begun"]["model"], better
    )  # the only positive weight
    twins = begun(method, net, held, state, 2, **offer([better, better]))["gains"]
    assert twins[1] == twins[2]
    none = state.client(2) | {"model": worse} | offer([worse, old])
    found = begun(method, net, held, state, 2, **none)
    assert_same(found["begun"]["model"], old if fallback == "baseline" else worse)
    assert found["gains"][2] == 0


def candidates(affinity, pool, i=0, explore=0.0, count=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return choose_candidates(
        torch.tensor(pool), torch.tensor(affinity), i, count, explore, generator
    )


def test_candidates_are_those_of_largest_affinity_or_any():
    pool, affinity = [True] * 5 + [False], [9.0, 0.3, -1.0, 0.7, 0.0, 8.0]
    assert candidates(affinity, pool) == [
        3,
        1,
        4,
    ]  # neither the client itself nor who did not train
    assert candidates(affinity, pool, count=9) == [3, 1, 4, 2]
    assert candidates(affinity, [False] * 6) == []
    drawn = [candidates(affinity, pool, explore=1.0, seed=seed) for seed in range(60)]
    assert all(sorted(set(own)) == sorted(own) and set(own) <= {1, 2, 3, 4} for own in drawn)
    assert {own[0] for own in drawn} == {1, 2, 3, 4}
    ties = [candidates([0.0] * 6, pool, count=1, seed=seed)[0] for seed in range(60)]
    assert set(ties) == {1, 2, 3, 4}


def test_exploration_ends(net, held):
    """After six rounds of 0.3 - 0.05 t; the numbers that a client is sent do not depend on its
    cohort.
    """
    method, seen = FedFomo(candidates=1, explore=1.0, decay=0.5), []
    for played, wanted in ((0, False), (2, True)):
        server = {"pool": torch.ones(10, dtype=torch.bool), "played": torch.tensor(played)}
        affinity = torch.zeros(10, 10).index_fill(1, torch.tensor([7]), 1.0)
        states = {
            "number": torch.arange(10),
            "affinity": affinity,
            "model": net.params["fc.bias"].expand(10, -1),
        }
        states |= {"statistics": {"main": {}}, "participated": torch.ones(10, dtype=torch.bool)}
        others = lambda numbers, states=states: tree.take(states, torch.tensor(numbers))  # noqa: E731
        for cohort in ([0, 1, 2, 3], [3, 0]):
            given = tree.take(states, torch.tensor(cohort))
            found = method.before_turn(server, given, others, torch.Generator().manual_seed(1))
            seen.append(dict(zip(cohort, found["sent"]["number"][:, 0].tolist(), strict=True)))
        assert seen[-1] == {i: seen[-2][i] for i in (3, 0)}
        assert (set(seen[-2].values()) == {7}) == wanted
