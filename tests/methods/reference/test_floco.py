"""FLOCO's and FLOCO+'s rounds against plain loops, across the projection.

Tolerance 1e-5: centres come from the singular vectors of 10 clients' small differences.
"""

from functools import cache

import pytest

from fedpfl.engine.keys import Draws
from fedpfl.methods import Floco, FlocoPlus
from tests.conftest import assert_close, record_rounds
from tests.methods.reference.conftest import SEED
from tests.methods.reference.floco import WEIGHT, floco


@pytest.fixture(scope="module")
def expected(setting, net):
    def order(t, i, epoch, samples):
        return Draws(SEED, "gather", t).order(i, "main", epoch, samples)

    @cache
    def get(method, plus):
        def random(purpose):
            draws = method.endpoints + 1
            return lambda t, i, epoch, steps: Draws(SEED, purpose, t).random(
                i, "main", epoch, steps, draws
            )

        ends = method.init(net.params, net.parts)[0]["endpoints"][WEIGHT]
        return floco(
            setting, ends, method.tau, method.rho, random("train"), order, random("gather"), plus
        )

    return get


@pytest.mark.parametrize(
    ("method", "plus"),
    [
        (Floco(endpoints=3, tau=1), None),
        (Floco(endpoints=4, tau=2, rho=0.5), None),
        (Floco(endpoints=3, tau=9), None),
        (FlocoPlus(endpoints=3, tau=1, pers_epochs=2, lam=0.7), (2, 0.7)),
        (FlocoPlus(endpoints=3, tau=1, pers_epochs=1), (1, 1.0)),
    ],
    ids=["early", "wide", "never", "plus", "plus-short"],
)
def test_three_rounds_equal_the_plain_loops(method, plus, backend, expected, net, federation):
    want = expected(method, plus)
    states, outcomes = record_rounds(method, net, federation, engine=backend, seed=SEED)
    after = iter(want.after)
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        got = {**state.server["shared"], **state.server["endpoints"]}
        assert_close(got, want.shared[t], atol=1e-5, rtol=0.0)
        for client, personal in enumerate(want.personal[t]):
            assert_close(
                method.personal(state.server, state.client(client)), personal, atol=1e-5, rtol=0.0
            )
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == [next(after) for _ in want.before[t]]
