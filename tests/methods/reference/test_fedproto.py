"""FedProto against plain loops, in which a prototype is a row of a dict."""

import pytest

from fedpfl.engine import make_backend
from fedpfl.engine.calls import EvalCall
from fedpfl.methods import FedProto
from tests.conftest import CPU, as_engine, assert_close, record_rounds
from tests.methods.reference.conftest import SEED
from tests.methods.reference.fedproto import fedproto

CASES = [
    (1.0, "last_epoch", "uniform", "nearest"),
    (5.0, "all_epochs", "counts", "nearest_own"),
    (3.0, "final", "uniform", "head"),
]


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("values", CASES, ids=str)
def test_three_rounds_equal_the_plain_loops(
    values, norm, backend, setting, normed, net, federation
):
    net, setting = normed if norm else (net, setting)
    method, (want, prototypes, labels) = FedProto(*values), fedproto(setting, *values)
    states, outcomes = record_rounds(method, net, federation, engine=backend, seed=SEED)
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        assert state.server["seen"].tolist() == [c in prototypes[t] for c in range(5)]
        got = {str(c): state.server["mean"][c] for c in prototypes[t]}
        assert_close(got, {str(c): row for c, row in prototypes[t].items()}, atol=5e-6, rtol=1e-5)
        for client, weights in enumerate(want.personal[t]):
            own = state.client(client)["model"]
            assert_close(own, {name: weights[name] for name in own}, atol=5e-6, rtol=1e-5)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]
        tally = make_backend(as_engine(backend), net, CPU).evaluate(
            EvalCall(method, federation, state, list(range(10)))
        )
        right = [
            int((own == c.test_y).sum()) for own, c in zip(labels[t], setting.clients, strict=True)
        ]
        assert tally.correct.tolist() == right
