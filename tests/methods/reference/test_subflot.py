"""SubFLOT against small dense networks, linear programs and plain loops, three rounds, on both
backends.
"""

import copy
from dataclasses import replace

import pytest
import torch

from fedpfl.engine.keys import Draws
from fedpfl.methods import SubFLOT
from tests.conftest import LOCAL, assert_close, client_row, record_rounds, tiny
from tests.methods.reference.conftest import SEED
from tests.methods.reference.subflot import subflot

RATES = (0.0, 0.25, 0.5, 0.75)
COHORTS = [[0, 2, 3, 5, 9], [1, 2, 4, 6, 9], [2, 4, 5, 6, 9]]  # most come again


def rate(client: int) -> float:
    """Blocks of the ten clients: 3, 2, 3, 2."""
    return RATES[client * 4 // 10]


def drawn(t: int, client: int):
    """The highest of the lots that the server draws, layer by layer."""
    lots = torch.rand(16, generator=Draws(SEED, "train", t).server(client)).tolist()
    a, b = round(4 * (1 - rate(client))), round(12 * (1 - rate(client)))
    channels = sorted(sorted(range(4), key=lambda j: -lots[j])[:a])
    return channels, sorted(sorted(range(12), key=lambda j: -lots[4 + j])[:b])


def first(t: int, client: int):
    return list(range(round(4 * (1 - rate(client))))), list(range(round(12 * (1 - rate(client)))))


CASES = {
    "one": ("one", 0.5, 1.0, "random", {}),
    "balanced": ("balanced", 0.3, 0.5, "random", {}),
    "prefix": ("one", 0.8, 0.0, "prefix", {}),
    "no extraction": ("one", 0.5, 1.0, "random", {"otp": False}),
    "no aggregation": ("one", 0.5, 1.0, "random", {"ota": False}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, setting):
    """The network, the method, and the rounds by the plain loops."""
    mode, alpha, lam, initial, left_out = CASES[request.param]
    net = tiny(norm=True)
    net.params = {
        name: value * (0.1 if value.dim() > 1 else 1.0) for name, value in net.params.items()
    }
    # Neurons begin alike and learn fast, or all would be found where they began.
    module = copy.deepcopy(net.module)
    module.load_state_dict({**net.params, **net.buffers})
    world = replace(setting, module=module, cohorts=COHORTS, lr=0.3)
    want, elsewhere = subflot(
        world, drawn if initial == "random" else first, rate, alpha, lam, mode, **left_out
    )
    assert elsewhere > 0 or initial == "prefix"
    left_out = {"positions": "first", **left_out}
    method = SubFLOT(
        rates=RATES, assign="blocks", alpha=alpha, lam=lam, mode=mode, initial=initial, **left_out
    )
    return net, method, want


def test_subflot(case, backend, federation):
    net, method, want = case
    local = replace(LOCAL, lr=0.3)
    states, outcomes = record_rounds(
        method, net, federation, COHORTS, engine=backend, seed=SEED, local=local
    )
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        assert_close(state.server["model"], want.shared[t], atol=3e-6, rtol=0.0)
        for i, personal in enumerate(want.personal[t]):
            own = method.personal(state.server, state.client(i))
            assert_close(own, {name: personal[name] for name in own}, atol=3e-6, rtol=0.0)
            kept = client_row(state.client_buffers["main"], i)
            assert_close(kept, {name: personal[name] for name in kept}, atol=1e-5, rtol=1e-5)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]
