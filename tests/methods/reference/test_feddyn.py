"""FedDyn's whole rounds against plain loops with the paper's g_i and h, and a problem whose optimum
is known.
"""

from functools import cache

import pytest

from fedpfl.ground import tree
from fedpfl.methods import FedDyn
from tests.conftest import assert_close, client_row, record_rounds
from tests.methods.reference.conftest import SEED
from tests.methods.reference.feddyn import feddyn


@pytest.fixture(scope="module")
def expected(setting):
    return cache(lambda *values: feddyn(setting, *values))


@pytest.mark.parametrize("values", [(0.1,), (1.0, "cohort"), (0.5, "all")])
def test_three_rounds_equal_the_plain_loops(values, backend, expected, net, federation):
    """Rounding only; the server's step divides by alpha in the loops and not in the method: 2e-6."""
    (want, gradients), method = expected(*values), FedDyn(*values)
    states, outcomes = record_rounds(method, net, federation, engine=backend, seed=SEED)
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        assert_close(state.server["model"], want.shared[t], atol=2e-6, rtol=0)
        for client, personal in enumerate(want.personal[t]):
            assert_close(
                method.personal(state.server, state.client(client)), personal, atol=2e-6, rtol=0
            )
            own = tree.map(lambda lam: -values[0] * lam, client_row(state.clients["dual"], client))
            assert_close(own, gradients[t][client], atol=2e-6, rtol=0)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]
