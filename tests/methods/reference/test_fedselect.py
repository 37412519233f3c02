"""FedSelect's rounds, update-magnitude personalisation's and SeqFedEDT's against plain loops.

Cuts between selected entries and others are clear of rounding, so that a mask cannot differ. Tolerance 1e-6 absolute,
of parameters of order 0.1; SeqFedEDT's model passes through 20 trainings in a row.
"""

import dataclasses
from functools import cache

import pytest
import torch

from fedpfl.engine.keys import Draws, generator
from fedpfl.methods import PSPFL, FedSelect, SeqFedEDT
from tests.conftest import COHORTS, assert_close, rounds, row
from tests.methods.reference.conftest import SEED
from tests.methods.reference.fedselect import fedselect, pspfl
from tests.methods.reference.seqfededt import seqfededt

LONGER = [*COHORTS, [0, 2, 4, 8, 9]]


def personal_order(t, client, epoch, samples):
    return Draws(SEED, "train", t).order(client, "personal", epoch, samples)


def turns(t, clients):
    return torch.randperm(clients, generator=generator(SEED, "turns", t)).tolist()


CASES = {
    "fedselect": (FedSelect(), lambda s: fedselect(s, personal_order, 0.25, 0.8)),
    "fedselect-half": (FedSelect(p=0.5, alpha=0.5), lambda s: fedselect(s, personal_order, 0.5, 0.5)),
    "fedselect-all": (
        FedSelect(p=0.3, scope="all", lr_v=0.02, lr_u=0.08),
        lambda s: fedselect(s, personal_order, 0.3, 0.8, scope="all", lr_v=0.02, lr_u=0.08),
    ),
    "fedselect-window": (
        FedSelect(p=0.4, delta="window", every=1),
        lambda s: fedselect(s, personal_order, 0.4, 0.8, "window", 1),
    ),
    "pspfl": (PSPFL(0.5), lambda s: pspfl(s, 0.5, "shared")),
    "pspfl-most": (PSPFL(0.1), lambda s: pspfl(s, 0.1, "shared")),
    "pspfl-all": (PSPFL(0.7, "all"), lambda s: pspfl(s, 0.7, "all")),
    "seqfededt": (SeqFedEDT(q=0.9), lambda s: seqfededt(s, turns, "squared", 0.9)),
    "seqfededt-most": (SeqFedEDT("importance", 0.3), lambda s: seqfededt(s, turns, "importance", 0.3)),
    "seqfededt-classifier": (
        SeqFedEDT("difference", 0.5, classifier_only=True),
        lambda s: seqfededt(s, turns, "difference", 0.5, "classifier"),
    ),
}


@pytest.fixture(scope="module")
def expected(setting):
    longer = dataclasses.replace(setting, cohorts=LONGER)
    return cache(lambda name: CASES[name][1](longer))


@pytest.fixture(scope="module")
def expected_with_norm(normed):
    return cache(lambda name: CASES[name][1](normed[1]))


@pytest.mark.parametrize("name", CASES)
def test_four_rounds_equal_the_plain_loops(name, backend, expected, net, federation):
    method, want = CASES[name][0], expected(name)
    assert min(want.margins) > (1e-4 if name.startswith("seq") else 1e-7), (
        "choose another seed: rounding could change a mask"
    )
    assert max(want.counts) > 0
    states, outcomes = rounds(method, net, federation, LONGER, engine=backend, seed=SEED)
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        assert_close(state.server, want.shared[t], atol=1e-6, rtol=0.0)
        for client, personal in enumerate(want.personal[t]):
            assert_close(method.personal(state.server, state.client(client)), personal, atol=1e-6, rtol=0.0)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]


@pytest.mark.parametrize("name", ["fedselect", "pspfl", "seqfededt"])
def test_with_batch_normalisation_whose_statistics_are_the_clients(
    name, backend, expected_with_norm, normed, federation
):
    method, want, net = CASES[name][0], expected_with_norm(name), normed[0]
    assert min(want.margins) > 1e-6, "choose another seed: rounding could change a mask"
    states, outcomes = rounds(method, net, federation, COHORTS, engine=backend, seed=SEED)
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        assert_close(state.server, {name: want.shared[t][name] for name in net.params}, atol=5e-6, rtol=1e-5)
        for client, personal in enumerate(want.personal[t]):
            own, buffers = state.client(client), row(state.client_buffers["main"], client)
            got = {**method.personal(state.server, own), **buffers}
            assert_close(got, {name: personal[name] for name in got}, atol=5e-6, rtol=1e-5)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]


def test_the_plain_loops_tell_the_methods_apart(expected):
    """Otherwise agreement would mean nothing."""
    last = {name: torch.cat([w.flatten() for w in expected(name).personal[-1][2].values()]) for name in CASES}
    names = list(last)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert (last[a] - last[b]).abs().max() > 1e-4, (a, b)
