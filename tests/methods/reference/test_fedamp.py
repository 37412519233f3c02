"""FedAMP's and HeurFedAMP's whole rounds against plain loops."""

from functools import cache

import pytest

from fedpfl.methods import FedAMP
from tests.conftest import assert_close, rounds
from tests.methods.reference.conftest import SEED, judged
from tests.methods.reference.fedamp import fedamp

CASES = {  # at a sigma of the order of these networks' squared distances
    "fedamp": (FedAMP(sigma=0.3, pull=2.0), False),
    "fedamp-cloud-norm": (FedAMP(sigma=0.3, start_from="cloud", pool="last_round", pull=0.5), True),
    "heurfedamp": (FedAMP("heurfedamp", sigma=20.0, share=0.8, pull=1.0), False),
    "heurfedamp-cloud": (FedAMP("heurfedamp", sigma=50.0, share=0.6, pull=0.0, start_from="cloud"), False),
}


@pytest.fixture(scope="module")
def expected(setting, normed):
    def play(name):
        m, norm = CASES[name]
        given = normed[1] if norm else setting
        return fedamp(given, m.variant, m.sigma, m.share, m.pull, m.start_from == "cloud", m.pool == "last_round")

    return cache(play)


@pytest.mark.parametrize("name", CASES)
def test_three_rounds_equal_the_plain_loops(name, backend, expected, normed, net, federation):
    (method, norm), want, net = CASES[name], expected(name), normed[0] if CASES[name][1] else net
    states, outcomes = rounds(method, net, federation, engine=backend, seed=SEED)
    tolerance = {"atol": 5e-6 if norm else 1e-6, "rtol": 1e-5 if norm else 0.0}
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        for client, personal in enumerate(want.personal[t]):
            assert_close(judged(method, net, federation, state, client), personal, **tolerance)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]
    assert 0.05 < outcomes[-1].metrics["others_share"] < 0.9
