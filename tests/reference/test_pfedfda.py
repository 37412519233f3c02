"""pFedFDA's rounds against plain loops that solve for every head anew.

Tolerances: 1e-4 for statistics and logits, since the search for beta stops where its steps are that small; 2e-6 for
the body, which does not see the result before the next round.
"""

import torch

from fedpfl.engine import begin, make
from fedpfl.engine.keys import Draws
from fedpfl.engine.shard import training_shard
from fedpfl.methods import PFedFDA
from fedpfl.methods.pfedfda import unpacked
from tests.conftest import CLASSES, CPU, LOOP, assert_close, rounds, row
from tests.reference.conftest import SEED
from tests.reference.pfedfda import pfedfda


def test_three_rounds_equal_the_plain_loops(backend, setting, net, federation):
    method = PFedFDA()
    states, _ = rounds(method, net, federation, engine=backend, seed=SEED)
    servers, logits = pfedfda(setting, states[0].server["mean"], CLASSES)
    for t, state in enumerate(states[1:]):
        got = {"mean": state.server["mean"], "cov": unpacked(state.server["cov"])}
        assert_close(got, {part: servers[t][part] for part in got}, atol=1e-4, rtol=1e-4)
        body = {name: servers[t]["body"][name] for name in state.server["body"]}
        assert_close(state.server["body"], body, atol=1e-5 if t else 2e-6, rtol=0.0)
        for client in range(10):
            shard = training_shard(federation, client, 32, Draws(0, "adapt", t))
            mine = row(state.clients, client)
            mine |= method.adapt(net.bind({"main": {}}), shard, state.server, mine)
            params = method.personal(state.server, mine)
            x = setting.clients[client].test_x
            assert_close(method.predict(net.bind({"main": {}}), params, x), logits[t][client], atol=1e-3, rtol=1e-3)


def test_judging_uses_those_heads(backend, setting, net, federation):
    method = PFedFDA()
    state = rounds(method, net, federation, engine=backend, seed=SEED)[0][-1]
    _, logits = pfedfda(setting, begin(method, net, 10, CPU).server["mean"], CLASSES)
    tally = make(LOOP, net, CPU).evaluate(method, federation, state, list(range(10)))
    hits = [
        int((own.argmax(1) == client.test_y).sum()) for own, client in zip(logits[-1], setting.clients, strict=True)
    ]
    assert tally.correct.tolist() == hits
    assert sum(hits) > 0.5 * int(torch.as_tensor([len(c.test_y) for c in setting.clients]).sum())
