"""HeteroFL and FedRolex against dense small networks, three rounds, on both backends."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from fedpfl.engine import Engine, make_backend
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.methods import FedRolex, HeteroFL
from fedpfl.models import Net
from tests.conftest import CPU, LOCAL, assert_close, client_row, record_rounds, tiny
from tests.methods.reference.conftest import SEED
from tests.methods.reference.heterofl import judged, play, seen
from tests.methods.reference.plain import Result, Setting
from tests.methods.reference.submodels import Sets, cut

WIDTHS = (0.3, 0.5, 0.8, 1.0)


def width(t: int, client: int) -> float:
    """Blocks of the ten clients: 3, 2, 3, 2."""
    return WIDTHS[client * 4 // 10]


def drawn(t: int, client: int) -> float:
    return WIDTHS[int(torch.randint(4, (), generator=Draws(SEED, "train", t).server(client)))]


def first(share: float) -> Sets:
    return list(range(math.ceil(share * 4 - 1e-9))), list(range(math.ceil(share * 12 - 1e-9)))


def rolled(t: int, client: int) -> Sets:
    """In the order of the window, which wraps."""
    a, b = (max(1, int(width(t, client) * m + 1e-9)) for m in (4, 12))
    return [(t - 1 + q) % 4 for q in range(a)], [(t - 1 + q) % 12 for q in range(b)]


def world(setting, norm: bool) -> tuple[Setting, Net]:
    """The setting, with or without BatchNorm, and the network."""
    net = tiny(norm=norm)
    module = copy.deepcopy(net.module)
    module.load_state_dict({**net.params, **net.buffers})
    return replace(setting, module=module), net


def fixed(t: int, client: int) -> Sets:
    return first(width(t, client))


def with_drawn_widths(s: Setting) -> Result:
    """By samples, nothing masked. Clients that never trained have what their device can hold."""
    assert drawn(1, 2) != width(1, 2) or drawn(2, 2) != width(2, 2)
    want = play(s, lambda t, i: first(drawn(t, i)), drawn, equal=False, masked=False)
    unseen = play(replace(s, cohorts=[[0]]), fixed, masked=False).personal[0]
    for t, personal in enumerate(want.personal, 1):
        for i in set(range(10)) - {i for earlier in s.cohorts[:t] for i in earlier}:
            personal[i] = unseen[i]
    return want


def clipped(s: Setting) -> Result:
    """By the norm of the small network's gradient."""
    want, free = play(s, fixed, clip=0.3), play(s, fixed)
    assert not torch.allclose(want.shared[0]["fc.weight"], free.shared[0]["fc.weight"], atol=1e-4)
    return want


CASES = {  # with BatchNorm?, the method, local training, the plain loops
    "scaler": (False, HeteroFL(widths=WIDTHS, scaler=True), LOCAL, lambda s: play(s, fixed, width)),
    "scaler-norm": (
        True,
        HeteroFL(widths=WIDTHS, scaler=True),
        LOCAL,
        lambda s: play(s, fixed, width),
    ),
    "norm": (True, HeteroFL(widths=WIDTHS), LOCAL, lambda s: play(s, fixed)),
    "widths drawn every round": (
        True,
        HeteroFL(widths=WIDTHS, dynamic=True, weighting="samples", masked=False, scaler=True),
        LOCAL,
        with_drawn_widths,
    ),
    "clipping": (True, HeteroFL(widths=WIDTHS), replace(LOCAL, clip=0.3), clipped),
    "fedrolex": (
        False,
        FedRolex(widths=WIDTHS, masked=False),
        LOCAL,
        lambda s: play(s, rolled, equal=False, masked=False),
    ),
    "fedrolex-extras-norm": (
        True,
        FedRolex(widths=WIDTHS, scaler=True, masked=True),
        LOCAL,
        lambda s: play(s, rolled, width, equal=False),
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, setting):
    """The network, the method, local training, and the rounds by the plain loops."""
    norm, method, local, loops = CASES[request.param]
    own, net = world(setting, norm)
    return net, method, local, loops(own)


def test_three_rounds_equal_the_plain_loops(case, backend, federation):
    net, method, local, want = case
    states, outcomes = record_rounds(
        method, net, federation, engine=backend, seed=SEED, local=local
    )
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        shared = {name: want.shared[t][name] for name in state.server["model"]}
        assert_close(state.server["model"], shared, atol=2e-6, rtol=0.0)
        for i, personal in enumerate(want.personal[t]):
            own = method.personal(state.server, state.client(i))
            own = own["model"] if method.masked else own
            assert_close(own, {name: personal[name] for name in own}, atol=2e-6, rtol=0.0)
            if state.client_buffers["main"]:
                kept = client_row(state.client_buffers["main"], i)
                assert_close(kept, {name: personal[name] for name in kept}, atol=1e-5, rtol=1e-5)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]


def test_some_clients_lack_classes(setting):
    assert sum(not seen(setting, i, True).all() for i in range(10)) > 3


def test_clients_are_judged_by_the_small_network_with_masked_logits(backend, setting, federation):
    """Those that never trained as well."""
    setting, net = world(setting, norm=True)
    setting = replace(setting, cohorts=setting.cohorts[:1])
    method = HeteroFL(widths=WIDTHS)
    want = play(setting, fixed)
    state = record_rounds(method, net, federation, setting.cohorts, engine=backend, seed=SEED)[0][
        -1
    ]
    runner = make_backend(Engine(backend), net, CPU)
    counts = runner.evaluate(EvalCall(method, federation, state, list(range(10))))
    expected, unmasked = [], []
    for i in range(10):
        own = first(width(1, i))
        small = cut(want.personal[-1][i], own)
        expected.append(judged(setting, own, small, i, True))
        unmasked.append(judged(setting, own, small, i, False)[1])
    correct, losses = zip(*expected, strict=True)
    assert counts.correct.tolist() == list(correct)
    assert counts.loss.tolist() == pytest.approx(losses, abs=1e-4)
    assert unmasked != pytest.approx(losses, abs=1e-2)
