"""FedPHP's whole rounds against plain loops: ragged clients, momentum, weight decay, half the clients a round."""

from functools import cache

import pytest

from fedpfl.methods import FedPHP
from tests.conftest import assert_close, rounds, row
from tests.methods.reference.conftest import SEED
from tests.methods.reference.fedphp import fedphp

PLANNED = 7  # rounds; half the clients join each: int(3.5) times are expected


@pytest.fixture(scope="module")
def expected(setting, normed):
    return cache(lambda norm, *values: fedphp(normed[1] if norm else setting, *values, PLANNED))


@pytest.mark.parametrize(
    ("norm", "values"),
    [(False, ("kd", 0.1, 0.9)), (False, ("mmd", 0.6, 0.5)), (True, ("kd", 0.7, 0.9)), (True, ("mmd", 0.3, 0.9))],
)
def test_three_rounds_equal_the_plain_loops(norm, values, backend, expected, normed, net, federation):
    """Rounding only, which BatchNorm amplifies, and the kernels of a client whose two samples are much alike."""
    want, net = expected(norm, *values), (normed[0] if norm else net).told(rounds=PLANNED)
    method = FedPHP(*values, participation=0.5)
    states, outcomes = rounds(method, net, federation, engine=backend, seed=SEED)
    tolerance = {"atol": 2e-5 if method.transfer == "mmd" else 5e-6, "rtol": 1e-5}
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        assert_close(state.server["model"], {name: want.shared[t][name] for name in net.params}, **tolerance)
        for client, personal in enumerate(want.personal[t]):
            got = method.personal(state.server, state.client(client))
            assert_close(got, {name: personal[name] for name in net.params}, **tolerance)
            if norm and state.client(client)["trained"]:
                held = row(state.client_buffers["q"], client)
                del held["norm.num_batches_tracked"]
                assert_close(held, {name: personal[name] for name in held}, **tolerance)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]
