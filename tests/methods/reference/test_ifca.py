"""IFCA's whole rounds against plain loops: all clusters' models, and which of them each client
takes.
"""

from functools import cache

import pytest
import torch

from fedpfl.engine import make_initial_state
from fedpfl.ground import tree
from fedpfl.methods import IFCA
from tests.conftest import CPU, assert_close, record_rounds
from tests.methods.reference.conftest import SEED, evaluated_weights
from tests.methods.reference.ifca import ifca

CASES = {
    "two": (IFCA(), False, ()),
    "three-norm": (IFCA(clusters=3), True, ()),
    "shared": (IFCA(clusters=3, layers=1), False, ("conv", "fc")),
}


def models(method, state):
    """Each cluster's parameters and statistics."""
    bank, shared = state.server, state.server["shared"]
    return [
        {**shared, **tree.take(bank["models"], j), **tree.take(bank["statistics"], j)}
        for j in range(method.clusters)
    ]


def uncounted(weights):
    """Without the number of batches, of which a mean means nothing."""
    return tree.drop(weights, ["norm.num_batches_tracked"])


@pytest.fixture(scope="module")
def expected(setting, normed, net):
    def play(name):
        method, norm, shared = CASES[name]
        own, given = normed if norm else (net, setting)
        return ifca(given, models(method, make_initial_state(method, own, 10, CPU)), shared)

    return cache(play)


@pytest.mark.parametrize("name", CASES)
def test_three_rounds_equal_the_plain_loops(name, backend, expected, normed, net, federation):
    (method, norm, _), want, net = CASES[name], expected(name), normed[0] if CASES[name][1] else net
    states, outcomes = record_rounds(method, net, federation, engine=backend, seed=SEED)
    tolerance = {"atol": 5e-6 if norm else 1e-6, "rtol": 1e-5 if norm else 0.0}
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        assert_close(
            [*map(uncounted, models(method, state))], [*map(uncounted, want.models[t])], **tolerance
        )
        for client, personal in enumerate(want.personal[t]):
            own = evaluated_weights(method, net, federation, state, client)
            assert_close(uncounted(own), uncounted(personal), **tolerance)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]
        shares = [outcome.metrics[f"cluster_{j + 1}"] for j in range(method.clusters)]
        assert shares == [
            pytest.approx(want.members[t].count(j) / 5) for j in range(method.clusters)
        ]
    assert min(want.margins) > 1e-5, (
        "choose another seed: two models are so near that rounding could choose"
    )
    assert len({j for members in want.members for j in members}) > 1, "one model won all clients"
    assert (
        not torch.equal(want.models[-1][0]["fc.weight"], want.models[-1][1]["fc.weight"])
        or CASES[name][2]
    )
