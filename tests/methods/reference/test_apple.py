"""APPLE's whole rounds against plain loops: cores, directed relationships and mixtures."""

from functools import cache

import pytest
import torch

from fedpfl.methods import APPLE
from tests.conftest import assert_close, client_row, record_rounds
from tests.methods.reference.apple import apple
from tests.methods.reference.conftest import SEED, evaluated_weights

CASES = {
    "exponential": (APPLE(rate=0.5, mu=2.0, until=0.6), False),
    "cosine-norm": (APPLE(rate=2.0, mu=1.0, schedule="cosine", until=2.0), True),
    "still": (APPLE(rate=0.0), False),
}
ROUNDS = 3


@pytest.fixture(scope="module")
def expected(setting, normed):
    def play(name):
        m, norm = CASES[name]
        return apple(normed[1] if norm else setting, m.rate, m.mu, m.schedule, m.until, ROUNDS)

    return cache(play)


@pytest.mark.parametrize("name", CASES)
def test_three_rounds_equal_the_plain_loops(name, backend, expected, normed, net, federation):
    (method, norm), want, net = CASES[name], expected(name), normed[0] if CASES[name][1] else net
    states, outcomes = record_rounds(
        method, net.with_facts(rounds=ROUNDS), federation, engine=backend, seed=SEED
    )
    tolerance = {"atol": 5e-6 if norm else 1e-6, "rtol": 1e-5 if norm else 0.0}
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        took_part = state.rows.take("facts", range(10))["participated"]
        for client in range(10):
            assert_close(
                evaluated_weights(method, net, federation, state, client),
                want.personal[t][client],
                **tolerance,
            )
            own = state.client(client)
            assert_close(
                client_row(state.server["cores"], client), want.cores[t][client], **tolerance
            )
            p = own["p"] if took_part[client] else state.server["shares"]
            assert_close(p, torch.tensor(want.p[t][client]).float(), atol=1e-5, rtol=0.0)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]
