"""FedRoD, FLUTE and FedPAC against plain loops."""

from functools import cache

import pytest

from fedpfl.methods import FLUTE, FedPAC, FedRoD
from tests.conftest import CLASSES, LOCAL, assert_close, record_rounds
from tests.methods.reference import heads
from tests.methods.reference.conftest import SEED

TOLERANCE = {
    "atol": 2e-6,
    "rtol": 0.0,
}  # regularisers and mixtures add a rounding or two to a step's


@pytest.fixture(scope="module")
def expected(setting, normed):
    return cache(
        lambda loops, *values, norm=False: loops(normed[1] if norm else setting, *values, CLASSES)
    )


def agree(method, want, states, outcomes, body, **tolerance):
    """After every round the shared part, every client's model and the cohort's hits."""
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        assert_close(body(state.server), want.shared[t], **tolerance)
        for client, personal in enumerate(want.personal[t]):
            assert_close(method.personal(state.server, state.client(client)), personal, **tolerance)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_fedrod(gamma, backend, expected, net, federation):
    method = FedRoD(gamma=gamma)
    want, kept = expected(heads.fedrod, gamma)
    states, outcomes = record_rounds(method, net, federation, engine=backend, seed=SEED)
    agree(method, want, states, outcomes, dict, **TOLERANCE)
    for state, own in zip(states[1:], kept, strict=True):
        for client, head in enumerate(own):
            judged = method.personal(state.server, state.client(client))["q"]
            if head:
                assert_close(judged, head, **TOLERANCE)
            else:
                assert not any(leaf.any() for leaf in judged.values())


@pytest.mark.parametrize(
    "values",
    [(0.25, 0.0025, 0.0005, 0.5, 1), (0.5, 0.01, 0.005, 0.0, 2), (0.0, 0.0, 0.01, 1.0, 1)],
    ids=str,
)
def test_flute(values, backend, expected, net, federation):
    method = FLUTE(*values)
    want = expected(heads.flute, *values)
    agree(
        method,
        want,
        *record_rounds(method, net, federation, engine=backend, seed=SEED),
        dict,
        **TOLERANCE,
    )


@pytest.mark.parametrize("values", [(1.0, 1, None, 0.1), (5.0, 2, 1, 0.02)], ids=str)
def test_fedpac(values, backend, expected, net, federation):
    lam, head_epochs, body_epochs, head_lr = values
    method = FedPAC(*values)
    want = expected(heads.fedpac, lam, head_epochs, body_epochs or LOCAL.epochs, head_lr)
    assert min(want.margins) > 1e-5, "choose another seed: rounding could drop a share or keep it"
    states, outcomes = record_rounds(method, net, federation, engine=backend, seed=SEED)
    agree(method, want, states, outcomes, lambda server: server["body"], atol=1e-5, rtol=0.0)


def test_flute_and_fedpac_with_batch_normalisation(backend, expected, normed, federation):
    runs = {
        FLUTE(): (expected(heads.flute, 0.25, 0.0025, 0.0005, 0.5, 1, norm=True), dict),
        FedPAC(): (
            expected(heads.fedpac, 1.0, 1, LOCAL.epochs, 0.1, norm=True),
            lambda server: server["body"],
        ),
    }
    for method, (want, body) in runs.items():
        state = record_rounds(method, normed[0], federation, engine=backend, seed=SEED)[0][-1]
        got = {**body(state.server), **state.server_buffers["main"]}
        del got["norm.num_batches_tracked"]
        assert_close(got, {name: want.shared[-1][name] for name in got}, atol=1e-5, rtol=1e-4)
