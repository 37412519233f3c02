"""FedFomo's whole rounds against plain loops, everybody a candidate: models, affinities, and what a
client undoes.
"""

import dataclasses
from functools import cache

import pytest
import torch

from fedpfl.methods import FedFomo
from tests.conftest import COHORTS, assert_close, hold_out_quarter, record_rounds
from tests.methods.reference.conftest import SEED, describe_setting, evaluated_weights
from tests.methods.reference.fedfomo import fedfomo

PLAYED = [*COHORTS, [0, 1, 2, 5, 8]]  # the third time for some

CASES = {
    "baseline": (FedFomo(candidates=9), False),
    "keep-all": (FedFomo(candidates=9, fallback="keep", pool="all"), False),
    "norm": (FedFomo(candidates=9, pool="all"), True),
}


@pytest.fixture(scope="module")
def held(federation):
    return hold_out_quarter(federation)


@pytest.fixture(scope="module")
def expected(held, normed, net):
    def play(name):
        method, norm = CASES[name]
        given = dataclasses.replace(describe_setting(net, held), cohorts=PLAYED)
        if norm:
            given = dataclasses.replace(given, module=normed[1].module)
        return fedfomo(given, method.fallback == "keep", method.pool == "all")

    return cache(play)


@pytest.mark.parametrize("name", CASES)
def test_four_rounds_equal_the_plain_loops(name, backend, expected, held, normed, net):
    (method, norm), want, net = CASES[name], expected(name), normed[0] if CASES[name][1] else net
    states, outcomes = record_rounds(method, net, held, PLAYED, engine=backend, seed=SEED)
    tolerance = {"atol": 1e-5 if norm else 2e-6, "rtol": 1e-5 if norm else 0.0}
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        for client, personal in enumerate(want.personal[t]):
            assert_close(evaluated_weights(method, net, held, state, client), personal, **tolerance)
        assert_close(
            state.clients["affinity"], torch.tensor(want.affinity[t]).double(), atol=1e-4, rtol=1e-3
        )
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]
    found = [weight for weight in want.weights if weight]
    assert min(map(abs, found)) > 1e-5, (
        "choose another seed: a weight is so near 0 that rounding could turn it"
    )
    assert min(found) < 0 < max(found)
