"""FLOCO's and FLOCO+'s rounds against plain loops, across the projection.

Tolerance 1e-5: centres come from the singular vectors of 10 clients' small differences.
"""

import pytest

from fedpfl.engine.keys import Draws
from fedpfl.methods import Floco
from tests.conftest import assert_close, rounds, row
from tests.reference.conftest import SEED
from tests.reference.floco import WEIGHT, floco


@pytest.mark.parametrize(
    ("values", "plus"),
    [
        ({"endpoints": 3, "tau": 1}, None),
        ({"endpoints": 4, "tau": 2, "rho": 0.5}, None),
        ({"endpoints": 3, "tau": 9}, None),
        ({"endpoints": 3, "tau": 1, "pers_epochs": 2, "lam": 0.7}, (2, 0.7)),
        ({"endpoints": 3, "tau": 1, "pers_epochs": 1}, (1, 1.0)),
    ],
    ids=str,
)
def test_three_rounds_equal_the_plain_loops(values, plus, backend, setting, net, federation):
    method = Floco(**values)
    states, outcomes = rounds(method, net, federation, engine=backend, seed=SEED)

    def random(purpose):
        return lambda t, i, epoch, steps: Draws(SEED, purpose, t).random(i, "main", epoch, steps, method.randoms)

    def order(t, i, epoch, samples):
        return Draws(SEED, "gather", t).order(i, "main", epoch, samples)

    ends = states[0].server["endpoints"][WEIGHT]
    want = floco(setting, ends, method.tau, method.rho, random("train"), order, random("gather"), plus)
    after = iter(want.after)
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        got = {**state.server["shared"], **state.server["endpoints"]}
        assert_close(got, want.shared[t], atol=1e-5, rtol=0.0)
        for client, personal in enumerate(want.personal[t]):
            assert_close(method.personal(state.server, row(state.clients, client)), personal, atol=1e-5, rtol=0.0)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == [next(after) for _ in want.before[t]]
