"""CFL's whole rounds against plain loops: splits of splits, rounds in which none may be, clients
without a step.
"""

import dataclasses
from functools import cache

import pytest

from fedpfl.methods import CFL
from tests.conftest import TEST, TRAIN, assert_close, make_federation, record_rounds
from tests.methods.reference.cfl import cfl
from tests.methods.reference.conftest import SEED, describe_setting, evaluated_weights

EVERYONE = list(range(10))
PLAYED = [EVERYONE, EVERYONE, [0, 1, 2, 4, 5, 8], EVERYONE, [1, 3, 4, 6, 7]]

CASES = {  # at lengths that split whatever may be split
    "single": (CFL(eps1=9.0, eps2=0.0, warmup=1), False),
    "complete": (CFL(eps1=9.0, eps2=0.0, warmup=1, linkage="complete", clusters=3), False),
    "lengths-norm": (CFL(eps1=0.25, eps2=0.3, warmup=0, linkage="complete"), True),
}


@pytest.fixture(scope="module")
def moving():
    """A federation in which everybody makes a step: who does not, has no direction."""
    return make_federation((*TRAIN[:-1], 12), TEST)


@pytest.fixture(scope="module")
def expected(moving, normed, net):
    def play(name):
        method, norm = CASES[name]
        module = normed[1].module if norm else describe_setting(net, moving).module
        given = dataclasses.replace(describe_setting(net, moving), module=module, cohorts=PLAYED)
        parameters = [k for k, _ in given.module.named_parameters()]
        return cfl(
            given,
            method.eps1,
            method.eps2,
            method.warmup,
            method.linkage,
            method.clusters,
            parameters,
        )

    return cache(play)


@pytest.mark.parametrize("name", CASES)
def test_rounds_equal_the_plain_loops(name, backend, expected, normed, net, moving):
    (method, norm), want, net = CASES[name], expected(name), normed[0] if CASES[name][1] else net
    states, outcomes = record_rounds(method, net, moving, PLAYED, engine=backend, seed=SEED)
    tolerance = {"atol": 5e-6 if norm else 1e-6, "rtol": 1e-5 if norm else 0.0}
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        of = state.server["cluster_of"].tolist()
        assert [
            [i for i in EVERYONE if of[i] == c] for c in range(int(state.server["count"]))
        ] == want.clusters[t]
        for client, personal in enumerate(want.personal[t]):
            assert_close(
                evaluated_weights(method, net, moving, state, client), personal, **tolerance
            )
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]
    counts = [len(clusters) for clusters in want.clusters]
    assert counts[2] == counts[1] > 1, "two of them are to split again"
    assert counts[-1] == {"single": 4, "complete": 3, "lengths-norm": 3}[name]
