"""FedPURIN's and FedCAC's rounds against plain loops: ragged clients, momentum, half the clients a
round.

Scores and overlaps are clear of their thresholds, so that no mask differs. Tolerance 1e-6 absolute,
of parameters of order 0.1.
"""

import dataclasses
from functools import cache

import pytest
import torch

from fedpfl.methods import FedCAC, FedPURIN
from tests.conftest import COHORTS, assert_close, client_row, record_rounds
from tests.methods.reference.conftest import SEED
from tests.methods.reference.fedpurin import purin

LONGER = [*COHORTS, [0, 2, 4, 8, 9]]
CAC = {"score": "delta", "dense_upload": True, "dense_judge": True}
NORMS = ("norm",)

CASES = {
    "fedpurin": (FedPURIN(beta=6), lambda s: purin(s, 0.5, 6, own=NORMS)),
    "fedpurin-alone": (FedPURIN(tau=0.2, beta=1), lambda s: purin(s, 0.2, 1, own=NORMS)),
    "fedpurin-delta": (
        FedPURIN(tau=0.7, beta=3, score="delta", judge="dense"),
        lambda s: purin(s, 0.7, 3, score="delta", dense_judge=True, own=NORMS),
    ),
    "fedpurin-hessian": (
        FedPURIN(tau=0.2, hessian=True, include_norm=True, cutoff=-1.0),
        lambda s: purin(s, 0.2, hessian=True, eps=-1.0),
    ),
    "fedcac": (FedCAC(beta=6), lambda s: purin(s, 0.5, 6, **CAC)),
    "fedcac-alone": (FedCAC(tau=0.1, beta=2), lambda s: purin(s, 0.1, 2, **CAC)),
    "fedcac-cutoff": (FedCAC(tau=0.9, cutoff=2e-4), lambda s: purin(s, 0.9, eps=2e-4, **CAC)),
}


@pytest.fixture(scope="module")
def expected(setting):
    longer = dataclasses.replace(setting, cohorts=LONGER)
    return cache(lambda name: CASES[name][1](longer))


@pytest.fixture(scope="module")
def expected_with_norm(normed):
    return cache(lambda name: CASES[name][1](normed[1]))


def clear(name, want):
    """Nothing lies so near a threshold that rounding could move it, and there is something to tell
    apart.
    """
    assert min(want.margins) > 1e-5, "choose another seed: rounding could change a mask"
    assert min(want.overlaps) > 1e-9, "choose another seed: rounding could change who collaborates"
    assert max(want.partners) > 0
    assert len(set(want.partners)) > 1


def agree(method, states, outcomes, want, names, atol):
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        server = state.server.get("model", state.server)
        assert_close(server, {name: want.shared[t][name] for name in server}, atol=atol, rtol=0.0)
        for client, personal in enumerate(want.personal[t]):
            own, buffers = state.client(client), client_row(state.client_buffers["main"], client)
            got = {**method.personal(state.server, own), **buffers}
            assert set(got) == set(names)
            assert_close(got, {name: personal[name] for name in got}, atol=atol, rtol=0.0)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]


@pytest.mark.parametrize("name", CASES)
def test_four_rounds_equal_the_plain_loops(name, backend, expected, net, federation):
    method, want = CASES[name][0], expected(name)
    clear(name, want)
    states, outcomes = record_rounds(method, net, federation, LONGER, engine=backend, seed=SEED)
    agree(method, states, outcomes, want, net.params, 1e-6)
    for t, cohort in enumerate(LONGER):
        own = slice(sum(map(len, LONGER[:t])), sum(map(len, LONGER[: t + 1])))
        assert states[t + 1].clients["partners"][cohort].tolist() == want.partners[own]
        counts = sum(
            leaf[cohort].flatten(1).sum(1) for leaf in states[t + 1].clients["mask"].values()
        )
        assert counts.tolist() == want.counts[own]


@pytest.mark.parametrize("name", ["fedpurin-delta", "fedpurin-alone", "fedcac"])
def test_with_batch_normalisation_whose_statistics_are_the_clients(
    name, backend, expected_with_norm, normed, federation
):
    method, want, net = CASES[name][0], expected_with_norm(name), normed[0]
    clear(name, want)
    states, outcomes = record_rounds(method, net, federation, COHORTS, engine=backend, seed=SEED)
    agree(method, states, outcomes, want, {**net.params, **net.buffers}, 5e-6)


@pytest.mark.full
def test_the_plain_loops_tell_the_methods_apart(expected):
    """Otherwise agreement would mean nothing."""
    last = {
        name: torch.cat([w.flatten() for w in expected(name).personal[-1][2].values()])
        for name in CASES
    }
    names = list(last)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert (last[a] - last[b]).abs().max() > 1e-4, (a, b)
