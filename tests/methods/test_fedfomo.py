"""FedFomo (arXiv:2012.08565): how candidates are chosen, and how long they are explored."""

import pytest
import torch

from fedpfl.engine.keys import Draws
from fedpfl.engine.training.shard import make_shard
from fedpfl.ground import tree
from fedpfl.methods import FedFomo
from fedpfl.methods.shared.pool import choose_candidates
from tests.conftest import assert_same, hold_out_quarter, record_states


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


def test_exploration_ends(net):
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


@pytest.mark.parametrize("fallback", ["baseline", "keep"])
def test_where_no_candidate_helps_a_client_falls_back(fallback, net, federation):
    """To where its last training began, or to what it has; weights below 0 are told as they are."""
    held, method = hold_out_quarter(federation), FedFomo(candidates=2, fallback=fallback)
    state = record_states(method, net, held, [[0, 2, 4]])[-1]
    client = state.client(2)
    old = client["old"]["model"]
    worse = tree.map(lambda leaf: -3 * leaf, old)
    numbers = torch.tensor([1, 3])
    candidates = {"model": tree.stack([worse, old]), "statistics": {}, "number": numbers}
    client |= {"model": worse, "sent": candidates, "there": torch.ones(2, dtype=torch.bool)}
    shard = make_shard(held, 2, 32, Draws(0, "train", 9))
    found = method.before_training(state.server, client, net.bind({"main": {}}, True), shard)
    assert_same(found["begun"]["model"], old if fallback == "baseline" else worse)
    assert found["gains"][2] == 0
    assert found["affinity"][1] < 0
