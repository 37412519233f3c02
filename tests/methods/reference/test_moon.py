"""MOON's whole rounds against plain loops: ragged clients, momentum, weight decay, half the clients a round."""

from functools import cache

import pytest

from fedpfl.methods import Moon
from tests.conftest import assert_close, rounds, row
from tests.methods.reference.conftest import SEED
from tests.methods.reference.moon import moon


@pytest.fixture(scope="module")
def expected(setting, normed):
    return cache(lambda norm, *values: moon(normed[1] if norm else setting, *values))


@pytest.mark.parametrize(("norm", "values"), [(False, (1.0, 0.5)), (False, (5.0, 0.2)), (True, (5.0, 0.2))])
def test_three_rounds_equal_the_plain_loops(norm, values, backend, expected, normed, net, federation):
    """Rounding only: 1e-6 for parameters of order 0.1, 5e-6 with BatchNorm, which divides by small spreads."""
    want, net = expected(norm, *values), normed[0] if norm else net
    states, outcomes = rounds(Moon(*values), net, federation, engine=backend, seed=SEED)
    tolerance = {"atol": 5e-6 if norm else 1e-6, "rtol": 1e-5 if norm else 0.0}
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        got = {**state.server, **state.server_buffers["main"]}
        got.pop("norm.num_batches_tracked", None)
        assert_close(got, {name: want.shared[t][name] for name in got}, **tolerance)
        for client, last in enumerate(want.personal[t]):
            got = {**row(state.clients["last"], client), **row(state.client_buffers["last"], client)}
            got.pop("norm.num_batches_tracked", None)
            assert_close(got, {name: last[name] for name in got}, **tolerance)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]
