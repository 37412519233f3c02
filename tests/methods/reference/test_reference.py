"""Whole rounds against the plain loops of `plain.py`: ragged clients, momentum, weight decay, half the clients a round.

Tolerance 1e-6 absolute after three rounds on both backends (parameters are of order 0.1): another memory layout of the
convolution and a float64 average in the reference leave rounding only.
"""

import dataclasses
from functools import cache

import pytest
import torch

from fedpfl.ground import tree
from fedpfl.methods import (
    Ditto,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedBABU,
    FedBN,
    FedOBP,
    FedPer,
    FedProx,
    FedRep,
    FedYogi,
    LGFedAvg,
    LocalOnly,
    Scaffold,
)
from tests.conftest import COHORTS, HEAD, LOCAL, assert_close, rounds, row
from tests.methods.reference import plain
from tests.methods.reference.conftest import SEED

TOLERANCE = {"atol": 1e-6, "rtol": 0.0}

METHODS = {
    "fedavg": (FedAvg(), plain.fedavg),
    "fedobp": (FedOBP(q=0.9), lambda s: plain.fedobp(s, 0.9)),
    "fedobp-few": (FedOBP(q=0.995, norm="none"), lambda s: plain.fedobp(s, 0.995)),
    "fedobp-most": (FedOBP(q=0.25), lambda s: plain.fedobp(s, 0.25)),
    "fedper": (FedPer(), lambda s: plain.fedper(s, HEAD)),
    "ditto": (Ditto(lam=0.7), lambda s: plain.ditto(s, 0.7, LOCAL.epochs)),
    "ditto-short": (Ditto(lam=0.7, personal_epochs=1), lambda s: plain.ditto(s, 0.7, 1)),
    "ditto-long": (Ditto(lam=2.0, personal_epochs=3), lambda s: plain.ditto(s, 2.0, 3)),
    "local_only": (LocalOnly(), plain.local_only),
    "lg_fedavg": (LGFedAvg(), lambda s: plain.lg_fedavg(s, ("classifier",))),
    "lg_fedavg-two": (LGFedAvg(layers=2), lambda s: plain.lg_fedavg(s, ("classifier", "fc"))),
    "lg_fedavg-as_published": (LGFedAvg(variant="as_published"), lambda s: plain.lg_fedavg(s, ("conv",))),
    "fedrep": (FedRep(), lambda s: plain.fedrep(s, HEAD, 1, 1)),
    "fedrep-long": (FedRep(body_epochs=2, head_epochs=3), lambda s: plain.fedrep(s, HEAD, 3, 2)),
    "fedbabu": (FedBABU(), lambda s: plain.fedbabu(s, HEAD)),
    "fedprox": (FedProx(mu=0.5), lambda s: plain.fedavg(s, mu=0.5)),
    "fedavgm": (FedAvgM(), lambda s: plain.fedopt(s, "avgm", 1.0, 0.9)),
    "fedavgm-slow": (FedAvgM(lr=0.3, momentum=0.5), lambda s: plain.fedopt(s, "avgm", 0.3, 0.5)),
    "fedadam": (FedAdam(), lambda s: plain.fedopt(s, "adam", 0.01, 0.9, 0.99, 0.001)),
    "fedadam-wide": (FedAdam(0.1, 0.5, 0.6, 0.05), lambda s: plain.fedopt(s, "adam", 0.1, 0.5, 0.6, 0.05)),
    "fedyogi": (FedYogi(), lambda s: plain.fedopt(s, "yogi", 0.01, 0.9, 0.99, 0.001)),
    "fedyogi-wide": (FedYogi(0.1, 0.5, 0.6, 0.05), lambda s: plain.fedopt(s, "yogi", 0.1, 0.5, 0.6, 0.05)),
}


def flat(server):
    """The model alone: FedBABU's server keeps the head apart, others an optimiser's moments."""
    return server.get("body", server.get("model", server))


@pytest.fixture(scope="module")
def expected(setting):
    return cache(lambda name: METHODS[name][1](setting))


@pytest.fixture(scope="module")
def expected_with_norm(normed):
    return cache(lambda loops, *values: loops(normed[1], *values))


@pytest.mark.parametrize("name", METHODS)
def test_three_rounds_equal_the_plain_loops(name, backend, expected, net, federation):
    method, want = METHODS[name][0], expected(name)
    states, outcomes = rounds(method, net, federation, engine=backend, seed=SEED)
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        server = flat(state.server)
        apart = set(HEAD) if name == "fedper" else set()  # its head never reaches the server
        assert_close(server, {key: value for key, value in want.shared[t].items() if key not in apart}, **TOLERANCE)
        for client, personal in enumerate(want.personal[t]):
            assert_close(method.personal(state.server, state.client(client)), personal, **TOLERANCE)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]


