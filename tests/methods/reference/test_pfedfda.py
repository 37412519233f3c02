"""pFedFDA's rounds against plain loops that solve for every head anew.

Tolerances: 1e-4 for statistics and logits, since the search for beta stops where its steps are that
small; 2e-6 for the body, which does not see the result before the next round.
"""

from functools import cache

import pytest
import torch

from fedpfl.engine import make_backend
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.shard import make_shard
from fedpfl.methods import Batch, PFedFDA
from fedpfl.methods.shared.gaussian import unpack_symmetric
from tests.conftest import CLASSES, CPU, as_engine, assert_close, record_rounds
from tests.methods.reference.conftest import SEED
from tests.methods.reference.pfedfda import pfedfda

METHOD = PFedFDA()


@pytest.fixture(scope="module")
def expected(setting, net):
    """After every round the server's state, and all clients' logits."""
    return pfedfda(setting, METHOD.init(net.params, net.parts)[0]["mean"], CLASSES)


@pytest.fixture(scope="module")
def played(net, federation):
    return cache(
        lambda backend: record_rounds(METHOD, net, federation, engine=backend, seed=SEED)[0]
    )


def test_three_rounds_equal_the_plain_loops(backend, played, expected, setting, net, federation):
    states, (servers, logits) = played(backend), expected
    for t, state in enumerate(states[1:]):
        got = {"mean": state.server["mean"], "cov": unpack_symmetric(state.server["cov"])}
        assert_close(got, {part: servers[t][part] for part in got}, atol=1e-4, rtol=1e-4)
        body = {name: servers[t]["body"][name] for name in state.server["body"]}
        assert_close(state.server["body"], body, atol=1e-5 if t else 2e-6, rtol=0.0)
        for client in range(10):
            shard = make_shard(federation, client, 32, Draws(0, "adapt", t))
            own = state.client(client)
            own |= METHOD.before_evaluation(state.server, own, net.bind({"main": {}}), shard)
            params = METHOD.personal(state.server, own)
            told = METHOD.predict(
                net.bind({"main": {}}), params, Batch(setting.clients[client].test_x, None)
            )
            assert_close(told, logits[t][client], atol=1e-3, rtol=1e-3)


def test_judging_uses_those_heads(backend, played, expected, setting, net, federation):
    tally = make_backend(as_engine(backend), net, CPU).evaluate(
        EvalCall(METHOD, federation, played(backend)[-1], list(range(10)))
    )
    hits = [
        int((own.argmax(1) == client.test_y).sum())
        for own, client in zip(expected[1][-1], setting.clients, strict=True)
    ]
    assert tally.correct.tolist() == hits
    assert sum(hits) > 0.5 * int(torch.as_tensor([len(c.test_y) for c in setting.clients]).sum())
