"""pFedMe's whole rounds against plain loops: ragged clients, half of them a round."""

import dataclasses

import pytest
from torch import nn

from fedpfl.methods import PFedMe
from tests.conftest import Tiny, assert_close, record_rounds, tiny
from tests.methods.reference import pfedme
from tests.methods.reference.conftest import SEED

CASES = {
    "defaults-norm": (True, PFedMe(), (15.0, 5, 0.01, 0.005, 0.001), 1.0, True),
    "samples-plain": (
        False,
        PFedMe(
            lam=8.0,
            inner_steps=2,
            inner_lr=0.09,
            outer_lr=0.05,
            beta=1.5,
            mu=0.01,
            average="samples",
        ),
        (8.0, 2, 0.09, 0.05, 0.01),
        1.5,
        False,
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, setting):
    """The network, the method, and the rounds by the plain loops."""
    norm, method, values, beta, uniform = CASES[request.param]
    net = tiny(norm)
    if norm:
        module = Tiny()
        module.norm = nn.BatchNorm2d(4)
        module.load_state_dict({**net.params, **net.buffers})
        setting = dataclasses.replace(setting, module=module)
    named = dict(zip(("lam", "inner_steps", "delta", "eta", "mu"), values, strict=True))
    return net, method, pfedme.pfedme(setting, beta, uniform, **named)


def test_three_rounds_equal_the_plain_loops(case, backend, federation):
    """Rounding only: 1e-6 for parameters of order 0.1, 5e-6 with BatchNorm, which divides by small
    spreads.
    """
    net, method, want = case
    norm = bool(net.buffers)
    states, outcomes = record_rounds(method, net, federation, engine=backend, seed=SEED)
    tolerance = {"atol": 5e-6 if norm else 1e-6, "rtol": 1e-5 if norm else 0.0}
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        statistics = {
            k: v for k, v in state.server_buffers["main"].items() if v.is_floating_point()
        }
        got = {**state.server, **statistics}
        assert_close(got, {k: want.shared[t][k] for k in got}, **tolerance)
        for client, personal in enumerate(want.personal[t]):
            got = {**method.personal(state.server, state.client(client)), **statistics}
            assert_close(got, {k: personal[k] for k in got}, **tolerance)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]
