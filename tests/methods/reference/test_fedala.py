"""FedALA's rounds, and the models it is judged by, against plain loops."""

from functools import cache

import pytest

from fedpfl.engine.keys import Draws
from fedpfl.engine.training.shard import make_shard
from fedpfl.methods import FedALA
from tests.conftest import assert_close, record_rounds
from tests.methods.reference.conftest import SEED
from tests.methods.reference.fedala import fedala


@pytest.fixture(scope="module")
def expected(setting):
    def order(purpose):
        return lambda t, i: Draws(SEED, purpose, t).order(
            i, "weights", 0, len(setting.clients[i].y)
        )

    return cache(
        lambda method, layers: fedala(
            setting, layers, method.share, method.eta, order("train"), order("adapt")
        )
    )


@pytest.mark.parametrize(
    ("method", "layers"),
    [
        (FedALA(), ("classifier",)),
        (FedALA(eta=20.0, share=1.0), ("classifier",)),
        (FedALA(layers=2, eta=5.0), ("classifier", "fc")),
        (FedALA(layers=3), ("classifier", "fc", "conv")),
    ],
    ids=str,
)
def test_three_rounds_equal_the_plain_loops(method, layers, backend, expected, net, federation):
    want = expected(method, layers)
    states, outcomes = record_rounds(method, net, federation, engine=backend, seed=SEED)
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        assert_close(state.server, want.shared[t], atol=5e-6, rtol=0.0)
        for client, personal in enumerate(want.personal[t]):
            shard = make_shard(federation, client, 32, Draws(SEED, "adapt", t + 1))
            own = state.client(client)
            own |= method.before_evaluation(state.server, own, net.bind({"main": {}}), shard)
            assert_close(method.personal(state.server, own), personal, atol=5e-6, rtol=0.0)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]
