"""FlexFL against dense small networks, three rounds, on both backends."""

import copy
from dataclasses import replace

import pytest
import torch

from fedpfl.engine.keys import Draws
from fedpfl.methods import FlexFL
from tests.conftest import COHORTS, assert_close, client_row, record_rounds, tiny
from tests.methods.reference.conftest import SEED
from tests.methods.reference.flexfl import levels, play


def sent(t: int, client: int) -> int:
    return int(torch.randint(3, (), generator=Draws(SEED, "train", t).server(client)))


def device(client: int) -> int:
    """Four weak, three medium, three strong."""
    return 0 if client < 4 else 1 if client < 7 else 2


CASES = {"uniform-plain": (False, (), 10.0, 3.0), "apoz-norm": (True, (0.2, 0.7), 4.0, 1.5)}


@pytest.fixture(scope="module", params=CASES)
def case(request, setting):
    """The network, the method, the levels and the rounds by the plain loops."""
    norm, apoz, gamma, temperature = CASES[request.param]
    net = tiny(norm=norm)
    module = copy.deepcopy(net.module)
    module.load_state_dict({**net.params, **net.buffers})
    s = replace(setting, module=module)
    nested = levels(s, apoz or (0.0, 0.0), (0.25, 0.5, 1.0), 0.05)
    method = FlexFL(apoz=apoz, gamma=gamma, temperature=temperature)
    return net, method, nested, play(s, nested, sent, device, gamma, temperature)


def test_clients_train_all_levels():
    assert {min(sent(t, i), device(i)) for t, cohort in enumerate(COHORTS, 1) for i in cohort} == {
        0,
        1,
        2,
    }


def test_flexfl(case, backend, federation):
    net, method, nested, want = case
    states, outcomes = record_rounds(method, net, federation, engine=backend, seed=SEED)
    for level, (channels, units) in zip(states[0].server["levels"], nested, strict=True):
        assert level[:4].nonzero().flatten().tolist() == channels
        assert level[4:16].nonzero().flatten().tolist() == units
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        shared = {name: want.shared[t][name] for name in state.server["model"]}
        assert_close(state.server["model"], shared, atol=2e-6, rtol=0.0)
        for i, personal in enumerate(want.personal[t]):
            own = method.personal(state.server, state.client(i))
            assert_close(own, {name: personal[name] for name in own}, atol=2e-6, rtol=0.0)
            kept = client_row(state.client_buffers["main"], i)
            assert_close(kept, {name: personal[name] for name in kept}, atol=1e-5, rtol=1e-5)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]
