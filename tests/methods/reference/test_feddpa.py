"""FedDPA's rounds against plain loops; the threshold is clear of any score, so that rounding cannot change a mask.

Tolerance 1e-5: the gradient of a distance is a direction, which rounding turns where the distance is small.
"""

from functools import cache

import pytest

from fedpfl.engine.keys import Draws
from fedpfl.methods import FedDPA
from tests.conftest import assert_close, rounds
from tests.methods.reference.conftest import SEED
from tests.methods.reference.feddpa import feddpa


@pytest.fixture(scope="module")
def expected(setting):
    def order(t, client, epoch, samples):
        return Draws(SEED, "train", t).order(client, "personal", epoch, samples)

    return cache(lambda method, lams: feddpa(setting, method.rule, method.threshold, lams, order))


@pytest.mark.parametrize(
    ("method", "lams"),
    [
        (FedDPA(rule="quantile", train="joint"), None),
        (FedDPA(threshold=0.05, train="joint"), None),
        (FedDPA(threshold=0.05, lam1=0.5, lam2=0.3, clip=0.2), (0.5, 0.3, 0.2)),
    ],
    ids=["as_compared", "value", "paper"],
)
def test_three_rounds_equal_the_plain_loops(method, lams, backend, expected, net, federation):
    want = expected(method, lams)
    assert min(want.margins) > 1e-6, "choose another seed: rounding could cross the threshold"
    states, outcomes = rounds(method, net, federation, engine=backend, seed=SEED)
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        assert_close(state.server, want.shared[t], atol=1e-5, rtol=0.0)
        for client, personal in enumerate(want.personal[t]):
            assert_close(method.personal(state.server, state.client(client)), personal, atol=1e-5, rtol=0.0)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]