def test_batch_normalisation_is_torchs_and_its_statistics_are_averaged(backend, expected_with_norm, normed, federation):
    """Padded rows of the batched backend would show here: the reference has nn.BatchNorm2d and no padding."""
    want = expected_with_norm(plain.fedavg)
    states, outcomes = rounds(FedAvg(), normed[0], federation, engine=backend, seed=SEED)
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        got = {**state.server, **state.server_buffers["main"]}
        counted, expected = got.pop("norm.num_batches_tracked"), dict(want.shared[t])
        del expected["norm.num_batches_tracked"]
        assert_close(got, expected, atol=5e-6, rtol=1e-5)
        assert counted == (4, 10, 14)[t]  # the cohort's largest: two epochs of 2, 3 and 2 batches
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]


def test_local_batch_normalisation_stays_with_the_client(backend, expected_with_norm, normed, federation):
    want = expected_with_norm(plain.local_only)
    state = rounds(LocalOnly(), normed[0], federation, engine=backend, seed=SEED)[0][-1]
    assert state.server_buffers == {}
    for client, personal in enumerate(want.personal[-1]):
        got = {**row(state.clients["model"], client), **row(state.client_buffers["main"], client)}
        assert_close(got, {name: personal[name] for name in got}, atol=5e-6, rtol=1e-5)


def test_fedbn_and_fedrep_with_batch_normalisation(backend, expected_with_norm, normed, federation):
    want = expected_with_norm(plain.fedbn, ("norm",))
    state = rounds(FedBN(), normed[0], federation, engine=backend, seed=SEED)[0][-1]
    for client, personal in enumerate(want.personal[-1]):
        got = {**state.server, **row(state.clients["own"], client), **row(state.client_buffers["main"], client)}
        assert_close(got, {name: personal[name] for name in got}, atol=5e-6, rtol=1e-5)
    want = expected_with_norm(plain.fedrep, HEAD, 1, 1)
    state = rounds(FedRep(), normed[0], federation, engine=backend, seed=SEED)[0][-1]
    got = {**state.server, **state.server_buffers["main"]}
    del got["norm.num_batches_tracked"]
    assert_close(got, {name: want.shared[-1][name] for name in got}, atol=5e-6, rtol=1e-5)


def test_a_server_at_rest_takes_the_mean(net, federation):
    plain, own = (rounds(method, net, federation, seed=SEED)[0][-1] for method in (FedAvg(), FedAvgM(momentum=0.0)))
    assert_close(plain.server, own.server["model"], atol=1e-7, rtol=0.0)


@pytest.mark.parametrize(
    ("method", "values", "message"),
    [
        (FedAvgM, {"momentum": 1.0}, "momentum must be at least 0 and below 1"),
        (FedAvgM, {"lr": 0.0}, "lr must be a positive number"),
        (FedAdam, {"tau": 0.0}, "tau must be a positive number"),
        (FedYogi, {"beta2": 1.0}, "beta2 must be at least 0 and below 1"),
    ],
)
def test_server_optimisers_out_of_range(method, values, message):
    with pytest.raises(ValueError, match=message):
        method(**values)


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_scaffold_equals_its_formula(server_lr, backend, setting, net, federation):
    """Controls are gradients, ten times a step; the formula divides small differences by lr."""
    local = dataclasses.replace(LOCAL, momentum=0.0, weight_decay=0.0)
    want = plain.scaffold(setting, server_lr)
    method = Scaffold(server_lr=server_lr)
    states, outcomes = rounds(method, net, federation, engine=backend, seed=SEED, local=local)
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        assert_close(state.server["model"], want.shared[t], atol=2e-6)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]


@pytest.mark.parametrize("name", ["fedobp", "fedobp-few", "fedobp-most"])
def test_fedobp_thresholds_are_clear_of_any_score_and_counts_agree(name, expected, net, federation):
    want = expected(name)
    assert min(want.margins) > 1e-5, (
        "choose another seed: a score is so near the threshold that rounding could cross it"
    )
    _, outcomes = rounds(METHODS[name][0], net, federation, seed=SEED)
    personal = [
        tree.size(net.params) * len(COHORTS[t]) - outcome.sent.values_down for t, outcome in enumerate(outcomes)
    ]
    assert personal == [sum(want.counts[5 * t : 5 * t + 5]) for t in range(3)]
    assert sum(personal) > 0


def test_the_plain_loops_tell_the_methods_apart(expected):
    """Otherwise agreement would mean nothing."""
    last = {name: torch.cat([w.flatten() for w in expected(name).personal[-1][2].values()]) for name in METHODS}
    names = list(last)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert (last[a] - last[b]).abs().max() > 1e-4, (a, b)
