"""APFL's whole rounds against plain loops: ragged clients, momentum, weight decay, half the clients
a round.
"""

from functools import cache

import pytest
import torch

from fedpfl.methods import APFL, Batch
from tests.conftest import assert_close, client_row, record_rounds
from tests.methods.reference import apfl
from tests.methods.reference.conftest import SEED

CASES = {
    "output": (APFL(alpha_lr=0.5), (0.5, "output", 0.5, 0.02)),
    "param": (APFL(0.3, mixing="param", alpha_lr=0.2, alpha_decay=0.1), (0.3, "param", 0.2, 0.1)),
    "fixed": (APFL(0.8, adaptive=False), (0.8, "output", 0.0, 0.0)),
}


@pytest.fixture(scope="module")
def expected(setting, normed):
    return cache(lambda name, norm: apfl.apfl(normed[1] if norm else setting, *CASES[name][1]))


@pytest.mark.parametrize(
    ("name", "norm"),
    [("output", False), ("param", False), ("fixed", False), ("output", True), ("param", True)],
)
def test_three_rounds_equal_the_plain_loops(
    name, norm, backend, expected, setting, normed, net, federation
):
    """Rounding only: 1e-6 for parameters of order 0.1, 5e-6 with BatchNorm, which divides by small
    spreads.
    """
    method, want, net = CASES[name][0], expected(name, norm), normed[0] if norm else net
    states, outcomes = record_rounds(method, net, federation, engine=backend, seed=SEED)
    tolerance = {"atol": 5e-6 if norm else 1e-6, "rtol": 1e-5 if norm else 0.0}
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        assert_close(state.server, {k: want.shared[t][k] for k in state.server}, **tolerance)
        assert_close(state.clients["alpha"], torch.tensor(want.alphas[t]), **tolerance)
        for client, private in enumerate(want.personal[t]):
            got = {
                **client_row(state.clients["v"], client),
                **client_row(state.client_buffers["v"], client),
            }
            assert_close(got, private, **tolerance)
            buffers = {
                "w": state.server_buffers["w"],
                "v": client_row(state.client_buffers["v"], client),
            }
            batch = Batch(setting.clients[client].test_x, None)
            logits = method.predict(
                net.bind(buffers), method.personal(state.server, state.client(client)), batch
            )
            assert_close(logits, want.logits[t][client], atol=2e-5, rtol=0)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]
    if method.adaptive:
        assert len(set(want.alphas[-1])) > 5
        assert all(0 < alpha < 1 for alpha in want.alphas[-1])
