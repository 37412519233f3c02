"""FedAS against plain loops."""

import pytest

from fedpfl.engine.keys import Draws
from fedpfl.methods import FedAS
from tests.conftest import assert_close, rounds
from tests.methods.reference.conftest import SEED
from tests.methods.reference.fedas import fedas

CASES = [
    (0.01, 1, "skip", "samples", "fisher", "stored"),
    (0.1, 2, "init", "samples", "fisher", "received"),
    (0.1, 1, "global", "means", "samples", "stored"),
]


def order(t, client, epoch, samples):
    return Draws(SEED, "train", t).order(client, "align", epoch, samples)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("values", CASES, ids=str)
def test_three_rounds_equal_the_plain_loops(values, norm, backend, setting, normed, net, federation):
    net, setting = normed if norm else (net, setting)
    method, want = FedAS(*values), fedas(setting, *values, order)
    states, outcomes = rounds(method, net, federation, engine=backend, seed=SEED)
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        assert_close(state.server, {name: want.shared[t][name] for name in state.server}, atol=5e-6, rtol=1e-5)
        for client, weights in enumerate(want.personal[t]):
            personal = method.personal(state.server, state.client(client))
            assert_close(personal, {name: weights[name] for name in personal}, atol=5e-6, rtol=1e-5)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]
