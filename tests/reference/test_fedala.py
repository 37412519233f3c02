"""FedALA's rounds, and the models it is judged by, against plain loops."""

import pytest

from fedpfl.engine.keys import Draws
from fedpfl.engine.shard import training_shard
from fedpfl.methods import FedALA
from tests.conftest import assert_close, rounds, row
from tests.reference.conftest import SEED
from tests.reference.fedala import fedala


@pytest.mark.parametrize(
    ("values", "layers"),
    [
        ({}, ("classifier",)),
        ({"eta": 20.0, "share": 1.0}, ("classifier",)),
        ({"layers": 2, "eta": 5.0}, ("classifier", "fc")),
        ({"layers": 3}, ("classifier", "fc", "conv")),
    ],
    ids=str,
)
def test_three_rounds_equal_the_plain_loops(values, layers, backend, setting, net, federation):
    method = FedALA(**values)

    def order(purpose, t, client):
        return Draws(SEED, purpose, t).order(client, "weights", 0, len(setting.clients[client].y))

    want = fedala(
        setting, layers, method.share, method.eta, lambda t, i: order("train", t, i), lambda t, i: order("adapt", t, i)
    )
    states, outcomes = rounds(method, net, federation, engine=backend, seed=SEED)
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        assert_close(state.server, want.shared[t], atol=5e-6, rtol=0.0)
        for client, personal in enumerate(want.personal[t]):
            shard = training_shard(federation, client, 32, Draws(SEED, "adapt", t + 1))
            mine = row(state.clients, client)
            mine |= method.adapt(net.bind({"main": {}}), shard, state.server, mine)
            assert_close(method.personal(state.server, mine), personal, atol=5e-6, rtol=0.0)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]
